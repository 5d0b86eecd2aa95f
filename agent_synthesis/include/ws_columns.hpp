// Reductions down columns, such as a sum over dimension 0: a tile of columns keeps a running result of each in the first-level
// cache while the rows stream past, and every loop vectorises over columns. Short groups of rows add up in the type of values,
// groups in that of totals. Where pieces of the rows go to different threads, they are joined in order.
// The generated struct has, beside what `ws_threads.hpp` lists:
//
//   kTiling             sizes, see below
//   Outer               Space of the axes beside columns and rows
//   Rows                Space of the reduced axes but the last
//   Sweeps              List of Reductions: one for each sweep over the rows
//   row(at)             gets coordinates along the reduced axes
//   ahead(j, count)     asks memory for what a row that comes soon has from column j on; may be missing, as `row` may
//   fold(Number<s>, found, j, e)   takes the row's column j, which is column e of the tile, into sweep s's running results
//   learn(Number<s>, found)        where those stay for what comes later
//   prepare(Number<s>, j, e)       what is computed once a column, before sweep s or, after the last, the stores; may be missing
//   first_row(), end_row()         of what a column reduces, where that is a part of the rows; what `locate` decides
//   store_column(j, e)  what is stored once a column, if anything
//   store(j, e)         what is stored of every row, if anything
//   piece(Number<i>)    memory for pieces' totals of reduction i, if rows are split
#pragma once
#include "ws_results.hpp"

