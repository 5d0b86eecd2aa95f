// A convolution as a product on tensor cores, for sm_90a: sums[group][m, n] = sum over k of seen[m, k] * weight[group][n, k],
// where m is a position of outputs, n a channel that is made, and k goes over the elements of a window and a group's channels.
//
// `lay_out` writes what is seen to memory with channels as innermost axis, in whole boxes, zeros behind the last and around the
// data; of a stride the positions between two outputs are channels too, so that every window slides by one. The product takes
// tiles of 128 positions: the copy engine brings a box of what they see, with what hangs over along each dimension whose
// elements are `shared`. An element of the window is the same box, begun some rows later: the swizzle follows from addresses, so
// rows may begin at any of them. A row has 128 bytes of channels, or 64 or 32 where there are fewer; a step multiplies 128 bytes
// of depth, of as many elements. Weights come in a ring of their own, in the order of steps, by 128 bytes: the copy engine takes
// about as long for a short row. A window has parts, in each of which every channel has as many elements: of a stride the
// residues that meet one element more are a part, and the others. Of a transposed convolution outputs have phases, each with a
// part of its own, and a tile is of one of them. What lies with channels innermost already is copied from where it lies: zeros come
// for what is outside. The rest is `ws_product.cuh`.
#pragma once
#include "ws_axes.cuh"
#include "ws_product.cuh"
#include "ws_product_slices.cuh"

namespace ws {

// One that windows slide over. Position `at` of what is laid out, in the channels of element k of the weight, is
// at * stride + k * step % stride - padding of the data. Outputs have `phases`: `results` of them in all.
struct WindowDimension {
  int data, outputs, stride, padding, step;
  int extent;           // positions that are laid out
  int dilation, every;  // from one element of a part to the next: in what is laid out, in the weight
  int reach;            // of the longest part, in what is laid out
  int phases, results;
};

// Along each dimension: positions from an output's own to what its first element sees, elements, the weight's own number of the
// first, further ones whose residues are channels beside it, and the output of position 0. Its boxes of channels.
struct WindowPart {
  int first[3], size[3], element[3], residues[3], shift[3];
  int channel_box, channel_boxes;
};

// Windows over the outputs of a dimension, or none (0 outputs): see `ws_windows_pooled.cuh`. Of phases, `stride` and the rest
// count positions, each of which has all of them.
struct PooledDimension {
  int outputs = 0, size = 1, stride = 1, dilation = 1, padding = 0;
};

// Three dimensions, outermost first, and the images beside them. A tile's rows are eight neighbours of the last dimension, eight
// of `eights` and two of `halves` (dimensions; 3: images). Parts are summed, or each is of a phase.
template <int kParts> struct WindowShape {
  WindowDimension dimensions[3];
  WindowPart parts[kParts];
  bool shared[3];  // whether a box has what all elements along a dimension see
  int images, groups;
  int channels;  // of a group, with those of all residues, in whole boxes
  int row_bytes;
  int eights, halves;
  int boxes;  // in shared memory
  int before[3];  // positions that are not there before those that are copied: padding
  PooledDimension pooled[3] = {};

  static constexpr int kCount = kParts;
};

// A few columns of a warpgroup's 64 rows on their way to other threads. Pairs of neighbours meet two at a bank at most.
constexpr int kTurnedColumns = 32;
struct Turned {
  float sums[64][kTurnedColumns + 4];

