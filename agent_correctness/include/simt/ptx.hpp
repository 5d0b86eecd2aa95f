// What the instructions of the kernels' `ws_ptx.cuh` do, on a CPU: a file of that name with this text takes its place.
//
// The one idea: an instruction does here the least that PTX promises. A copy that was not waited for has not happened
// yet, a load that blocks talk through orders nothing else, and a launch that does not wait for its predecessor races.
#pragma once
#include "simt/device.hpp"

#define WS_INLINE __device__ __forceinline__

namespace ws::ptx {

// ---- numbers ------------------------------------------------------------------------------------------

WS_INLINE float float_of_half(unsigned short bits) { return static_cast<float>(simt::bits_as<_Float16>(bits)); }
WS_INLINE unsigned short half_of_float(float value) {
  return simt::bits_as<unsigned short>(static_cast<_Float16>(value));
}
WS_INLINE unsigned short bfloat16_of_float(float value) {
  const unsigned bits = simt::bits_as<unsigned>(value);
  if (value != value) return 0x7fff;
  return static_cast<unsigned short>((bits + 0x7fffu + (bits >> 16 & 1u)) >> 16);
}
WS_INLINE float rounded_to_tf32(float value) {
  const unsigned bits = simt::bits_as<unsigned>(value);
  return (bits & 0x7f800000u) == 0x7f800000u ? value : simt::bits_as<float>((bits + 0x1000u) & 0xffffe000u);
}
WS_INLINE float approximate_exp2(float x) { return exp2f(x); }
WS_INLINE float approximate_reciprocal(float x) { return 1.0f / x; }
WS_INLINE float flushed_exp2(float x) {
  const float result = exp2f(x);
  return result < 0x1p-126f ? 0.0f : result;
}
WS_INLINE unsigned half_pair(float first, float second) { return half_of_float(first) | half_of_float(second) << 16; }
WS_INLINE unsigned bfloat16_pair(float first, float second) {
  return bfloat16_of_float(first) | bfloat16_of_float(second) << 16;
}
WS_INLINE float max_nan(float a, float b) { return a > b || a != a ? a : b; }
WS_INLINE float min_nan(float a, float b) { return a < b || a != a ? a : b; }

// ---- memory -------------------------------------------------------------------------------------------

WS_INLINE uint4 load_constant(const uint4* from) { return *from; }
WS_INLINE uint4 load_constant_once(const uint4* from) { return *from; }
WS_INLINE unsigned long long last_use() { return 0; }
WS_INLINE unsigned long long used_again() { return 1; }
WS_INLINE uint4 load_constant_by(const uint4* from, unsigned long long) { return *from; }
WS_INLINE uint4 load_constant_last(const uint4* from) { return *from; }
WS_INLINE void prefetch(const void* from, unsigned bytes) {
  if (reinterpret_cast<uintptr_t>(from) % 16 != 0 || bytes % 16 != 0)
    simt::fail("misaligned", "a prefetch of what is no multiple of 16 bytes");
}

WS_INLINE void store_relaxed(unsigned long long* to, unsigned long long first, unsigned long long second) {
  if (reinterpret_cast<uintptr_t>(to) % 16 != 0) simt::fail("misaligned", "words that are not aligned to 16 bytes");
  __atomic_store_n(to, first, __ATOMIC_RELAXED);
  simt::pause(true);  // the two words are two accesses: a reader may see one of them
  __atomic_store_n(to + 1, second, __ATOMIC_RELAXED);
  simt::pause(true);
}
WS_INLINE void load_relaxed(const unsigned long long* from, unsigned long long& first, unsigned long long& second) {
  if (reinterpret_cast<uintptr_t>(from) % 16 != 0) simt::fail("misaligned", "words that are not aligned to 16 bytes");
  first = __atomic_load_n(from, __ATOMIC_RELAXED);
  simt::pause(false);
  second = __atomic_load_n(from + 1, __ATOMIC_RELAXED);
}
WS_INLINE void store_relaxed(unsigned long long* to, unsigned long long word) {
  if (reinterpret_cast<uintptr_t>(to) % 8 != 0) simt::fail("misaligned", "a word that is not aligned to 8 bytes");
  __atomic_store_n(to, word, __ATOMIC_RELAXED);
  simt::pause(true);
}
// Plain additions: who touches them meanwhile is found as a race.
WS_INLINE void add_floats(float4* to, float4 four) {
  if (reinterpret_cast<uintptr_t>(to) % 16 != 0) simt::fail("misaligned", "floats that are not aligned to 16 bytes");
  *to = float4{to->x + four.x, to->y + four.y, to->z + four.z, to->w + four.w};
}
WS_INLINE unsigned load_acquire(const unsigned* counter) {
  const unsigned count = __atomic_load_n(counter, __ATOMIC_ACQUIRE);
  simt::pause(false);
  return count;
}
WS_INLINE void count_release(unsigned* counter) {
  __atomic_fetch_add(counter, 1u, __ATOMIC_RELEASE);
  simt::pause(true);
}
WS_INLINE unsigned increment(unsigned* counter) {
  const unsigned before = __atomic_fetch_add(counter, 1u, __ATOMIC_ACQ_REL);
  simt::pause(true);
  return before;
}

// ---- shared memory ------------------------------------------------------------------------------------

using SharedAddress = char*;
using ClusterAddress = char*;
WS_INLINE SharedAddress shared_address(const void* place) { return static_cast<char*>(const_cast<void*>(place)); }
WS_INLINE ClusterAddress in_block_of_cluster(SharedAddress place, int rank) {
  return static_cast<char*>(simt::in_block_of_cluster(place, static_cast<unsigned>(rank)));
}
WS_INLINE void store_to_cluster(ClusterAddress place, unsigned word) { *reinterpret_cast<unsigned*>(place) = word; }
WS_INLINE void cluster_arrive() { simt::cluster_arrive(); }
WS_INLINE void cluster_wait() { simt::cluster_wait(); }

// A copy happens when it is waited for, no sooner.
WS_INLINE void copy_later(SharedAddress to, const void* from, int bytes) {
  simt::Here& me = *simt::here;
  if (me.copies == nullptr) me.copies = simt::room_for_copies();
  if (me.copy_count == simt::kMostCopies) simt::fail("unsupported", "more copies of one thread under way than fit");
  if (reinterpret_cast<uintptr_t>(to) % bytes != 0 || reinterpret_cast<uintptr_t>(from) % bytes != 0)
    simt::fail("misaligned", "an asynchronous copy between addresses that are no multiples of its size");
  me.copies[me.copy_count++] = {to, from, bytes, me.copy_group};
}
WS_INLINE void copy_async_16(SharedAddress to, const void* from) { copy_later(to, from, 16); }
WS_INLINE void copy_async_16_last(SharedAddress to, const void* from) { copy_later(to, from, 16); }
template <int kBytes> WS_INLINE void copy_async(SharedAddress to, const void* from) { copy_later(to, from, kBytes); }
WS_INLINE void commit_copies() { ++simt::here->copy_group; }
template <int kPending> WS_INLINE void wait_copies() {
  simt::Here& me = *simt::here;
  int kept = 0;
  for (int i = 0; i < me.copy_count; ++i) {
    const simt::Copy copy = me.copies[i];
    if (copy.group >= me.copy_group - kPending) {
      me.copies[kept++] = copy;
    } else if (copy.bytes == 16) {
      *static_cast<uint4*>(copy.to) = *static_cast<const uint4*>(copy.from);
    } else if (copy.bytes == 8) {
      *static_cast<unsigned long long*>(copy.to) = *static_cast<const unsigned long long*>(copy.from);
    } else {
      *static_cast<unsigned*>(copy.to) = *static_cast<const unsigned*>(copy.from);
    }
  }
  me.copy_count = kept;
}

// ---- tensor cores, by a warp ----------------------------------------------------------------------------

// Each lane fetches from the others what its four sums are made of.
template <class Widen>
WS_INLINE void multiply_pairs(float (&sums)[4], const unsigned (&left)[4], const unsigned (&right)[2], const Widen& widen) {
  const int lane = simt::lane_number(), group = lane / 4, quarter = lane % 4;
  for (int other = 0; other < 4; ++other) {
    for (int half = 0; half < 2; ++half) {
      unsigned rows[2], columns[2];
      for (int i = 0; i < 2; ++i) {
        rows[i] = __shfl_sync(0xffffffffu, left[2 * half + i], 4 * group + other);
        columns[i] = __shfl_sync(0xffffffffu, right[half], 4 * (2 * quarter + i) + other);
      }
      for (int i = 0; i < 4; ++i)
        for (int shift = 0; shift < 32; shift += 16)
          sums[i] += widen(rows[i / 2] >> shift) * widen(columns[i % 2] >> shift);
    }
  }
}
WS_INLINE void multiply_bfloat16(float (&sums)[4], const unsigned (&left)[4], const unsigned (&right)[2]) {
  multiply_pairs(sums, left, right, [](unsigned bits) { return simt::bits_as<float>(bits << 16); });
}
WS_INLINE void multiply_half(float (&sums)[4], const unsigned (&left)[4], const unsigned (&right)[2]) {
  multiply_pairs(sums, left, right, [](unsigned bits) { return float_of_half(static_cast<unsigned short>(bits)); });
}

// ---- programmatic dependent launch ----------------------------------------------------------------------

WS_INLINE void launch_dependents() {}
WS_INLINE void wait_for_previous() { simt::wait_for_previous(); }

}  // namespace ws::ptx