namespace ws {

struct ColumnTiling {
  long columns;  // neighbours in memory
  long rows;     // along the last reduced axis
  long tile;     // columns of a tile
  long pieces;   // that the first reduced axis is split into
  int threads;   // see Team
};

template <class W> struct Columns {
  static constexpr ColumnTiling kTiling = W::kTiling;
  static constexpr long kGroup = 64;  // rows that add up in the type of values
  static constexpr long kTile = kTiling.tile, kTiles = (kTiling.columns + kTile - 1) / kTile, kPieces = kTiling.pieces;
  static constexpr long kPoints = W::Outer::kPoints * kTiling.columns;
  static constexpr int kLast = W::Rows::kAxes;  // number of the last reduced axis
  static constexpr long kFirstRows = kLast ? W::Rows::kExtent[0] : kTiling.rows;  // extent of the first
  static constexpr bool kIsLong = W::Rows::kPoints * kTiling.rows > kGroup;
  using Sweeps = typename W::Sweeps;
  using Threads = Team<kTiling.threads>;

  // Columns of a tile, and the range of the first reduced axis that is visited.
  struct Range {
    long begin, end;
    long first = 0, last = kFirstRows;
    WS_INLINE explicit Range(long tile)
        : begin(kTiles == 1 ? 0 : tile * kTile), end(end_of_block<kTiling.columns, kTile>(begin)) {}
    template <class Visit> WS_INLINE void each_column(const Visit& visit) const {
#pragma omp simd
      for (long j = begin; j < end; ++j) visit(j, j - begin);
    }
  };

  // Rows of the last reduced axis, at a point of the others.
  template <class Visit>
  static WS_INLINE void each_row(W& nest, const long* outer, long first, long last, const Visit& visit) {
    long at[kLast + 1];
    for (int axis = 0; axis < kLast; ++axis) at[axis] = outer[axis];
    for (long k = first; k < last; ++k) {
      at[kLast] = k;
      if constexpr (requires { nest.row(at); }) nest.row(at);
      visit();
    }
  }

  template <int s> struct Sweep {
    using Reductions = typename Sweeps::template At<s>;
    template <int i> using Reduction = typename Reductions::template At<i>;
    template <int i> static constexpr bool kIsGrouped = kIsLong && Reduction<i>::kWidens;
    template <int... i> static constexpr bool any_is_grouped(std::integer_sequence<int, i...>) { return (kIsGrouped<i> || ...); }
    typename Reductions::template Running<kTile> found;
    typename Reductions::template Totals<kTile> totals;  // of those that are grouped

    template <bool kGrouped, class Visit> static WS_INLINE void each(const Visit& visit) {
      each_number<Reductions::kCount>([&](auto number) WS_BODY {
        if constexpr (kIsGrouped<number.value> == kGrouped) visit(number);
      });
    }
    template <bool kGrouped> WS_INLINE void clear() {
      each<kGrouped>([&](auto i) WS_BODY { fill(found.template at<i.value>(), Reduction<i.value>::neutral()); });
    }

    WS_INLINE void take_rows(W& nest, const Range& range, const long* outer, long first, long last) {
      each_row(nest, outer, first, last, [&]() WS_BODY {
        // Later sweeps find in the cache what the first one has read.
        if constexpr (s == 0 && requires { nest.ahead(0L, 0L); }) nest.ahead(range.begin, range.end - range.begin);
        range.each_column([&](long j, long e) WS_BODY { nest.fold(Number<s>(), found, j, e); });
      });
    }

    WS_INLINE void take_groups(W& nest, const Range& range, const long* outer, long first, long last) {
      constexpr long kRows = kLast ? kTiling.rows : kTiling.rows / kPieces;
      constexpr long kStep = kRows < 1 ? 1 : kRows < kGroup ? kRows : kGroup;
      if constexpr (!any_is_grouped(std::make_integer_sequence<int, Reductions::kCount>())) {
        take_rows(nest, range, outer, first, last);
        return;
      }
      for (long k = first; k < last; k += kStep) {
        clear<true>();
        take_rows(nest, range, outer, k, k + kStep < last ? k + kStep : last);
        each<true>([&](auto i) WS_BODY {
          range.each_column([&](long, long e) WS_BODY {
            totals.template at<i.value>().value[e] += found.template at<i.value>().value[e];
          });
        });
      }
    }

    WS_INLINE void accumulate(W& nest, const Range& range) {
      each<true>([&](auto i) WS_BODY { fill(totals.template at<i.value>(), Reduction<i.value>::neutral_total()); });
      clear<false>();
      if constexpr (kLast == 0) {
        take_groups(nest, range, nullptr, range.first, range.last);
      } else {
        constexpr long kInside = W::Rows::points_from(1);
        W::Rows::each(range.first * kInside, range.last * kInside, [&](const long* outer, long) WS_BODY {
          take_groups(nest, range, outer, 0, kTiling.rows);
        });
      }
    }

    // The results as values.
    WS_INLINE void round(const Range& range) {
      each<true>([&](auto i) WS_BODY {
        range.each_column([&](long, long e) WS_BODY {
          found.template at<i.value>().value[e] = static_cast<typename Reduction<i.value>::Value>(totals.template at<i.value>().value[e]);
        });
      });
    }

    WS_INLINE void leave_piece(const W& nest, const Range& range, long first) const {
      each_number<Reductions::kCount>([&](auto i) WS_BODY {
        range.each_column([&](long j, long e) WS_BODY {
          if constexpr (kIsGrouped<i.value>) nest.piece(i)[first + j] = totals.template at<i.value>().value[e];
          else nest.piece(i)[first + j] = found.template at<i.value>().value[e];
        });
      });
    }
    WS_INLINE void join_pieces(const W& nest, const Range& range, long first) {
      each_number<Reductions::kCount>([&](auto i) WS_BODY {
        using R = Reduction<i.value>;
        using Total = typename R::Total;
        auto& total = totals.template at<i.value>();
        fill(total, R::neutral_total());
        for (long piece = 0; piece < kPieces; ++piece) {
          range.each_column([&](long j, long e) WS_BODY {
            total.template take<typename R::Operation>(e, nest.piece(i)[piece * kPoints + first + j]);
          });
        }
        range.each_column([&](long, long e) WS_BODY {
          found.template at<i.value>().value[e] = static_cast<typename R::Value>(static_cast<Total>(total.value[e]));
        });
      });
    }
  };

  template <int s> static WS_INLINE void prepare(W& nest, const Range& range) {
    if constexpr (requires { nest.prepare(Number<s>(), 0L, 0L); })
      range.each_column([&](long j, long e) WS_BODY { nest.prepare(Number<s>(), j, e); });
  }

  static WS_INLINE void store(W& nest, const Range& range) {
    prepare<Sweeps::kCount>(nest, range);
    if constexpr (requires { nest.store_column(0L, 0L); })
      range.each_column([&](long j, long e) WS_BODY { nest.store_column(j, e); });
    if constexpr (requires { nest.store(0L, 0L); }) {
      W::Rows::each([&](const long* outer, long) WS_BODY {
        each_row(nest, outer, 0, kTiling.rows, [&]() WS_BODY { store_block(nest, range.begin, range.end); });
      });
    }
  }

  template <int s = 0> static WS_INLINE void visit_tile(W& nest, const Range& range) {
    if constexpr (s == Sweeps::kCount) {
      store(nest, range);
    } else {
      prepare<s>(nest, range);
      Sweep<s> sweep;
      sweep.accumulate(nest, range);
      sweep.round(range);
      nest.learn(Number<s>(), sweep.found);
      visit_tile<s + 1>(nest, range);
    }
  }
};

template <class W> WS_INLINE void reduce_columns(const W& nest) {
  using Kernel = Columns<W>;
  using Threads = typename Kernel::Threads;
  using Tiles = typename W::Outer::template With<Kernel::kTiles>;
  constexpr int kTileAxis = W::Outer::kAxes;
  if constexpr (Kernel::kPieces == 1) {
    Threads::run(nest, [](W& own) WS_BODY {
      Threads::template share<Tiles>([&](const long* at, long) WS_BODY {
        locate(own, at);
        typename Kernel::Range range(at[kTileAxis]);
        if constexpr (requires { own.first_row(); }) range.first = own.first_row(), range.last = own.end_row();
        Kernel::visit_tile(own, range);
      });
    });
  } else {
    Threads::run(nest, [](W& own) WS_BODY {
      Threads::template share<typename Tiles::template Times<Kernel::kPieces>>([&](const long* at, long number) WS_BODY {
        const long piece = at[0];
        locate(own, at + 1);
        typename Kernel::Range range(at[kTileAxis + 1]);
        range.first = piece * Kernel::kFirstRows / Kernel::kPieces;
        range.last = (piece + 1) * Kernel::kFirstRows / Kernel::kPieces;
        typename Kernel::template Sweep<0> sweep;
        sweep.accumulate(own, range);
        sweep.leave_piece(own, range, number / Kernel::kTiles * Kernel::kTiling.columns);
      });
    });
    Threads::run(nest, [](W& own) WS_BODY {
      Threads::template share<Tiles>([&](const long* at, long number) WS_BODY {
        locate(own, at);
        const typename Kernel::Range range(at[kTileAxis]);
        typename Kernel::template Sweep<0> sweep;
        sweep.join_pieces(own, range, number / Kernel::kTiles * Kernel::kTiling.columns);
        own.learn(Number<0>(), sweep.found);
        Kernel::store(own, range);
      });
    });
  }
}

}  // namespace ws
