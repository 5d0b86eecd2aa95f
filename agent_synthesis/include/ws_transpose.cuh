// Tiles that are turned in shared memory: written along one axis and read along the other, both without bank conflicts.
// The one idea: an exclusive or with the row's number says where in its row a pack lies, so that a column is in all banks.
#pragma once
#include "ws_types.cuh"

namespace ws {

// kRows x kColumns elements, both powers of two. Along a row they move in packs of kPack; down a column one by one, by
// threads that are kGroup rows apart.
template <class T, int kRows, int kColumns, int kPack, int kGroup> struct alignas(16) Tile {
  T elements[kRows * kColumns];

  static WS_INLINE unsigned place(unsigned row, unsigned column) {
    const unsigned turned = column / kPack ^ (row / kGroup % (kColumns / kPack));
    return row * kColumns + turned * kPack + column % kPack;
  }
  WS_INLINE T& at(int row, int column) { return elements[place(row, column)]; }
  WS_INLINE void put(int row, int column, const Pack<T, kPack>& pack) {
    *reinterpret_cast<Pack<T, kPack>*>(elements + place(row, column)) = pack;
  }
  WS_INLINE Pack<T, kPack> take(int row, int column) const {
    return *reinterpret_cast<const Pack<T, kPack>*>(elements + place(row, column));
  }
};

// Which pack of a tile a thread moves: kAlong neighbours of a warp lie along a row of kPacks, the others in the next rows.
struct Spot { int row, pack; };
template <int kPacks, int kAlong> WS_INLINE Spot spot(unsigned number) {
  const unsigned warp = number / 32;
  const unsigned row = number / kAlong % (32 / kAlong) + 32 / kAlong * (warp / (kPacks / kAlong));
  return {static_cast<int>(row), static_cast<int>(number % kAlong + kAlong * (warp % (kPacks / kAlong)))};
}

}  // namespace ws
