// What `ws_tensor_copy.cuh` does, on a CPU: a copy is made at once, by the thread that asks for it, with the swizzle of 128 bytes.
#pragma once
#include "ws_barrier.cuh"

namespace ws {

struct TensorMap {
  const char* base;
  int64 extents[4], strides[4];  // in elements, in bytes
  int box[2], element_bytes;
};

WS_INLINE void prefetch_map(const TensorMap&) {}

// Where in a block that begins at a multiple of one kilobyte the copy engine puts a byte, and the tensor cores look for it.
WS_INLINE char* swizzled(uint64 address) { return reinterpret_cast<char*>(address ^ (address >> 7 & 7) << 4); }

WS_INLINE void copy_box(const TensorMap& map, Barrier& barrier, void* to, int x, int y, int z, int w) {
  const uint64 begin = reinterpret_cast<uint64>(to);
  if (begin % 1024 != 0) simt::fail("misaligned", "a box that begins at no multiple of one kilobyte");
  if (map.box[0] * map.element_bytes != 128) simt::fail("unsupported", "a box whose rows have not 128 bytes");
  for (int row = 0; row < map.box[1]; ++row) {
    for (int column = 0; column < map.box[0]; ++column) {
      char* place = swizzled(begin + row * 128 + column * map.element_bytes);
      const int64 at[4] = {x + column, y + row, z, w};
      bool inside = true;
      const char* from = map.base;
      for (int i = 0; i < 4; ++i) {
        inside &= at[i] >= 0 && at[i] < map.extents[i];
        from += at[i] * map.strides[i];
      }
      for (int byte = 0; byte < map.element_bytes; ++byte) place[byte] = inside ? from[byte] : 0;
    }
  }
  barrier.complete(map.box[0] * map.box[1] * map.element_bytes);
}
WS_INLINE void copy_bytes(Barrier& barrier, void* to, const void* from, int bytes) {
  if (reinterpret_cast<uint64>(to) % 16 || reinterpret_cast<uint64>(from) % 16 || bytes % 16)
    simt::fail("misaligned", "a copy of what is no multiple of 16 bytes");
  for (int byte = 0; byte < bytes; ++byte) static_cast<char*>(to)[byte] = static_cast<const char*>(from)[byte];
  barrier.complete(bytes);
}
template <class... Coordinates> WS_INLINE void copy_box_to(unsigned short, const TensorMap&, Barrier&, void*, Coordinates...) {
  simt::fail("unsupported", "a copy to several blocks");
}
WS_INLINE void copy_box(const TensorMap&, Barrier&, void*, int, int, int, int, int) {
  simt::fail("unsupported", "a map of five dimensions");
}

}  // namespace ws
