// Nests without reductions: blocks of the innermost axis, each one vectorised loop, spread over threads. Where loads run along
// another axis than stores, tiles of a few rows keep the lines of both in the cache until they have been used.
// The generated struct has, beside what `ws_threads.hpp` lists:
//
//   kTiling      sizes, see below
//   Outer        Space of the axes outside of rows
//   locate(at)   gets coordinates along Outer, then the row
//   store(j, e)  computes element j of the row, which is element e of its block, and stores it
#pragma once
#include "ws_threads.hpp"

namespace ws {

struct PointwiseTiling {
  long rows, columns;   // of a matrix; columns lie along the innermost axis
  long tile_rows;       // rows of a tile: 1, or as many as a line of what is read has elements
  long block;           // columns of a tile
  int threads;          // see Team
};

template <class W> struct Pointwise {
  static constexpr PointwiseTiling kTiling = W::kTiling;
  static constexpr long kBlocks = (kTiling.columns + kTiling.block - 1) / kTiling.block;
  static constexpr long kTiles = (kTiling.rows + kTiling.tile_rows - 1) / kTiling.tile_rows;
  static constexpr int kRow = W::Outer::kAxes;  // number of the row's coordinate
  using Tiles = typename W::Outer::template With<kTiles>::template With<kBlocks>;
  using Threads = Team<kTiling.threads>;

  static WS_INLINE void compute_tile(W& computation, const long* tile) {
    long at[kRow + 1];
    for (int k = 0; k < kRow; ++k) at[k] = tile[k];
    const long begin = kBlocks == 1 ? 0 : tile[kRow + 1] * kTiling.block;
    const long end = end_of_block<kTiling.columns, kTiling.block>(begin);
    const long row_begin = tile[kRow] * kTiling.tile_rows;
    const long row_end = end_of_block<kTiling.rows, kTiling.tile_rows>(row_begin);
    for (long row = row_begin; row < row_end; ++row) {
      at[kRow] = row;
      locate(computation, at);
      store_block(computation, begin, end);
    }
  }
};

template <class W> WS_INLINE void compute_pointwise(const W& computation) {
  using Kernel = Pointwise<W>;
  using Threads = typename Kernel::Threads;
  Threads::run(computation, [](W& own) WS_BODY {
    Threads::template share<typename Kernel::Tiles>([&](const long* tile, long) WS_BODY { Kernel::compute_tile(own, tile); });
  });
}

}  // namespace ws
