// Reductions along rows: what a thread has of a row, and one visit of it.
//
// The skeletons `ws_rows_*.cuh` say when a row's elements are read, reduced, exchanged and stored. What one row loads, folds and
// stores says a generated struct, here `Row`:
//
//   kX, kWeight, ...         bits of the loads along the row, in sets (LoadSet)
//   Index                    type of rows and offsets
//   kLoadBytes               of a vector of each load
//   Vector, Stored           one vector access of everything that is loaded (and of what stages keep), and that is stored
//   Stages                   RowStages<RowStage<State, loads of the first visit, of the second>, ...>
//   each_load<set>(j, f)     f(RowLoad, address) or f(RowScalar, value) for each load of the set, at element j
//   each_value(f)            f(RowNumber<bytes of those before>, member, address) for each value that is loaded once a row
//   each_store(stored, j, f) f(vector, address) for each store of whole vectors
//   at(row), once(), start(), learn(RowNumber, state, own)
//                            what is known of a row: its axes; what no row changes; what its first stage needs; results
//   element, top and term, or value and square (RowNumber, vector, j, e, ...)
//                            element e of a vector, number j of its row: what a stage of folds, a shifted sum or moments takes
//   finish(stored, vector, j, e), store_row()
//                            the stores: of an element, and those that are made once a row
//   Sums, add(sums, vector, j, e), each_sum(sums, j, f)
//                            sums over rows of one vector of columns, what an element adds, f(vector, address of the first)
#pragma once
#include "ws_stream.cuh"

