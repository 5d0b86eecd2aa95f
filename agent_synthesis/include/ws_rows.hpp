// Reductions along contiguous rows, such as softmax and the norms: a row is taken in blocks, a block in interleaved lanes, and
// what blocks have found is joined in order. So the bits depend neither on the width of vectors nor on threads, nor on whether a
// thread has a row to itself or all threads share one.
// The generated struct has, beside what `ws_threads.hpp` lists:
//
//   kTiling      sizes, see below
//   Outer        Space of the rows
//   Parts        Space of the reduced axes but the last
//   Sweeps       List of Reductions: one for each sweep over the elements
//   enter(at)    gets coordinates along Parts; may be missing
//   fold(Number<s>, found, j, lane)   takes element j into sweep s's running results
//   learn(Number<s>, found)           what the sweep has found, one value of each reduction
//   store_row()  what is stored once a row, if anything
//   store(j, e)  what is stored of every element, if anything
#pragma once
#include "ws_results.hpp"

namespace ws {

struct RowTiling {
  long columns;  // along the last reduced axis
  long block;    // of them at a time
  long lanes;    // partial results of a block, a power of two
  bool split;    // all threads share a row
  bool online;   // the first two sweeps are the maximum and the sum of exponentials less that, and are made as one
  int threads;   // see Team
};

template <class W> struct Rows {
  static constexpr RowTiling kTiling = W::kTiling;
  static constexpr long kLanes = kTiling.lanes, kBlocks = (kTiling.columns + kTiling.block - 1) / kTiling.block;
  static constexpr int kBlockAxis = W::Parts::kAxes;
  using Pieces = typename W::Parts::template With<kBlocks>;
  static constexpr long kPieces = Pieces::kPoints;
  static constexpr bool kIsShared = kTiling.split && kPieces > 1;
  using Sweeps = typename W::Sweeps;
  using Threads = Team<kTiling.threads>;

  // Calls `visit(own, begin, end, piece)` for the blocks of a row.
  template <class Visit> static WS_INLINE void each_piece(W& nest, const Visit& visit) {
    if constexpr (kIsShared) {
      Threads::run(nest, [&](W& own) WS_BODY {
        Threads::template share<Pieces>([&](const long* at, long piece) WS_BODY { visit_piece(own, at, piece, visit); });
      });
    } else {
      Pieces::each([&](const long* at, long piece) WS_BODY { visit_piece(nest, at, piece, visit); });
    }
  }
  template <class Visit> static WS_INLINE void visit_piece(W& own, const long* at, long piece, const Visit& visit) {
    if constexpr (requires { own.enter(at); }) own.enter(at);
    const long begin = kBlocks == 1 ? 0 : at[kBlockAxis] * kTiling.block;
    visit(own, begin, end_of_block<kTiling.columns, kTiling.block>(begin), piece);
  }

  // What sweep s finds in a block, in lanes.
  template <int s> struct Block {
    typename Sweeps::template At<s>::template Running<kLanes> lanes;
    WS_INLINE Block(const W& nest, long begin, long end) {
      lanes.clear();
      for_lanes<kLanes>(begin, end, [&](long j, long lane) WS_BODY { nest.fold(Number<s>(), lanes, j, lane); });
    }
    template <int i> WS_INLINE auto folded() {
      return fold<typename Sweeps::template At<s>::template At<i>::Operation>(lanes.template at<i>());
    }
  };

  template <int s> static WS_INLINE void sweep(W& nest) {
    using Found = typename Sweeps::template At<s>;
    constexpr long kKept = kIsShared ? kPieces : 1;
    typename Found::template Running<1> found;
    typename Found::template Totals<kKept> totals;
    const auto each = [](const auto& visit) WS_BODY { each_number<Found::kCount>(visit); };
    if constexpr (kPieces > 1 && !kIsShared)
      each([&](auto i) WS_BODY { totals.template at<i.value>().set(0, Found::template At<i.value>::neutral_total()); });
    each_piece(nest, [&](W& own, long begin, long end, long piece) WS_BODY {
      Block<s> block(own, begin, end);
      each([&](auto i) WS_BODY {
        using Operation = typename Found::template At<i.value>::Operation;
        const auto folded = block.template folded<i.value>();
        if constexpr (kPieces == 1) found.template at<i.value>().set(0, folded);
        else if constexpr (kIsShared) totals.template at<i.value>().set(piece, folded);
        else totals.template at<i.value>().template take<Operation>(0, folded);
      });
    });
    if constexpr (kPieces > 1) {
      each([&](auto i) WS_BODY {
        using Reduction = typename Found::template At<i.value>;
        auto& of_piece = totals.template at<i.value>();
        typename Reduction::Total total = of_piece.get(0);
        if constexpr (kIsShared) {
          total = Reduction::neutral_total();
          for (long piece = 0; piece < kPieces; ++piece)
            total = Reduction::Operation::template of<typename Reduction::Total>(total, of_piece.get(piece));
        }
        found.template at<i.value>().set(0, static_cast<typename Reduction::Value>(total));
      });
    }
    nest.learn(Number<s>(), found);
  }

  // Sweeps 0 and 1 as one. Inside a block the block's own maximum stands in for the row's.
  static WS_INLINE void sweep_online(W& nest) {
    using Top = typename Sweeps::template At<0>;
    using Value = typename Top::template At<0>::Value;
    typename Top::template Running<1> top;
    typename Sweeps::template At<1>::template Running<1> total;
    OnlineSum<Value> online;
    OnlineSum<Value> of_piece[kIsShared ? kPieces : 1];
    each_piece(nest, [&](W& own, long begin, long end, long piece) WS_BODY {
      const Value block_maximum = Block<0>(own, begin, end).template folded<0>();
      typename Top::template Running<1> shift;
      shift.first.set(0, OnlineSum<Value>::shift(block_maximum));
      own.learn(Number<0>(), shift);
      const Value block_sum = Block<1>(own, begin, end).template folded<0>();
      if constexpr (kIsShared) of_piece[piece].merge(block_maximum, block_sum);
      else online.merge(block_maximum, block_sum);
    });
    if constexpr (kIsShared)
      for (const auto& part : of_piece) online.merge(part.maximum, part.sum);
    top.first.set(0, online.maximum);
    nest.learn(Number<0>(), top);
    total.first.set(0, static_cast<Value>(online.result()));
    nest.learn(Number<1>(), total);
  }

  template <int s> static WS_INLINE void sweep_from(W& nest) {
    if constexpr (s < Sweeps::kCount) sweep<s>(nest), sweep_from<s + 1>(nest);
  }

  static WS_INLINE void reduce_row(W& nest) {
    if constexpr (kTiling.online) sweep_online(nest), sweep_from<2>(nest);
    else sweep_from<0>(nest);
    if constexpr (requires { nest.store_row(); }) nest.store_row();
    if constexpr (requires { nest.store(0L, 0L); })
      each_piece(nest, [](W& own, long begin, long end, long) WS_BODY { store_block(own, begin, end); });
  }
};

template <class W> WS_INLINE void reduce_rows(const W& nest) {
  // Threads that share a row are started for each sweep; its rows go one after the other.
  using Threads = Team<W::kTiling.split ? 1 : W::kTiling.threads>;
  Threads::run(nest, [](W& own) WS_BODY {
    Threads::template share<typename W::Outer>([&](const long* at, long) WS_BODY {
      locate(own, at);
      Rows<W>::reduce_row(own);
    });
  });
}

}  // namespace ws