  // Takes a thread's own, of columns `begin` and further.
  template <int kSums> WS_INLINE void take(const float (&own)[kSums], int begin) {
    const int lane = threadIdx.x % 32, row = 16 * (threadIdx.x % 128 / 32) + lane / 4;
#pragma unroll
    for (int i = 0; i < kTurnedColumns / 8; ++i) {
      const float* from = own + (begin / 8 + i) * 4;
      const int column = 8 * i + 2 * (lane % 4);
      *reinterpret_cast<Pack<float, 2>*>(&sums[row][column]) = {from[0], from[1]};
      *reinterpret_cast<Pack<float, 2>*>(&sums[row + 8][column]) = {from[2], from[3]};
    }
  }
};

// `P`: the product's shape, whose rows are those of all tiles; `Window::shape()` says the rest.
template <class P, class Window> struct WindowProduct : P {
  using Tiles = P;
  using Element = typename P::Element;
  static constexpr auto kShape = Window::shape();
  // Warpgroups that multiply, then a warp that copies: so two blocks share an SM's registers with nothing handed over.
  static constexpr int kThreads = 128 * P::kWarpgroups + 32;
  static constexpr int kRowBytes = kShape.row_bytes, kRowDepth = kRowBytes / sizeof(Element);
  static constexpr int kStepElements = 128 / kRowBytes;  // of a window
  static constexpr int kChannelBoxes = kShape.channels / kRowDepth;
  static constexpr int kPartCount = kShape.kCount;

  // Of copies, so that device code may ask for any dimension.
  static WS_INLINE constexpr WindowDimension dimension(int d) {
    constexpr auto shape = Window::shape();
    return shape.dimensions[d];
  }
  static WS_INLINE constexpr WindowPart part(int number) {
    constexpr auto shape = Window::shape();
    return shape.parts[number];
  }
  static WS_INLINE constexpr int before(int d) {
    constexpr auto shape = Window::shape();
    return shape.before[d];
  }
  static WS_INLINE constexpr bool is_shared(int d) {
    constexpr auto shape = Window::shape();
    return d < 3 && shape.shared[d];
  }
  static WS_INLINE constexpr int phases(int d) { return d == 3 ? 1 : dimension(d).phases; }
  static constexpr int kPhases = phases(0) * phases(1) * phases(2);
  static constexpr bool kIsPhased = kPhases > 1;
  static_assert(!kIsPhased || (kPhases == kPartCount && P::kCluster == 1));
  static WS_INLINE constexpr int outputs(int d) { return d == 3 ? kShape.images : dimension(d).outputs; }
  // Outputs of a tile along a dimension, and of what its box has.
  static WS_INLINE constexpr int tile(int d) {
    return (d == 2 ? 8 : 1) * (d == kShape.eights ? 8 : 1) * (d == kShape.halves ? 2 : 1);
  }
  static WS_INLINE constexpr int box(int d) { return tile(d) + (is_shared(d) ? dimension(d).reach : 0); }
  static WS_INLINE constexpr PooledDimension pooled(int d) {
    constexpr auto shape = Window::shape();
    return d == 3 ? PooledDimension() : shape.pooled[d];
  }
  static WS_INLINE constexpr bool is_pooled(int d) { return pooled(d).outputs > 0; }
  static constexpr bool kIsPooled = is_pooled(0) || is_pooled(1) || is_pooled(2);
  // Whole windows of a tile, or its outputs; those of all tiles; outputs from a tile to the next, and the first tile's first.
  static WS_INLINE constexpr int windows(int d) {
    return is_pooled(d) ? (tile(d) - (pooled(d).size - 1) * pooled(d).dilation - 1) / pooled(d).stride + 1 : tile(d);
  }
  static WS_INLINE constexpr int all_windows(int d) { return is_pooled(d) ? pooled(d).outputs : outputs(d); }
  static WS_INLINE constexpr int tiles(int d) { return (all_windows(d) + windows(d) - 1) / windows(d); }
  static WS_INLINE constexpr int advance(int d) { return windows(d) * pooled(d).stride; }
  static WS_INLINE constexpr int begin(int d) { return -pooled(d).padding; }
  // Tiles that a block takes one after the other: of windows over phases all of these.
  static constexpr int kTurn = kIsPooled ? kPhases : 1;
  static_assert(kTurn == 1 || P::kGroup % kTurn == 0, "phases of a place are neighbours among tiles");
  static WS_INLINE int first_tile() { return blockIdx.x / P::kCluster * kTurn; }
  static WS_INLINE int next_tile(int number) {
    return number % kTurn == kTurn - 1 ? number + 1 + (gridDim.x / P::kCluster - 1) * kTurn : number + 1;
  }
  // Rows of a box from one neighbour to the next.
  static WS_INLINE constexpr int pitch(int d) {
    return d == 2 ? 1 : d == 1 ? box(2) : d == 0 ? box(1) * box(2) : box(0) * box(1) * box(2);
  }
  static constexpr int kEightsStep = kShape.eights == 2 ? 8 : 1;  // outputs from one eight to the next
  static constexpr int kEightsPitch = pitch(kShape.eights) * kEightsStep;
  static constexpr int kHalvesStep = (kShape.halves == 2 ? 8 : 1) * (kShape.halves == kShape.eights ? 8 : 1);
  static constexpr int kHalvesPitch = pitch(kShape.halves) * kHalvesStep;
  static constexpr int kBoxRows = box(3) * pitch(3);

  // Outputs of a group and a channel.
  static constexpr int kM = kShape.images * dimension(0).results * dimension(1).results * dimension(2).results;

  // Elements of a part that a box is used for, or those that have boxes of their own.
  static WS_INLINE constexpr int elements(int number, bool of_shared = true) {
    int product = 1;
    for (int d = 0; d < 3; ++d)
      if (is_shared(d) == of_shared) product *= part(number).size[d];
    return product;
  }
  static WS_INLINE constexpr int steps(int number) { return (elements(number) + kStepElements - 1) / kStepElements; }
  static WS_INLINE constexpr int units(int number) {  // boxes
    return steps(number) == 0 ? 0 : elements(number, false) * part(number).channel_boxes;
  }
  // Of weights, before those of a part.
  static WS_INLINE constexpr int steps_before(int number) {
    int sum = 0;
    if (!kIsPhased)
      for (int p = 0; p < number; ++p) sum += units(p) * steps(p);
    return sum;
  }
  static WS_INLINE constexpr int count_weight_steps() {
    int most = 1;
    for (int p = 0; p < kPartCount; ++p) {
      const int own = steps_before(p) + units(p) * steps(p);
      most = own > most ? own : most;
    }
    return most;
  }
  static constexpr int kWeightDepth = count_weight_steps() * P::kStageDepth;
  // The first box of a part in a slice; where the slice before ends.
  static WS_INLINE constexpr int first_unit(int number, int slice) {
    if (kIsPhased) return units(number) * slice / P::kSlices;
    int all = 0, before = 0;
    for (int p = 0; p < kPartCount; ++p) before += p < number ? units(p) : 0, all += units(p);
    const int first = all * slice / P::kSlices - before;
    return first < 0 ? 0 : first < units(number) ? first : units(number);
  }
  // Whether a tile may have nothing to multiply.
  static WS_INLINE constexpr bool has_empty() {
    for (int p = 0; p < kPartCount; ++p)
      for (int slice = 0; slice < P::kSlices; ++slice)
        if (kIsPhased && first_unit(p, slice) == first_unit(p, slice + 1)) return true;
    return false;
  }
  // Whether a tile has this part.
  static WS_INLINE constexpr bool is_of(int number, int phase) { return !kIsPhased || number == phase; }
  static WS_INLINE WindowPart part_of(int number) {
    WindowPart found = part(0);
#pragma unroll
    for (int p = 1; p < kPartCount; ++p)
      if (p == number) found = part(p);
    return found;
  }
  // What a tile copies for a part: boxes from the first to the end, steps of each, and the first step of weights.
  struct Counts {
    int first, end, steps, before;
  };
  static WS_INLINE Counts counts_of(int number, int phase, int slice) {
    Counts found{0, 0, 1, 0};
#pragma unroll
    for (int p = 0; p < kPartCount; ++p)
      if (p == number && is_of(p, phase) && units(p) > 0)
        found = {first_unit(p, slice), first_unit(p, slice + 1), steps(p), steps_before(p)};
    return found;
  }

  struct Shared {
    alignas(1024) Element right[P::kStages][P::kTileColumns * P::kStageDepth];
    alignas(1024) Element box[kShape.boxes][(kBoxRows * kRowBytes + 1023) / 1024 * (1024 / sizeof(Element))];
    Turned turned[P::kWarpgroups];
    Barrier filled[P::kStages], free[P::kStages], box_filled[kShape.boxes], box_free[kShape.boxes];
  };

  static WS_INLINE constexpr int phase_of(int tile) { return kIsPhased ? tile % kPhases : 0; }

  // The first output of a tile of rows: where along each dimension, and its image; tiles of all phases beside each other.
  struct Place {
    int at[4];
    WS_INLINE explicit Place(int number) {
      number /= kPhases;
#pragma unroll
      for (int d = 2; d >= 0; --d) {
        at[d] = number % tiles(d) * advance(d) + begin(d);
        number /= tiles(d);
      }
      at[3] = number * tile(3);
    }
  };

  // The number of the output that a row of the tiles is, images outermost; -1 where it is none.
  static WS_INLINE int position(int row) {
    Place place(row / kTileRows);
    place.at[2] += row % 8;
    place.at[kShape.eights] += row / 8 % 8 * kEightsStep;
    place.at[kShape.halves] += row / 64 % 2 * kHalvesStep;
    int number = place.at[3], phase = phase_of(row / kTileRows);
    bool is_one = place.at[3] < kShape.images;
    int shift[3] = {};
    if constexpr (kIsPhased) {
#pragma unroll
      for (int p = 0; p < kPhases; ++p)
#pragma unroll
        for (int d = 0; d < 3; ++d)
          if (p == phase) shift[d] = part(p).shift[d];
    }
#pragma unroll
    for (int d = 0; d < 3; ++d) {
      const int result = place.at[d] * phases(d) + shift[d];
      number = number * dimension(d).results + result;
      is_one = is_one && place.at[d] < outputs(d) && result >= 0 && result < dimension(d).results;
    }
    return is_one ? number : -1;
  }

  // An element of a part: of a unit the one that its box begins with, of a step one that it shares.
  struct WindowElement {
    int at[3] = {};
    template <bool kShared> WS_INLINE void find(const WindowPart& part, int number) {
#pragma unroll
      for (int d = 2; d >= 0; --d) {
        if (is_shared(d) != kShared) continue;
        at[d] = number % part.size[d];
        number /= part.size[d];
      }
    }
    // Rows of a box before those that it sees.
    WS_INLINE int rows() const {
      int sum = 0;
#pragma unroll
      for (int d = 0; d < 3; ++d) sum += is_shared(d) ? at[d] * dimension(d).dilation * pitch(d) : 0;
      return sum;
    }
  };
};

// The boxes of a block's tiles, one after the other, as they are asked for.
template <class P> struct Boxes {
  int number = P::first_tile(), part = 0, unit = 0, end = 0;
  RingPlace<P::kShape.boxes> place;

  // Those of the part, in the tile.
  WS_INLINE void find(int rank) {
    const typename P::Tile tile = P::tile_at(number);
    const auto counts = P::counts_of(part, P::phase_of(tile.first_row(rank) / kTileRows), tile.layer % P::kSlices);
    unit = counts.first, end = counts.end;
  }

  WS_INLINE void ask(typename P::Shared& shared, const TensorMap& seen, int rank) {
    while (number < P::kTiles && unit == end) {
      if (++part == P::kPartCount) part = 0, number = P::next_tile(number);
      if (number < P::kTiles) find(rank);
    }
    if (number >= P::kTiles) return;
    const typename P::Tile tile = P::tile_at(number);
    const WindowPart own = P::part_of(part);
    typename P::Place first(tile.first_row(rank) / kTileRows);
    typename P::WindowElement element;
    element.template find<false>(own, unit / own.channel_boxes);
#pragma unroll
    for (int d = 0; d < 3; ++d) first.at[d] += own.first[d] + element.at[d] * P::dimension(d).dilation - P::before(d);
    Barrier& filled = shared.box_filled[place.stage];
    shared.box_free[place.stage].wait(place.parity ^ 1);
    filled.expect(P::kBoxRows * P::kRowBytes);
    const int channel = tile.layer / P::kSlices * P::kShape.channels + (own.channel_box + unit % own.channel_boxes) * P::kRowDepth;
    copy_box(seen, filled, shared.box[place.stage], channel, first.at[2], first.at[1], first.at[0], first.at[3]);
    place.advance();
    ++unit;
  }
};

template <class P>
WS_INLINE void copy_windows(typename P::Shared& shared, const TensorMap& seen, const TensorMap& weights, int rank) {
  constexpr int kShare = P::kTileColumns / P::kCluster;
  RingPlace<P::kStages> place;
  Boxes<P> boxes;
  if (boxes.number < P::kTiles) boxes.find(rank);
  boxes.ask(shared, seen, rank);
  for (int number = P::first_tile(); number < P::kTiles; number = P::next_tile(number)) {
    const typename P::Tile tile = P::tile_at(number);
    const int phase = P::phase_of(tile.first_row(rank) / kTileRows);
    const int layer = phase * P::kShape.groups + tile.layer / P::kSlices;
#pragma unroll 1
    for (int part = 0; part < P::kPartCount; ++part) {
      const typename P::Counts counts = P::counts_of(part, phase, tile.layer % P::kSlices);
      const int ask = (counts.steps < P::kStages ? counts.steps : P::kStages) - 1;  // the box before last has been read by then
#pragma unroll 1
      for (int unit = counts.first; unit < counts.end; ++unit) {
#pragma unroll 1
        for (int step = 0; step < counts.steps; ++step) {
          Barrier& filled = shared.filled[place.stage];
          shared.free[place.stage].wait(place.parity ^ 1);
          filled.expect(sizeof(shared.right[0]));
          const int depth = (counts.before + unit * counts.steps + step) * P::kStageDepth;
          copy_to<P::kCluster>(weights, filled, shared.right[place.stage] + rank * kShare * P::kStageDepth, depth,
                               tile.first_column() + rank * kShare, 0, layer);
          place.advance();
          if (step == ask) boxes.ask(shared, seen, rank);
        }
      }
    }
  }
  // No block may leave while another still fills its memory or arrives at its barriers.
  for (int i = 0; i < P::kStages; ++i) {
    shared.free[place.stage].wait(place.parity ^ 1);
    place.advance();
  }
}

// The sums of one tile's 64 rows; what lies in the places moves on.
template <class P>
WS_INLINE void multiply_window_tile(typename P::Shared& shared, RingPlace<P::kShape.boxes>& box, RingPlace<P::kStages>& place,
                                    int warpgroup, int phase, int slice, float (&sums)[P::kSums]) {
  using Element = typename P::Element;
  const int rows = warpgroup % 2 * P::kHalvesPitch;
  int previous = -1, previous_box = -1;
#pragma unroll
  for (int part = 0; part < P::kPartCount; ++part) {
    if (!P::is_of(part, phase)) continue;
    const int end = P::first_unit(part, slice + 1);
#pragma unroll 1
    for (int unit = P::first_unit(part, slice); unit < end; ++unit) {
      shared.box_filled[box.stage].wait(box.parity);
#pragma unroll 1
      for (int step = 0; step < P::steps(part); ++step) {
        shared.filled[place.stage].wait(place.parity);
        const uint64 right = operand_at<kAlong>(shared.right[place.stage] + own_columns<P>(warpgroup));
        products_begin();
#pragma unroll
        for (int i = 0; i < P::kStepElements; ++i) {
          const int number = step * P::kStepElements + i;
          if (P::elements(part) % P::kStepElements != 0 && number >= P::elements(part)) break;
          typename P::WindowElement element;
          element.template find<true>(P::part(part), number);
          const uint64 left = rows_at<P::kRowBytes, P::kEightsPitch>(shared.box[box.stage] + (rows + element.rows()) * P::kRowDepth);
#pragma unroll
          for (int k = 0; k < P::kRowDepth; k += P::kProductDepth)
            multiply_add<Element, kAlong, kAlong>(sums, further<kAlong, Element>(left, k),
                                                  further<kAlong, Element>(right, i * P::kRowDepth + k),
                                                  (previous >= 0) | (i + k > 0));
        }
        products_commit();
        products_wait<1>();
        if (previous >= 0) release<P>(shared.free[previous]);
        if (previous_box >= 0) {
          if (threadIdx.x % 32 == 0) shared.box_free[previous_box].arrive();
          previous_box = -1;
        }
        previous = place.stage;
        place.advance();
      }
      previous_box = box.stage;
      box.advance();
    }
  }
  products_wait<0>();
  settle(sums);
  if constexpr (P::has_empty()) {
    if (previous < 0) {
#pragma unroll
      for (int i = 0; i < P::kSums; ++i) sums[i] = 0.0f;
      return;
    }
  }
  release<P>(shared.free[previous]);
  if (threadIdx.x % 32 == 0) shared.box_free[previous_box].arrive();
}

WS_INLINE void meet_warpgroup(int warpgroup) { meet_at<128>(1 + warpgroup); }

// Takes a tile's sums to the end, by the number of the position. Where channels are no neighbours in memory, positions are:
// sums go to other threads, so that those of a warp store neighbours.
template <class P, class Finish>
WS_INLINE void finish_positions(const typename P::Tile& tile, int rank, int warpgroup, float (&sums)[P::kSums],
                                typename P::Shared& shared, const Finish& finish) {
  if constexpr (P::kPack > 2) {
    const auto end = [&](int layer, int row, int n, const Pack<float, P::kPack>& pack) {
      const int m = P::position(row);
      if (m >= 0) finish(layer, m, n, pack);
    };
    finish_tile<typename P::Tiles>({tile, rank, warpgroup}, sums, nullptr, nullptr, end);
  } else {
    Turned& turned = shared.turned[warpgroup];
    const int lane = threadIdx.x % 32, warp = threadIdx.x % 128 / 32;
    const int first_row = tile.first_row(rank) + warpgroup % 2 * 64;
    const int first_column = tile.first_column() + warpgroup / 2 * P::kOwnColumns;
    const int m[2] = {P::position(first_row + lane), P::position(first_row + 32 + lane)};
#pragma unroll
    for (int begin = 0; begin < P::kOwnColumns; begin += kTurnedColumns) {
      meet_warpgroup(warpgroup);
      turned.take(sums, begin);
      meet_warpgroup(warpgroup);
#pragma unroll
      for (int i = 0; i < kTurnedColumns / 8; ++i) {
        const int column = 2 * (4 * i + warp), n = first_column + begin + column;
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const auto pair = *reinterpret_cast<const Pack<float, 2>*>(&turned.sums[32 * half + lane][column]);
          if (m[half] >= 0 && n < P::kN) finish(tile.layer, m[half], n, pair);
        }
      }
    }
  }
}

