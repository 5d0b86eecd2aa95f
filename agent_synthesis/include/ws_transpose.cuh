// Transposes through shared memory: values are computed in vectors along one axis, and what lies across, along the other axis,
// passes through tiles, so that every access is of neighbours.
//
// The one idea: in every phase the same threads move the same tile, in vectors of the axis that the phase's accesses lie
// along; only a barrier stands between two phases. An exclusive or with the row's number says where in its row of a tile a
// vector lies, so that a column is in all banks. What is loaded, computed and stored is the generated struct W's:
//
//   Offset                          int, or int64 where a buffer needs it
//   kTiling, Outer                  sizes, see below
//   Across, Along, Results          List of the vectors that are loaded across and along, and of those that are stored across
//   load(AcrossLoad<k>, at, i, j)   the k-th vector across, from element i on; load(AlongLoad<k>, …): along, from j on
//   compute(at, i, j, …)            of a vector along: gets the loads in order, a vector along each; stores what lies along,
//                                   and leaves in the last arguments what is to be stored across
//   store(AcrossStore<k>, at, i, j, vector)
//
// `at` holds coordinates along the axes that only count tiles (Outer), i lies across and j along.
#pragma once
#include "ws_axes.cuh"
#include "ws_vectors.cuh"

namespace ws {

struct TransposeTiling {
  int threads;                         // of a block, which has one tile
  int along, across;                   // elements of a tile, powers of two
  int vector_width, element_bytes;     // of what is computed and stored along
  int64 along_extent, across_extent;   // of the axes
  bool prefetch;                       // loads along are made before the exchange
  bool across_first;                   // the next block's tile lies across from this one's, and not along
  bool overlap;                        // programmatic dependent launch
};

// Which of the struct's loads and stores is meant.
template <int k> struct AcrossLoad {};
template <int k> struct AlongLoad {};
template <int k> struct AcrossStore {};

// kRows x kColumns elements, both powers of two. Along a row they move in vectors of kVector; down a column one by one, by
// threads that are kGroup rows apart.
template <class T, int kRows, int kColumns, int kVector, int kGroup> struct alignas(16) Tile {
  T elements[kRows * kColumns];

  static WS_INLINE unsigned place(unsigned row, unsigned column) {
    const unsigned turned = column / kVector ^ (row / kGroup % (kColumns / kVector));
    return row * kColumns + turned * kVector + column % kVector;
  }
  WS_INLINE T& at(int row, int column) { return elements[place(row, column)]; }
  WS_INLINE void put(int row, int column, const Pack<T, kVector>& vector) {
    *reinterpret_cast<Pack<T, kVector>*>(elements + place(row, column)) = vector;
  }
  WS_INLINE Pack<T, kVector> take(int row, int column) const {
    return *reinterpret_cast<const Pack<T, kVector>*>(elements + place(row, column));
  }
};

constexpr int kRequestBytes = 128;  // a line of the first-level cache: what neighbours of a warp read together at least

// A vector of a tile, by its first element.
struct Spot { int row, column; };

// How the threads of a block are spread over the vectors of kRows rows of kColumns elements: neighbours of a warp lie along a
// row, the others in the next rows.
template <int kThreads, int kRows, int kColumns, int kVector, int kElementBytes> struct Spread {
  static constexpr int kVectors = kColumns / kVector;  // of a row
  static constexpr int kItems = kVectors * kRows / kThreads;
  static constexpr int kLine = kRequestBytes / (kVector * kElementBytes);
  static constexpr int kLong = kLine > 8 ? kLine : 8;
  static constexpr int kShort = kVectors < 32 ? kVectors : 32;
  static constexpr int kWanted = kLong < kShort ? kLong : kShort;
  static constexpr int kBeside = kWanted > 32 / kRows ? kWanted : 32 / kRows;  // of few rows, a warp has more of each

  // Where the item-th vector of this thread begins.
  static WS_INLINE Spot at(int item) {
    const unsigned number = threadIdx.x + item * kThreads, warp = number / 32;
    const unsigned row = number / kBeside % (32 / kBeside) + 32 / kBeside * (warp / (kVectors / kBeside));
    const unsigned vector = number % kBeside + kBeside * (warp % (kVectors / kBeside));
    return {static_cast<int>(row), kVector * static_cast<int>(vector)};
  }
};

// Where vectors across meet those along: a row of the tile is of one j.
template <class W, class Vector> struct Exchange {
  static constexpr TransposeTiling kTiling = W::kTiling;
  using Element = typename OfVector<Vector>::Element;
  static constexpr int kWidth = OfVector<Vector>::kWidth;
  using Place = Spread<kTiling.threads, kTiling.along, kTiling.across, kWidth, sizeof(Element)>;
  using Memory = Tile<Element, kTiling.along, kTiling.across, kWidth, kTiling.vector_width>;
  using Along = Pack<Element, kTiling.vector_width>;

  static WS_INLINE Along read(Memory& tile, Spot place) {
    Along vector;
#pragma unroll
    for (int e = 0; e < kTiling.vector_width; ++e) vector[e] = tile.at(place.column + e, place.row);
    return vector;
  }
  static WS_INLINE void write(Memory& tile, Spot place, const Along& vector) {
#pragma unroll
    for (int e = 0; e < kTiling.vector_width; ++e) tile.at(place.column + e, place.row) = vector[e];
  }
};

// A tile for each of the vectors that are loaded or stored across.
template <class W, class Loads, class Results> struct TilesOf;
template <class W, class... Loads, class... Results> struct TilesOf<W, List<Loads...>, List<Results...>> {
  using Type = List<typename Exchange<W, Loads>::Memory..., typename Exchange<W, Results>::Memory...>;
};
template <class W> using TransposeTiles = typename TilesOf<W, typename W::Across, typename W::Results>::Type;

template <class W> struct Transpose {
  using Offset = typename W::Offset;
  using Across = typename W::Across;
  using Along = typename W::Along;
  using Results = typename W::Results;
  template <int k> using LoadExchange = Exchange<W, type_at<k, Across>>;
  template <int k> using ResultExchange = Exchange<W, type_at<k, Results>>;
  static constexpr TransposeTiling kTiling = W::kTiling;
  static constexpr unsigned kAlongTiles = (kTiling.along_extent + kTiling.along - 1) / kTiling.along;
  static constexpr unsigned kAcrossTiles = (kTiling.across_extent + kTiling.across - 1) / kTiling.across;
  static constexpr bool kRaggedAlong = kTiling.along_extent % kTiling.along != 0;
  static constexpr bool kRaggedAcross = kTiling.across_extent % kTiling.across != 0;
  static constexpr Offset kAlongExtent = kTiling.along_extent, kAcrossExtent = kTiling.across_extent;
  using Place = Spread<kTiling.threads, kTiling.across, kTiling.along, kTiling.vector_width, kTiling.element_bytes>;

  const W& computation;
  TransposeTiles<W>& tiles;
  Offset at[W::Outer::kCount];
  Offset i_tile, j_tile;
  static constexpr int kElements = kTiling.along * kTiling.across / kTiling.threads;
  held_of_each<kElements, Across> across;
  held_of_each<kElements, Along> along;

  WS_INLINE Transpose(const W& given, TransposeTiles<W>& memory, unsigned block) : computation(given), tiles(memory) {
    constexpr unsigned kInner = kTiling.across_first ? kAcrossTiles : kAlongTiles;
    constexpr unsigned kOuter = kTiling.across_first ? kAlongTiles : kAcrossTiles;
    const unsigned inner = block % kInner;
    const unsigned above = kOuter > 1 ? block / kInner : 0;
    const unsigned outer = W::Outer::points() > 1 ? above % kOuter : above;
    i_tile = kTiling.across * static_cast<Offset>(kTiling.across_first ? inner : outer);
    j_tile = kTiling.along * static_cast<Offset>(kTiling.across_first ? outer : inner);
    W::Outer::template locate<int64{kInner} * kOuter>(block, at);
    if constexpr (kRaggedAlong || kRaggedAcross) across = {}, along = {};
  }

  // Whether a vector of a tile that hangs over an end is no data.
  static WS_INLINE bool is_outside(Offset i, Offset j) {
    if constexpr (kRaggedAcross && kRaggedAlong) return i >= kAcrossExtent || j >= kAlongExtent;
    else if constexpr (kRaggedAcross) return i >= kAcrossExtent;
    else if constexpr (kRaggedAlong) return j >= kAlongExtent;
    else return false;
  }

  template <int k = 0> WS_INLINE void load_across() {
    if constexpr (k < Across::kCount) {
      auto& held = across.template get<k>();
#pragma unroll
      for (int item = 0; item < held.kItems; ++item) {
        const Spot place = LoadExchange<k>::Place::at(item);
        const Offset i = i_tile + place.column, j = j_tile + place.row;
        if (is_outside(i, j)) continue;
        held.item[item] = computation.load(AcrossLoad<k>{}, at, i, j);
      }
      load_across<k + 1>();
    }
  }

  template <int k = 0> WS_INLINE void load_along() {
    if constexpr (k < Along::kCount) {
      auto& held = along.template get<k>();
#pragma unroll
      for (int item = 0; item < held.kItems; ++item) {
        const Spot place = Place::at(item);
        const Offset i = i_tile + place.row, j = j_tile + place.column;
        if (is_outside(i, j)) continue;
        held.item[item] = computation.load(AlongLoad<k>{}, at, i, j);
      }
      load_along<k + 1>();
    }
  }

  template <int k = 0> WS_INLINE void put_into_tiles() {
    if constexpr (k < Across::kCount) {
      auto& held = across.template get<k>();
#pragma unroll
      for (int item = 0; item < held.kItems; ++item) {
        const Spot place = LoadExchange<k>::Place::at(item);
        tiles.template get<k>().put(place.row, place.column, held.item[item]);
      }
      put_into_tiles<k + 1>();
    }
  }

  // One vector along: `given` grows by the loads across, the loads along and the results, in this order.
  template <int k = 0, class... Given>
  WS_INLINE void compute(Spot place, int item, Offset i, Offset j, Given&... given) {
    constexpr int kLoad = k - Across::kCount, kResult = kLoad - Along::kCount;
    if constexpr (k < Across::kCount) {
      auto vector = LoadExchange<k>::read(tiles.template get<k>(), place);
      compute<k + 1>(place, item, i, j, given..., vector);
    } else if constexpr (kLoad < Along::kCount && kTiling.prefetch) {
      compute<k + 1>(place, item, i, j, given..., along.template get<kLoad>().item[item]);
    } else if constexpr (kLoad < Along::kCount) {
      auto vector = computation.load(AlongLoad<kLoad>{}, at, i, j);
      compute<k + 1>(place, item, i, j, given..., vector);
    } else if constexpr (kResult < Results::kCount) {
      typename ResultExchange<kResult>::Along vector;
      compute<k + 1>(place, item, i, j, given..., vector);
      ResultExchange<kResult>::write(tiles.template get<Across::kCount + kResult>(), place, vector);
    } else {
      computation.compute(at, i, j, given...);
    }
  }
  WS_INLINE void compute_tile() {
#pragma unroll
    for (int item = 0; item < Place::kItems; ++item) {
      const Spot place = Place::at(item);
      const Offset i = i_tile + place.row, j = j_tile + place.column;
      if (is_outside(i, j)) continue;
      compute(place, item, i, j);
    }
  }

  template <int k = 0> WS_INLINE void store_across() {
    if constexpr (k < Results::kCount) {
      using Exchanged = ResultExchange<k>;
#pragma unroll
      for (int item = 0; item < Exchanged::Place::kItems; ++item) {
        const Spot place = Exchanged::Place::at(item);
        const Offset i = i_tile + place.column, j = j_tile + place.row;
        if (is_outside(i, j)) continue;
        const auto vector = tiles.template get<Across::kCount + k>().take(place.row, place.column);
        computation.store(AcrossStore<k>{}, at, i, j, vector);
      }
      store_across<k + 1>();
    }
  }
};

// `block`: which of the nest's blocks this one is, where a kernel has more to do than one nest.
template <class W> WS_INLINE void transpose(const W& computation, TransposeTiles<W>& tiles, unsigned block = blockIdx.x) {
  if constexpr (W::kTiling.overlap) wait_for_previous(), launch_dependents();
  Transpose<W> tile(computation, tiles, block);
  tile.load_across();
  if constexpr (W::kTiling.prefetch) tile.load_along();
  tile.put_into_tiles();
  __syncthreads();
  tile.compute_tile();
  if constexpr (W::Results::kCount > 0) {
    __syncthreads();
    tile.store_across();
  }
}

}  // namespace ws
