// Boxes of tensors copied to shared memory by the copy engine (TMA), for sm_90.
#pragma once
#include "ws_barrier.cuh"

namespace ws {

// What the driver encodes: a kernel takes it as `const __grid_constant__ TensorMap`.
struct alignas(64) TensorMap { uint64 words[16]; };

WS_INLINE void prefetch_map(const TensorMap& map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(&map) : "memory");
}

// Copies the map's box at (x, y, z, w), the fastest coordinate first; its bytes count towards the barrier. What lies
// outside of the tensor comes as zeros.
WS_INLINE void copy_box(const TensorMap& map, Barrier& barrier, void* to, int x, int y, int z, int w) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, %5, %6}], [%2];"
      ::"r"(shared_address(to)), "l"(&map), "r"(shared_address(&barrier)), "r"(x), "r"(y), "r"(z), "r"(w)
      : "memory");
}

// Copies bytes as they lie; addresses and their number are multiples of 16.
WS_INLINE void copy_bytes(Barrier& barrier, void* to, const void* from, int bytes) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];"
               ::"r"(shared_address(to)), "l"(from), "r"(bytes), "r"(shared_address(&barrier))
               : "memory");
}

// A box to every block of the cluster whose bit is set, at the same place and barrier of each.
WS_INLINE void copy_box_to(unsigned short blocks, const TensorMap& map, Barrier& barrier, void* to, int x, int y, int z,
                           int w) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster"
      " [%0], [%1, {%3, %4, %5, %6}], [%2], %7;"
      ::"r"(shared_address(to)), "l"(&map), "r"(shared_address(&barrier)), "r"(x), "r"(y), "r"(z), "r"(w), "h"(blocks)
      : "memory");
}

// The same of maps of five dimensions.
WS_INLINE void copy_box(const TensorMap& map, Barrier& barrier, void* to, int x, int y, int z, int w, int v) {
  asm volatile(
      "cp.async.bulk.tensor.5d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, %5, %6, %7}], [%2];"
      ::"r"(shared_address(to)), "l"(&map), "r"(shared_address(&barrier)), "r"(x), "r"(y), "r"(z), "r"(w), "r"(v)
      : "memory");
}

WS_INLINE void copy_box_to(unsigned short blocks, const TensorMap& map, Barrier& barrier, void* to, int x, int y, int z,
                           int w, int v) {
  asm volatile(
      "cp.async.bulk.tensor.5d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster"
      " [%0], [%1, {%3, %4, %5, %6, %7}], [%2], %8;"
      ::"r"(shared_address(to)), "l"(&map), "r"(shared_address(&barrier)), "r"(x), "r"(y), "r"(z), "r"(w), "r"(v), "h"(blocks)
      : "memory");
}

}  // namespace ws