// What becomes of a tile's sums. An end that reduces them has a form of its own (`ws_windows_reduced.cuh`).
template <class P, class Finish> struct WindowTileEnd {
  WS_INLINE void take(const typename P::Tile& tile, int rank, int warpgroup, float (&sums)[P::kSums],
                      typename P::Shared& shared, const Finish& finish) {
    finish_positions<P>(tile, rank, warpgroup, sums, shared, finish);
  }
};

// The whole product; `finish(group, m, n, sums)` as `multiply` has it, m by the position's number.
template <class P, class Finish>
WS_INLINE void multiply_windows(const TensorMap& seen, const TensorMap& weights, const float*, const float*,
                                const Finish& finish) {
  extern __shared__ char memory[];
  typename P::Shared& shared =
      *reinterpret_cast<typename P::Shared*>((reinterpret_cast<uint64>(memory) + 1023) / 1024 * 1024);
  const int rank = P::kCluster > 1 ? rank_in_cluster() : 0;
  if (threadIdx.x == 0) {
    prefetch_map(seen);
    prefetch_map(weights);
    for (int i = 0; i < P::kStages; ++i) {
      shared.filled[i].begin(1);
      shared.free[i].begin(4 * P::kWarpgroups * P::kCluster);
    }
    for (int i = 0; i < P::kShape.boxes; ++i) {
      shared.box_filled[i].begin(1);
      shared.box_free[i].begin(4 * P::kWarpgroups);
    }
    publish_barriers();
  }
  if constexpr (P::kCluster > 1) meet_cluster();
  else __syncthreads();

  const int warpgroup = threadIdx.x / 128;
  if (warpgroup == P::kWarpgroups) {
    if (threadIdx.x % 32 == 0) copy_windows<P>(shared, seen, weights, rank);
    return;
  }
  RingPlace<P::kStages> place;
  RingPlace<P::kShape.boxes> box;
  WindowTileEnd<P, Finish> end;
  for (int number = P::first_tile(); number < P::kTiles; number = P::next_tile(number)) {
    const typename P::Tile tile = P::tile_at(number);
    float sums[P::kSums];
    const int phase = P::phase_of(tile.first_row(rank) / kTileRows), slice = P::kSlices > 1 ? tile.layer % P::kSlices : 0;
    multiply_window_tile<P>(shared, box, place, warpgroup, phase, slice, sums);
    end.take(tile, rank, warpgroup, sums, shared, finish);
  }
}

