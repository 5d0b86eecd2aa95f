// What `ws_tensor_copy.cuh` does, on a CPU: a copy is made at once, by the thread that asks for it, with the map's swizzle.
#pragma once
#include "ws_barrier.cuh"

namespace ws {

struct TensorMap {
  const char* base;
  int dimensions;
  int64 extents[5], strides[5];  // in elements, in bytes
  int box[5], element_bytes, swizzle_bytes;
  bool rounds_to_tf32;
};

WS_INLINE void prefetch_map(const TensorMap&) {}

// Where in a block that begins at a multiple of one kilobyte the copy engine puts a byte, and the tensor cores look for it:
// sixteen bytes in the rows of eight lines of 128 bytes are exchanged, within the width of the swizzle.
WS_INLINE char* swizzled(uint64 address, int width = 128) {
  return reinterpret_cast<char*>(address ^ (address >> 7 & (width / 16 - 1)) << 4);
}

template <class... Coordinates>
WS_INLINE void copy_box(const TensorMap& map, Barrier& barrier, void* to, Coordinates... coordinates) {
  const int64 first[] = {coordinates...};
  constexpr int kCount = sizeof...(coordinates);
  const uint64 begin = reinterpret_cast<uint64>(to);
  if (begin % 1024 != 0) simt::fail("misaligned", "a box that begins at no multiple of one kilobyte");
  if (map.box[0] * map.element_bytes != map.swizzle_bytes)
    simt::fail("unsupported", "a box whose rows are not as wide as its swizzle");
  if (kCount != map.dimensions) simt::fail("unsupported", "coordinates of other dimensions than the map has");
  int count = 1;
  for (int i = 0; i < kCount; ++i) count *= map.box[i];
  for (int number = 0; number < count; ++number) {
    bool inside = true;
    const char* from = map.base;
    for (int i = 0, rest = number; i < kCount; rest /= map.box[i++]) {
      const int64 at = first[i] + rest % map.box[i];
      inside &= at >= 0 && at < map.extents[i];
      from += at * map.strides[i];
    }
    char* place = swizzled(begin + number * map.element_bytes, map.swizzle_bytes);
    if (map.rounds_to_tf32) {
      *reinterpret_cast<float*>(place) = inside ? ptx::rounded_to_tf32(*reinterpret_cast<const float*>(from)) : 0.0f;
    } else {
      for (int byte = 0; byte < map.element_bytes; ++byte) place[byte] = inside ? from[byte] : 0;
    }
  }
  barrier.complete(count * map.element_bytes);
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

}  // namespace ws
