// Scans of a block of values that lies in the first-level cache.
// The one idea: four values at a time are scanned among themselves, so that only one operation in four waits for the one before.
// The order of operations is the same on every machine. Below are the loops over rows, columns and threads.
#pragma once
#include "ws_results.hpp"

namespace ws {

namespace detail {
// Integers wrap around, which is only defined without a sign.
template <class T> struct FourOf { typedef T type __attribute__((vector_size(32), aligned(8), may_alias)); };
template <> struct FourOf<std::int64_t> {
  typedef std::uint64_t type __attribute__((vector_size(32), aligned(8), may_alias));
};
typedef std::int64_t FourPlaces __attribute__((vector_size(32)));
}  // namespace detail

// values[i] becomes the running result up to element i (of those after i, with kReverse; without i, with kExclusive), from
// `before` on, which becomes the running result of all. T is double or a 64-bit integer.
template <class Operation, bool kReverse, bool kExclusive, class T>
inline void scan(T* values, long count, T neutral, T& before) {
  using Four = typename detail::FourOf<T>::type;
  constexpr detail::FourPlaces kByOne = kReverse ? detail::FourPlaces{1, 2, 3, 4} : detail::FourPlaces{4, 0, 1, 2};
  constexpr detail::FourPlaces kByTwo = kReverse ? detail::FourPlaces{2, 3, 4, 5} : detail::FourPlaces{4, 5, 0, 1};
  constexpr detail::FourPlaces kLast = kReverse ? detail::FourPlaces{0, 0, 0, 0} : detail::FourPlaces{3, 3, 3, 3};
  const Four none = Four{} + neutral;
  Four upto = Four{} + before;
  const long fours = count / 4;
  for (long number = 0; number < fours; ++number) {
    T* place = kReverse ? values + count - 4 - 4 * number : values + 4 * number;
    Four four = *reinterpret_cast<Four*>(place);
    four = Operation::of(__builtin_shuffle(four, none, kByOne), four);
    four = Operation::of(__builtin_shuffle(four, none, kByTwo), four);
    *reinterpret_cast<Four*>(place) =
        Operation::of(upto, static_cast<Four>(kExclusive ? __builtin_shuffle(four, none, kByOne) : four));
    upto = Operation::of(upto, static_cast<Four>(__builtin_shuffle(four, kLast)));
  }
  before = static_cast<T>(upto[0]);
  for (long number = 0; number < count % 4; ++number) {
    T& value = values[kReverse ? count % 4 - 1 - number : 4 * fours + number];
    const T next = Operation::of(before, value);
    value = kExclusive ? before : next;
    before = next;
  }
}

// What a skeleton of scans asks of the generated struct, beside what `ws_threads.hpp` lists:
//
//   kTiling      sizes, see below
//   Outer        Space of the axes beside the scanned one, for columns without that along which tiles lie
//   Scans        ScanList
//   Held         rows: has what is scanned; element e of the block of scan s is `held->scanned.get<s>(e)`
//   row(at)      columns: gets the row
//   make(Number<s>, j, e)   rows: puts element j of the row into element e of block s
//   step(running, j, e)     columns: moves the running values of column j on and stores; it is column e of the tile
//   store(j, e)             rows: stores element j of a row
template <class Operation_, class T, bool kReverse_, bool kExclusive_> struct Scan {
  using Operation = Operation_;
  using Value = T;
  static constexpr bool kReverse = kReverse_, kExclusive = kExclusive_;
};
// Scans in one direction.
template <class... All> struct ScanList : List<All...> {
  static constexpr bool kReverse = (All::kReverse || ...);
  template <long kCount> struct Running : Arrays<kCount, typename All::Value...> {
    template <int i> using At = typename List<All...>::template At<i>;
    template <int i> WS_INLINE auto get(long e) const { return this->template at<i>().value[e]; }
    template <int i> WS_INLINE void set(long e, typename At<i>::Value value) { this->template at<i>().value[e] = value; }
    // Takes a value into a running one; returns the result at its place.
    template <int i> WS_INLINE auto take(long e, typename At<i>::Value value) {
      auto& running = this->template at<i>().value[e];
      const auto before = running, after = At<i>::Operation::template of<typename At<i>::Value>(before, value);
      running = after;
      return At<i>::kExclusive ? before : after;
    }
  };
};

struct ScanTiling {
  long extent;  // of the scanned axis
  long block;   // elements of a row at a time
  long parts;   // of a row, which threads share; 1: a thread has a row to itself
  int threads;  // see Team
};

// Rows: a block of values is made in the first-level cache, scanned there, and stored from there.
template <class W> struct ScanRows {
  static constexpr ScanTiling kTiling = W::kTiling;
  static constexpr long kBlock = kTiling.block, kBlocks = (kTiling.extent + kBlock - 1) / kBlock, kParts = kTiling.parts;
  using Scans = typename W::Scans;
  using Threads = Team<kTiling.threads>;
  using Before = typename Scans::template Running<1>;  // running results of all before a block

  static WS_INLINE void clear(Before& before) {
    each_number<Scans::kCount>([&](auto s) WS_BODY {
      using S = typename Scans::template At<s.value>;
      before.template at<s.value>().value[0] = S::Operation::template neutral<typename S::Value>();
    });
  }

  template <bool kStores> static WS_INLINE void scan_blocks(W& nest, long first, long last, Before& before) {
    typename Scans::template Running<kBlock>& scanned = nest.held->scanned;
    for (long block = first; block < last; ++block) {
      long begin = block * kBlock, end = begin + kBlock < kTiling.extent ? begin + kBlock : kTiling.extent;
      if constexpr (Scans::kReverse) {
        end = kTiling.extent - block * kBlock;
        begin = end > kBlock ? end - kBlock : 0;
      }
      each_number<Scans::kCount>([&](auto s) WS_BODY {
        using S = typename Scans::template At<s.value>;
        using T = typename S::Value;
#pragma omp simd
        for (long j = begin; j < end; ++j) nest.make(s, j, j - begin);
        scan<typename S::Operation, S::kReverse, S::kExclusive>(
            scanned.template at<s.value>().value, end - begin, S::Operation::template neutral<T>(),
            before.template at<s.value>().value[0]);
      });
      if constexpr (kStores) store_block(nest, begin, end);
    }
  }

  static WS_INLINE void scan_row(W& nest) {
    Before before;
    clear(before);
    scan_blocks<true>(nest, 0, kBlocks, before);
  }

  // Totals of the parts, then each part from where the ones before it end.
  static WS_INLINE void scan_split_row(const W& nest) {
    using S = typename Scans::template At<0>;
    typename S::Value of_part[kParts];
    const auto each_part = [&](const auto& visit) WS_BODY {
      Threads::run(nest, [&](W& own) WS_BODY {
        Threads::template share<Space<kParts>>([&](const long*, long part) WS_BODY { visit(own, part); });
      });
    };
    each_part([&](W& own, long part) WS_BODY {
      Before before;
      clear(before);
      scan_blocks<false>(own, part * kBlocks / kParts, (part + 1) * kBlocks / kParts, before);
      of_part[part] = before.first.value[0];
    });
    typename S::Value running = S::Operation::template neutral<typename S::Value>();
    for (auto& part : of_part) {
      const auto total = part;
      part = running;
      running = S::Operation::of(running, total);
    }
    each_part([&](W& own, long part) WS_BODY {
      Before before;
      before.first.value[0] = of_part[part];
      scan_blocks<true>(own, part * kBlocks / kParts, (part + 1) * kBlocks / kParts, before);
    });
  }
};

template <class W> WS_INLINE void scan_rows(const W& nest) {
  using Kernel = ScanRows<W>;
  using Threads = Team<(Kernel::kParts > 1 ? 1 : W::kTiling.threads)>;
  Threads::run(nest, [](W& own) WS_BODY {
    Threads::template share<typename W::Outer>([&](const long* at, long) WS_BODY {
      locate(own, at);
      if constexpr (Kernel::kParts > 1) Kernel::scan_split_row(own);
      else Kernel::scan_row(own);
    });
  });
}

struct ScanColumnTiling {
  long rows, columns;  // rows along the scanned axis
  long tile;           // columns whose running values stay in the first-level cache
  int threads;         // see Team
};

// Columns: a tile of running values stays in the cache while the rows stream past.
template <class W> struct ScanColumns {
  static constexpr ScanColumnTiling kTiling = W::kTiling;
  static constexpr long kTile = kTiling.tile, kTiles = (kTiling.columns + kTile - 1) / kTile;
  using Scans = typename W::Scans;

  static WS_INLINE void scan_tile(W& nest, long tile) {
    const long begin = kTiles == 1 ? 0 : tile * kTile, end = end_of_block<kTiling.columns, kTile>(begin);
    typename Scans::template Running<kTile> running;
    each_number<Scans::kCount>([&](auto s) WS_BODY {
      using S = typename Scans::template At<s.value>;
      fill(running.template at<s.value>(), S::Operation::template neutral<typename S::Value>());
    });
    for (long number = 0; number < kTiling.rows; ++number) {
      const long k = Scans::kReverse ? kTiling.rows - 1 - number : number;
      nest.row(&k);
#pragma omp simd
      for (long j = begin; j < end; ++j) nest.step(running, j, j - begin);
    }
  }
};

template <class W> WS_INLINE void scan_columns(const W& nest) {
  using Kernel = ScanColumns<W>;
  using Threads = Team<W::kTiling.threads>;
  Threads::run(nest, [](W& own) WS_BODY {
    Threads::template share<typename W::Outer::template With<Kernel::kTiles>>([&](const long* at, long) WS_BODY {
      locate(own, at);
      Kernel::scan_tile(own, at[W::Outer::kAxes]);
    });
  });
}

}  // namespace ws