// ---- slices of the depth ------------------------------------------------------------------------------------

// The end of a slice's product: its sums by [layer][n][m] where positions are neighbours, as they come, else by [layer][m][n].
template <class P> struct WindowSliceEnd {
  float* __restrict__ sums;
  static constexpr bool kAlongChannels = P::kPack > 2;

  static WS_INLINE int64 place(int layer, int m, int n) {
    return kAlongChannels ? (layer * static_cast<int64>(P::kM) + m) * P::kN + n : (layer * static_cast<int64>(P::kN) + n) * P::kM + m;
  }
  WS_INLINE void operator()(int layer, int m, int n, const Pack<float, P::kPack>& pack) const {
#pragma unroll
    for (int e = 0; e < P::kPack; ++e)
      if (n + e < P::kN) sums[place(layer, m, n + e)] = pack[e];
  }
};

// `finish` gets what all slices come to.
template <class P, class Finish> WS_INLINE void add_window_slices(const float* __restrict__ sums, const Finish& finish) {
  using End = WindowSliceEnd<P>;
  constexpr int kPacks = (P::kN + P::kPack - 1) / P::kPack, kInner = End::kAlongChannels ? kPacks : P::kM;
  constexpr int64 kLayer = static_cast<int64>(P::kM) * P::kN, kCount = static_cast<int64>(P::kM) * kPacks;
  for (int64 i = blockIdx.x * static_cast<int64>(kAddThreads) + threadIdx.x; i < P::kBatch * kCount; i += gridDim.x * kAddThreads) {
    const int batch = i / kCount, outer = i % kCount / kInner, inner = i % kInner;
    const int m = End::kAlongChannels ? outer : inner, n = (End::kAlongChannels ? inner : outer) * P::kPack;
    const float* from = sums + batch * (P::kSlices * kLayer);
    Pack<float, P::kPack> total;
#pragma unroll
    for (int e = 0; e < P::kPack; ++e) {
      total[e] = 0.0f;
#pragma unroll
      for (int slice = 0; slice < P::kSlices; ++slice)
        total[e] += n + e < P::kN ? from[slice * kLayer + End::place(0, m, n + e)] : 0.0f;
    }
    finish(batch, m, n, total);
  }
}

}  // namespace ws