namespace ws {

// ---- what a generated struct is made of ----------------------------------------------------------------------------------

// Loads along the row, a bit each.
using LoadSet = uint64;

// One load: its bit, its member of `Vector`, and how it treats the caches.
template <LoadSet kBit_, auto kMember_, Reuse kReuse_> struct RowLoad {
  static constexpr LoadSet kBit = kBit_;
  static constexpr auto kMember = kMember_;
  static constexpr Reuse kReuse = kReuse_;
};
// One load that all elements of a vector share.
template <auto kMember_> struct RowScalar { static constexpr auto kMember = kMember_; };

// A stage, by its number; or a value that is loaded once a row, by the bytes of those before it.
template <int kNumber_> struct RowNumber { static constexpr int kNumber = kNumber_; };

// Reductions that share a state; `kQuick_`: logarithms are tried in few instructions first (element_quick).
template <class State_, LoadSet kFirst_, LoadSet kSecond_ = 0, bool kQuick_ = false> struct RowStage {
  using State = State_;
  static constexpr LoadSet kFirst = kFirst_, kSecond = kSecond_;
  static constexpr bool kQuick = kQuick_;
};
template <class... Each> struct RowStages {
  static constexpr int kCount = sizeof...(Each);
  static constexpr LoadSet kLoads = (LoadSet(0) | ... | (Each::kFirst | Each::kSecond));
};
template <int kNumber, class Stages> struct StageAt;
template <int kNumber, class First, class... Rest> struct StageAt<kNumber, RowStages<First, Rest...>> {
  using Type = typename StageAt<kNumber - 1, RowStages<Rest...>>::Type;
};
template <class First, class... Rest> struct StageAt<0, RowStages<First, Rest...>> { using Type = First; };
template <class Row, int kNumber> using StageOf = typename StageAt<kNumber, typename Row::Stages>::Type;
template <class Row, int kNumber> using StateOf = typename StageOf<Row, kNumber>::State;

// What a row does not have.
struct RowBase {
  struct Stored {};
  static constexpr bool kHasSums = false;  // over rows, of each of their elements
  static constexpr LoadSet kSumLoads = 0;
  struct Sums {};
  static constexpr bool kQuickStores = false;  // quotients by a value of the row are tried in few instructions first
  static constexpr bool kElementsFirst = false;  // before the row's own stores, which read what they overwrite
  static constexpr bool kStoresElements = true;
  static constexpr LoadSet kStoreLoads = 0;  // what the stores of elements need
  static constexpr LoadSet kScalars = 0;     // loads that all elements of a vector share
  static constexpr LoadSet kCommon = 0;      // loads along the row that rows share
  // Sets that a strategy asks for, where they are empty.
  static constexpr LoadSet kTogether = 0, kSharedByRows = 0, kAsked = 0, kAhead = 0;
  static constexpr bool kHasValues = false;  // that are loaded once a row, and come ahead of it
  WS_INLINE void once() {}
  WS_INLINE void start() {}
  WS_INLINE void store_row() const {}
  WS_INLINE int shift() const { return 0; }
  template <class Visit> WS_INLINE void each_value(const Visit&) {}
  template <class Visit> WS_INLINE void each_store(Stored&, int, const Visit&) const {}
};

// ---- who has what of a row -----------------------------------------------------------------------------------------------

// `threads` of a CTA, of which `lanes` share a row; `ctas` that share one; `vectors` of so many elements that a thread has at
// once; elements of a `slice`, which a CTA has. `interleaved`: the CTAs take turns with their vectors, instead. `unaligned`: rows
// begin anywhere, and their first vector as far before them as aligns it.
// `teams`: rows in work at once, by CTAs that stay. `depth`, `lag`, `held`: as the strategy says.
// `overlap`: programmatic dependent launch; `preload`: what only stores need is read with the rest.
struct RowTiling {
  int rows, columns, threads, lanes, ctas, vector_width, vectors, slice;
  bool interleaved, unaligned, overlap, preload, streaming;
  int teams, depth, lag, held;
};

template <RowTiling kTiling> struct RowShape {
  static constexpr int kRows = kTiling.rows, kColumns = kTiling.columns;
  static constexpr int kThreads = kTiling.threads, kLanes = kTiling.lanes, kWarps = kThreads / 32, kCtas = kTiling.ctas;
  static constexpr int kWidth = kTiling.vector_width, kVectors = kTiling.vectors, kSlice = kTiling.slice;
  static constexpr bool kInterleaved = kTiling.interleaved, kUnaligned = kTiling.unaligned, kStreaming = kTiling.streaming;
  static constexpr int kStride = kWidth * kLanes;                          // elements of a vector of all threads
  static constexpr int kStep = kInterleaved ? kStride * kCtas : kStride;   // from a thread's vector to its next
  static constexpr int kBegin = kInterleaved ? kStride : kSlice;           // from one CTA's first element to the next one's
  static constexpr bool kHoldsRow = kVectors * kStride >= kSlice;          // a thread has all of its row at once
  static constexpr bool kEven = kColumns == kSlice * kCtas && kSlice % (kVectors * kStride) == 0 && !kUnaligned;
  // Vectors of a thread of which only the first may lie outside of an unaligned row.
  static constexpr int kLastSlice = kColumns - (kCtas - 1) * kSlice < kSlice ? kColumns - (kCtas - 1) * kSlice : kSlice;
  static constexpr int kWholeVectors = kInterleaved ? kColumns / kStep : kHoldsRow ? kLastSlice / kStride : 0;
  // Parts of a slice that is worked on in parts.
  static constexpr int kParts = (kSlice + kVectors * kStride - 1) / (kVectors * kStride), kPart = kVectors * kStep;

  // This thread's first element of a row, and where those of its CTA end.
  static WS_INLINE int first(int rank, int shift = 0) {
    const unsigned thread = kLanes == kThreads ? threadIdx.x : threadIdx.x % kLanes;
    return rank * kBegin + kWidth * thread - shift;
  }
  static WS_INLINE int end(int rank, int shift = 0) {
    return kCtas > 1 && !kInterleaved ? min(kColumns, (rank + 1) * kSlice - shift) : kColumns;
  }
};

// Where threads leave states of each stage for each other: so many places of a stage. A kernel declares them in shared memory.
template <class Row, int kPlaces, int kStage = 0, bool kIsStage = (kStage < Row::Stages::kCount && kPlaces > 0)>
struct StageBoxes {};
template <class Row, int kPlaces, int kStage>
struct StageBoxes<Row, kPlaces, kStage, true> : StageBoxes<Row, kPlaces, kStage + 1> {
  StateOf<Row, kStage> own[kPlaces];

