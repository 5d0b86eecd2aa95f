// What is known of a matrix product at compile time: extents, tiles, and the order in which clusters take them.
#pragma once
#include "ws_split.cuh"

namespace ws {

constexpr int kTileRows = 128;   // of a block: 64 for each multiplying warpgroup
constexpr int kTileDepth = 64;   // 16-bit elements of k in a stage: 128 bytes, the swizzle's width

// `slices` of the depth; `pack`: neighbouring columns that the end takes at once.
struct Extents {
  int batch, m, n, k, slices, pack;
};

// Whether the elements of a row, or the rows of one depth, are neighbours in memory.
enum Direction { kAlong, kAcross };

// The third and further coordinates of a box: axes of a batch that the copy engine walks, or (unless there are any) the
// part and the layer.
struct LayerAxes {
  LayerAxis third{1, 0}, fourth = {}, fifth = {};
};

// How the operands lie in memory, or their halves in a workspace.
struct Directions {
  Direction left, right;
  LayerAxes left_layers = {}, right_layers = {};
};

// The columns of row m whose sums are wanted: m + first to m + last. Others' sums count as zero.
struct Band {
  int first, last;
};
constexpr Band kEverywhere{-0x40000000, 0x40000000};

// `group`: rows of tiles that are walked together, so that the second-level cache helps; `promote`: stages between promotions;
// `warpgroups` that multiply: two or four.
struct Tiling {
  int columns, stages, cluster, group, promote, warpgroups;
};

template <class Element_, int kParts_, Extents kExtents, Directions kDirections, Tiling kTiling, Band kBand = kEverywhere>
struct MatrixProduct {
  using Element = Element_;
  static constexpr int kParts = kParts_;
  static constexpr int kM = kExtents.m, kN = kExtents.n, kK = kExtents.k, kPack = kExtents.pack;
  static constexpr int kBatch = kExtents.batch, kSlices = kExtents.slices, kLayers = kBatch * kSlices;
  static constexpr int kSlice = slice_of(kK, kSlices);
  static constexpr Direction kLeft = kDirections.left, kRight = kDirections.right;
  static constexpr LayerAxes kLeftLayers = kDirections.left_layers, kRightLayers = kDirections.right_layers;
  static constexpr int kTileColumns = kTiling.columns, kStages = kTiling.stages, kCluster = kTiling.cluster;
  static constexpr int kGroup = kTiling.group, kPromote = kTiling.promote;
  static constexpr int kRowTiles = (kM + kTileRows * kCluster - 1) / (kTileRows * kCluster);  // of a whole cluster
  static constexpr int kColumnTiles = (kN + kTileColumns - 1) / kTileColumns;
  static constexpr int kTiles = kRowTiles * kColumnTiles * kLayers;
  static constexpr int kStageDepth = 128 / sizeof(Element), kProductDepth = 32 / sizeof(Element);
  static constexpr int kSteps = (kSlice + kStageDepth - 1) / kStageDepth;
  static constexpr int kStepDepth =  // multiplied of a stage
      kSteps == 1 ? (kSlice + kProductDepth - 1) / kProductDepth * kProductDepth : kStageDepth;
  static constexpr int kWarpgroups = kTiling.warpgroups, kThreads = 128 * (1 + kWarpgroups);
  static constexpr int kOwnColumns = 2 * kTileColumns / kWarpgroups;  // of a warpgroup
  static constexpr int kSums = kOwnColumns / 2;                       // accumulators of a thread
  // Registers of a thread once the copying warpgroup has handed back all but 24.
  static constexpr int kRegisters = kWarpgroups == 2 ? 240 : 112;

  // A cluster's rows and columns of one layer, by tiles; a block's own rows follow from its rank.
  struct Tile {
    int layer, row, column;

    WS_INLINE int first_row(int rank) const { return (row * kCluster + rank) * kTileRows; }
    WS_INLINE int first_column() const { return column * kTileColumns; }
    WS_INLINE bool is_wanted() const {
      if constexpr (!kIsBanded) return true;
      const int last_row = first_row(kCluster) - 1, last_column = first_column() + kTileColumns - 1;
      return last_column - first_row(0) >= kBand.first && first_column() - last_row <= kBand.last;
    }
  };

  // Tiles in the order in which clusters take them: groups of rows of tiles, in each column by column.
  static WS_INLINE Tile tile_at(int number) {
    const int layer = number / (kRowTiles * kColumnTiles);
    const int place = number % (kRowTiles * kColumnTiles);
    if constexpr (kIsBanded) return banded_tile(layer, place);
    const int first = place / (kGroup * kColumnTiles) * kGroup;
    const int rows = min(kGroup, kRowTiles - first);
    const int inside = place % (kGroup * kColumnTiles);
    return {layer, first + inside % rows, inside / rows};
  }

  // Of a band: first all tiles of a layer that are wanted, so that all clusters have as many, row by row.
  static constexpr bool kIsBanded = kBand.first != kEverywhere.first || kBand.last != kEverywhere.last;
  static WS_INLINE constexpr int clamped(int column) { return column < 0 ? 0 : column < kColumnTiles ? column : kColumnTiles; }
  static WS_INLINE constexpr int first_wanted(int row) {
    const int column = row * kCluster * kTileRows + kBand.first;
    return column < 0 ? 0 : clamped(column / kTileColumns);
  }
  static WS_INLINE constexpr int wanted_in(int row) {
    const int last = (row + 1) * kCluster * kTileRows - 1 + kBand.last;
    const int end = last < 0 ? 0 : clamped(last / kTileColumns + 1);
    return end > first_wanted(row) ? end - first_wanted(row) : 0;
  }
  static WS_INLINE constexpr int count_wanted() {
    int count = 0;
    for (int row = 0; row < kRowTiles; ++row) count += wanted_in(row);
    return count;
  }
  static WS_INLINE Tile banded_tile(int layer, int place) {
    constexpr int kWanted = count_wanted();
    const bool is_wanted = place < kWanted;
    int row = 0, rest = is_wanted ? place : place - kWanted;
    while (true) {
      const int count = is_wanted ? wanted_in(row) : kColumnTiles - wanted_in(row);
      if (rest < count) break;
      rest -= count;
      ++row;
    }
    const int first = first_wanted(row);
    const int column = is_wanted ? first + rest : rest < first ? rest : rest + wanted_in(row);
    return {layer, row, column};
  }

  // Elements of depth that a layer really has: the last slice may be shorter.
  static WS_INLINE int depth_of(int layer) { return min(kSlice, kK - layer % kSlices * kSlice); }
};

// Of the `kRows` rows of a tile that a thread has packs of; here packs go to their end at once.
template <class P, class Finish, int kRows> struct RowEnds {
  WS_INLINE void take(int, const Finish& finish, int layer, int m, int n, const Pack<float, P::kPack>& sums) {
    finish(layer, m, n, sums);
  }
  template <int kLanes> WS_INLINE void leave(int, const Finish&, int, int, int) {}
};

}  // namespace ws