  template <int kWanted> WS_INLINE auto& of() {
    if constexpr (kWanted == kStage) return own;
    else return StageBoxes<Row, kPlaces, kStage + 1>::template of<kWanted>();
  }
};

// ---- vectors and elements ------------------------------------------------------------------------------------------------

// body(v, begin, whole) for each vector of a thread from `base` on, as far as it lies inside. `whole`: all of it surely does.
template <class Shape, int kCount, bool kFromFirst, class Body>
WS_INLINE void each_vector(int base, int end, const Body& body) {
#pragma unroll
  for (int v = 0; v < kCount; ++v) {
    const int begin = base + v * Shape::kStep;
    constexpr bool kKnown = kFromFirst && Shape::kUnaligned && Shape::kWholeVectors > 2;
    const bool whole = kKnown && 0 < v && v < Shape::kWholeVectors;
    if (Shape::kEven || whole || begin < end) body(v, begin, whole);
  }
}

// body(j, e) for each element of a vector that lies inside of the row.
template <class Shape, class Body> WS_INLINE void each_element(int begin, bool whole, const Body& body) {
#pragma unroll
  for (int e = 0; e < Shape::kWidth; ++e)
    if (!Shape::kUnaligned || whole || is_inside<Shape::kColumns>(begin + e)) body(begin + e, e);
}

// Reads a vector from memory, tail predicated where rows are unaligned.
template <class Shape, class Vector> struct ReadVector {
  Vector& to;
  int begin;
  bool whole;

  template <class Load, class T> WS_INLINE void operator()(Load, const T* from) const {
    if constexpr (Shape::kUnaligned)
      to.*Load::kMember = load_inside<Shape::kWidth, Load::kReuse, Shape::kColumns>(from, begin, whole);
    else
      to.*Load::kMember = load<Shape::kWidth, Load::kReuse>(from);
  }
  template <auto kMember, class T> WS_INLINE void operator()(RowScalar<kMember>, T value) const { to.*kMember = value; }
};

// Where a row's vectors come from: all from memory.
template <class Shape> struct FromMemory {
  template <LoadSet kLoads, class Row>
  WS_INLINE void fill(const Row& row, typename Row::Vector& to, int, int begin, bool whole) const {
    row.template each_load<kLoads>(begin, ReadVector<Shape, typename Row::Vector>{to, begin, whole});
  }
};

// The same, with another treatment of the caches than the loads ask for.
template <class Shape, Reuse kReuse> struct FromMemoryBy {
  template <class Vector> struct Read {
    ReadVector<Shape, Vector> read;

    template <class Load, class T> WS_INLINE void operator()(Load, const T* from) const {
      read(RowLoad<Load::kBit, Load::kMember, kReuse>(), from);
    }
  };
  template <LoadSet kLoads, class Row>
  WS_INLINE void fill(const Row& row, typename Row::Vector& to, int, int begin, bool whole) const {
    using Vector = typename Row::Vector;
    row.template each_load<kLoads>(begin, Read<Vector>{ReadVector<Shape, Vector>{to, begin, whole}});
  }
};

// Brings bytes of a warp's or a CTA's vectors into the second-level cache.
template <int kElements> struct Prefetch {
  template <class Load, class T> WS_INLINE void operator()(Load, const T* from) const {
    prefetch(from, kElements * int(sizeof(T)));
  }
};

// Fills vectors with a set of loads.
template <class Shape, LoadSet kLoads, bool kFromFirst, class Row, class Source, int kCount>
WS_INLINE void fill(const Row& row, typename Row::Vector (&vectors)[kCount], const Source& source, int base, int end) {
  if constexpr (kLoads != 0)
    each_vector<Shape, kCount, kFromFirst>(base, end, [&](int v, int begin, bool whole) {
      source.template fill<kLoads>(row, vectors[v], v, begin, whole);
    });
}

// ---- a stage -------------------------------------------------------------------------------------------------------------

// A thread's running states of folds, one for each element of a vector.
template <class State, int N> struct ElementStates;
template <class Op, class T, int N> struct ElementStates<Fold<Op, T>, N> {
  Lanes<Op, T, N> lanes;
  WS_INLINE void take(int e, const Fold<Op, T>& element) { lanes.take(e, element.value); }
  WS_INLINE Fold<Op, T> folded() const { return {lanes.folded()}; }
};
template <class First, class Second, int N> struct ElementStates<Both<First, Second>, N> {
  ElementStates<First, N> first;
  ElementStates<Second, N> second;
  WS_INLINE void take(int e, const Both<First, Second>& element) {
    first.take(e, element.first);
    second.take(e, element.second);
  }
  WS_INLINE Both<First, Second> folded() const { return {first.folded(), second.folded()}; }
};

// Runs body(vector, j, e) on the elements of vectors, of which `kHave` is there and the rest of `kLoads` is read.
template <class Shape, LoadSet kLoads, LoadSet kHave, bool kFromFirst> struct Visit {
  template <class Row, class Source, int kCount, class Body, class Before>
  static WS_INLINE void run(Row& row, typename Row::Vector (&vectors)[kCount], const Source& source, int base, int end,
                            const Body& body, const Before& before) {
    each_vector<Shape, kCount, kFromFirst>(base, end, [&](int v, int begin, bool whole) {
      source.template fill<(kLoads & ~kHave)>(row, vectors[v], v, begin, whole);
      before();
      each_element<Shape>(begin, whole, [&](int j, int e) { body(vectors[v], j, e); });
    });
  }
  template <class Row, class Source, int kCount, class Body>
  static WS_INLINE void run(Row& row, typename Row::Vector (&vectors)[kCount], const Source& source, int base, int end,
                            const Body& body) {
    run(row, vectors, source, base, end, body, [] {});
  }
};

// Folds, each by itself.
template <class State> struct Accumulate {
  template <class Shape, int kStage, LoadSet kHave, bool kFromFirst, class Row, class Source, int kCount>
  static WS_INLINE State of(Row& row, typename Row::Vector (&vectors)[kCount], const Source& source, int base, int end) {
    using Stage = StageOf<Row, kStage>;
    using All = Visit<Shape, Stage::kFirst, kHave, kFromFirst>;
    using Vector = typename Row::Vector;
    ElementStates<State, Shape::kWidth> states;
    const auto take = [&](Vector& here, int j, int e) { states.take(e, row.element(RowNumber<kStage>(), here, j, e)); };
    if constexpr (Stage::kQuick) {
      bool ordinary = true;  // whether all logarithms are of positive, finite, normal numbers
      All::run(row, vectors, source, base, end, [&](Vector& here, int j, int e) {
        states.take(e, row.element_quick(RowNumber<kStage>(), here, j, e, ordinary));
      });
      if (!ordinary) {
        states = {};
        All::run(row, vectors, source, base, end, take);
      }
    } else {
      All::run(row, vectors, source, base, end, take);
    }
    return states.folded();
  }
};

// A maximum, and exponentials about the one that the thread has at hand.
template <class T, bool kFast> struct Accumulate<ShiftedSum<T, kFast>> {
  template <class Shape, int kStage, LoadSet kHave, bool kFromFirst, class Row, class Source, int kCount>
  static WS_INLINE ShiftedSum<T, kFast> of(Row& row, typename Row::Vector (&vectors)[kCount], const Source& source,
                                           int base, int end) {
    using Stage = StageOf<Row, kStage>;
    using Vector = typename Row::Vector;
    Lanes<Maximum, T, Shape::kWidth> tops;
    Visit<Shape, Stage::kFirst, kHave, kFromFirst>::run(row, vectors, source, base, end, [&](Vector& here, int j, int e) {
      tops.take(e, row.top(RowNumber<kStage>(), here, j, e));
    });
    const T greatest = tops.folded(), pivot = ShiftedSum<T, kFast>::pivot(greatest);
    Lanes<Sum, T, Shape::kWidth> sums;
    Visit<Shape, Stage::kSecond, kHave, kFromFirst>::run(row, vectors, source, base, end, [&](Vector& here, int j, int e) {
      sums.take(e, row.term(RowNumber<kStage>(), here, j, e, pivot));
    });
    return {greatest, sums.folded()};
  }
};

// The same, with folds that the first of the two visits takes too.
template <class T, bool kFast, class Folds> struct Accumulate<Both<ShiftedSum<T, kFast>, Folds>> {
  template <class Shape, int kStage, LoadSet kHave, bool kFromFirst, class Row, class Source, int kCount>
  static WS_INLINE Both<ShiftedSum<T, kFast>, Folds> of(Row& row, typename Row::Vector (&vectors)[kCount],
                                                        const Source& source, int base, int end) {
    using Stage = StageOf<Row, kStage>;
    using Vector = typename Row::Vector;
    Lanes<Maximum, T, Shape::kWidth> tops;
    ElementStates<Folds, Shape::kWidth> folds;
    Visit<Shape, Stage::kFirst, kHave, kFromFirst>::run(row, vectors, source, base, end, [&](Vector& here, int j, int e) {
      tops.take(e, row.top(RowNumber<kStage>(), here, j, e));
      folds.take(e, row.element(RowNumber<kStage>(), here, j, e));
    });
    const T greatest = tops.folded(), pivot = ShiftedSum<T, kFast>::pivot(greatest);
    Lanes<Sum, T, Shape::kWidth> sums;
    Visit<Shape, Stage::kSecond, kHave, kFromFirst>::run(row, vectors, source, base, end, [&](Vector& here, int j, int e) {
      sums.take(e, row.term(RowNumber<kStage>(), here, j, e, pivot));
    });
    return {{greatest, sums.folded()}, folds.folded()};
  }
};

// A sum, and squares about the mean of what the thread has at hand.
template <class T, bool kEven, class M> struct Accumulate<Moments<T, kEven, M>> {
  template <class Shape, int kStage, LoadSet kHave, bool kFromFirst, class Row, class Source, int kCount>
  static WS_INLINE Moments<T, kEven, M> of(Row& row, typename Row::Vector (&vectors)[kCount], const Source& source,
                                           int base, int end) {
    using Stage = StageOf<Row, kStage>;
    using Vector = typename Row::Vector;
    Lanes<Sum, T, Shape::kWidth> sums, squares;
    T count = Shape::kEven ? T(kCount * Shape::kWidth) : T(0);
    const auto take = [&](Vector& here, int j, int e) {
      sums.take(e, row.value(RowNumber<kStage>(), here, j, e));
      if constexpr (Shape::kUnaligned) count += 1;
    };
    const auto count_vector = [&] {
      if constexpr (!Shape::kEven && !Shape::kUnaligned) count += Shape::kWidth;
    };
    Visit<Shape, Stage::kFirst, kHave, kFromFirst>::run(row, vectors, source, base, end, take, count_vector);
    M mean;
    if constexpr (Shape::kEven) mean = sums.folded() * (M(1) / T(kCount * Shape::kWidth));
    else mean = static_cast<M>(sums.folded()) / max(count, T(1));
    Visit<Shape, Stage::kSecond, kHave, kFromFirst>::run(row, vectors, source, base, end, [&](Vector& here, int j, int e) {
      squares.take(e, row.square(RowNumber<kStage>(), here, j, e, static_cast<T>(mean)));
    });
    return {mean, count, squares.folded()};
  }
};

// A thread's own state of the vectors at hand.
template <class Shape, int kStage, LoadSet kHave, bool kFromFirst, class Row, class Source, int kCount>
WS_INLINE StateOf<Row, kStage> accumulate(Row& row, typename Row::Vector (&vectors)[kCount], const Source& source,
                                          int base, int end) {
  return Accumulate<StateOf<Row, kStage>>::template of<Shape, kStage, kHave, kFromFirst>(row, vectors, source, base, end);
}

// ---- stores --------------------------------------------------------------------------------------------------------------

template <class Shape> struct WriteVector {
  int begin;
  bool whole;

  template <class T, int N> WS_INLINE void operator()(const Pack<T, N>& vector, T* to) const {
    if constexpr (Shape::kUnaligned && Shape::kStreaming) store_streaming_inside<Shape::kColumns>(to, vector, begin, whole);
    else if constexpr (Shape::kUnaligned) store_inside<Shape::kColumns>(to, vector, begin, whole);
    else if constexpr (Shape::kStreaming) store_streaming(to, vector);
    else store(to, vector);
  }
};

// The stores of the vectors at hand, of which `kHave` is there.
template <class Shape, LoadSet kHave, bool kFromFirst, class Row, class Source, int kCount>
WS_INLINE void store_elements(const Row& row, typename Row::Vector (&vectors)[kCount], const Source& source, int base,
                              int end) {
  each_vector<Shape, kCount, kFromFirst>(base, end, [&](int v, int begin, bool whole) {
    typename Row::Stored stored;
    typename Row::Vector& here = vectors[v];
    bool ordinary = true;
    if constexpr (Row::kQuickStores) {
      source.template fill<(Row::kStoreLoads & ~kHave)>(row, here, v, begin, whole);
      each_element<Shape>(begin, whole, [&](int j, int e) { row.finish_quick(stored, here, j, e, ordinary); });
    }
    if (!Row::kQuickStores || !ordinary) {
      source.template fill<(Row::kStoreLoads & ~kHave)>(row, here, v, begin, whole);
      each_element<Shape>(begin, whole, [&](int j, int e) { row.finish(stored, here, j, e); });
    }
    row.each_store(stored, begin, WriteVector<Shape>{begin, whole});
  });
}

// ---- parts of rows -------------------------------------------------------------------------------------------------------

// A thread's own state of a part of a row, which it reads into registers.
template <class Shape, int kStage, class Row, class Source>
WS_INLINE StateOf<Row, kStage> accumulate_part(Row& row, const Source& source, int base, int end) {
  using Stage = StageOf<Row, kStage>;
  constexpr LoadSet kRead = (Stage::kFirst | Stage::kSecond) & ~Row::kScalars;
  typename Row::Vector read[Shape::kVectors];
  fill<Shape, kRead, false>(row, read, source, base, end);
  return accumulate<Shape, kStage, kRead, false>(row, read, source, base, end);
}

// The stores of a part, likewise.
template <class Shape, class Row, class Source>
WS_INLINE void store_part(const Row& row, const Source& source, int base, int end) {
  constexpr LoadSet kRead = Row::kStoreLoads & ~Row::kScalars;
  typename Row::Vector read[Shape::kVectors];
  fill<Shape, kRead, false>(row, read, source, base, end);
  store_elements<Shape, kRead, false>(row, read, source, base, end);
}

// A thread's own state of a row in memory: of what it holds, `kHave`, or of part after part, whose states it joins.
template <class Shape, int kStage, LoadSet kHave, class Row>
WS_INLINE StateOf<Row, kStage> accumulate_row(Row& row, typename Row::Vector (&vectors)[Shape::kVectors], int first, int end) {
  using State = StateOf<Row, kStage>;
  const FromMemory<Shape> memory;
  if constexpr (Shape::kHoldsRow) {
    return accumulate<Shape, kStage, kHave, true>(row, vectors, memory, first, end);
  } else {
    State all = State::empty();  // a sum of sums, so that long rows stay exact
    const int stop = Shape::kEven ? first + Shape::kSlice : end;
    for (int part = first; part < stop; part += Shape::kVectors * Shape::kStride)
      all = State::join(all, accumulate_part<Shape, kStage>(row, memory, part, end));
    return all;
  }
}

// The stores of a row's elements, likewise.
template <class Shape, LoadSet kHave, class Row>
WS_INLINE void store_row_elements(const Row& row, typename Row::Vector (&vectors)[Shape::kVectors], int first, int end) {
  const FromMemory<Shape> memory;
  if constexpr (Shape::kHoldsRow) {
    store_elements<Shape, kHave, true>(row, vectors, memory, first, end);
  } else {
    const int stop = Shape::kEven ? first + Shape::kSlice : end;
    for (int part = first; part < stop; part += Shape::kVectors * Shape::kStride) store_part<Shape>(row, memory, part, end);
  }
}

// The row's own stores, by the thread that leads it, and `elements()`, which makes those of its elements.
template <class Row, class Elements> WS_INLINE void store_both(const Row& row, bool leads, const Elements& elements) {
  if constexpr (Row::kElementsFirst) elements();
  if (leads) row.store_row();
  if constexpr (!Row::kElementsFirst) elements();
}

// All stages of a row: `exchange.over<stage>(own)` gives the row's state for a thread's own.
template <class Shape, LoadSet kHave, int kStage = 0, class Row, class Exchange>
WS_INLINE void reduce_row(Row& row, typename Row::Vector (&vectors)[Shape::kVectors], int first, int end,
                          const Exchange& exchange) {
  if constexpr (kStage < Row::Stages::kCount) {
    const auto own = accumulate_row<Shape, kStage, kHave>(row, vectors, first, end);
    const auto state = exchange.template over<kStage>(own);
    row.learn(RowNumber<kStage>(), state, own);
    reduce_row<Shape, kHave, kStage + 1>(row, vectors, first, end, exchange);
  }
}

// ---- rows in shared memory -----------------------------------------------------------------------------------------------

// `kPlaces` vectors of each load of a set lie in shared memory, one load's after the other's; then the row's values. A thread
// copies for itself alone, so no barrier guards what it reads.
template <class Shape, class Row, LoadSet kLoads, int kPlaces> struct SharedRows {
  char* memory;

  static WS_INLINE constexpr int bytes_before(int number) {
    int bytes = 0;
    for (int before = 0; before < number; ++before)
      if (kLoads >> before & 1) bytes += kPlaces * Row::kLoadBytes[before];
    return bytes;
  }
  static WS_INLINE constexpr int number_of(LoadSet bit) {
    int number = 0;
    while (bit >> number != 1) ++number;
    return number;
  }
  // This thread's vector of a load; the threads' lie side by side.
  template <LoadSet kBit, class T> WS_INLINE Pack<T, Shape::kWidth>* at(int place) const {
    constexpr int kOffset = bytes_before(number_of(kBit));
    return reinterpret_cast<Pack<T, Shape::kWidth>*>(memory + kOffset) + threadIdx.x + place;
  }
  WS_INLINE char* values() const { return memory + bytes_before(64); }
};

// Starts the copy of a vector to its place.
template <class Shared, class Shape, Reuse kReuse> struct CopyVector {
  Shared shared;
  int place, begin;
  bool whole;

  template <class Load, class T> WS_INLINE void operator()(Load, const T* from) const {
    Pack<T, Shape::kWidth>* const to = shared.template at<Load::kBit, T>(place);
    if constexpr (Shape::kUnaligned) copy_inside_async<Shape::kColumns>(to, from, begin, whole);
    else copy_async<kReuse>(to, from);
  }
};

// Reads a vector from its place.
template <class Shared, class Vector> struct TakeVector {
  Shared shared;
  Vector& to;
  int place;

  template <class Load, class T> WS_INLINE void operator()(Load, const T*) const {
    to.*Load::kMember = *shared.template at<Load::kBit, T>(place);
  }
};

// Where a row's vectors come from: `kLoads` from shared memory, vector v from `place + v * kThreads`; the rest from memory.
template <class Shape, LoadSet kLoads, class Shared> struct FromShared {
  Shared shared;
  int place;

  template <LoadSet kWanted, class Row>
  WS_INLINE void fill(const Row& row, typename Row::Vector& to, int v, int begin, bool whole) const {
    const int at = place + v * Shape::kThreads;
    row.template each_load<(kWanted & kLoads)>(begin, TakeVector<Shared, typename Row::Vector>{shared, to, at});
    FromMemory<Shape>().template fill<(kWanted & ~kLoads)>(row, to, v, begin, whole);
  }
};

// Values that are loaded once a row have a place for each thread too, `kTurns` times.
template <int kThreads, int kTurns> struct CopyValue {
  char* values;
  int turn;

  template <int kBefore, class T> WS_INLINE void operator()(RowNumber<kBefore>, const T&, const T* from) const {
    copy_async(reinterpret_cast<T*>(values + kBefore * kTurns * kThreads) + turn * kThreads + threadIdx.x, from);
  }
};
template <int kThreads, int kTurns> struct TakeValue {
  char* values;
  int turn;

  template <int kBefore, class T> WS_INLINE void operator()(RowNumber<kBefore>, T& to, const T*) const {
    to = reinterpret_cast<const T*>(values + kBefore * kTurns * kThreads)[turn * kThreads + threadIdx.x];
  }
};
struct ReadValue {
  template <int kBefore, class T> WS_INLINE void operator()(RowNumber<kBefore>, T& to, const T* from) const { to = *from; }
};

}  // namespace ws
