// Instructions that CUDA C++ has no name for, one function each (PTX ISA 8.x, sm_80 and later; clusters sm_90).
// The one idea: all assembly is here, so another machine runs the same kernels by another file of this name.
// Needs no header of the toolkit, so NVRTC compiles it without an include directory.
#pragma once

#define WS_INLINE __device__ __forceinline__

namespace ws::ptx {

// ---- numbers ------------------------------------------------------------------------------------------

WS_INLINE float float_of_half(unsigned short bits) {
  float wide;
  asm("cvt.f32.f16 %0, %1;" : "=f"(wide) : "h"(bits));
  return wide;
}
// Both round to nearest, ties to even.
WS_INLINE unsigned short half_of_float(float value) {
  unsigned short bits;
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(bits) : "f"(value));
  return bits;
}
WS_INLINE unsigned short bfloat16_of_float(float value) {
  unsigned short bits;
  asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(bits) : "f"(value));
  return bits;
}
// To eleven bits, the nearest; ties go away from zero.
WS_INLINE float rounded_to_tf32(float value) {
  unsigned bits;
  asm("cvt.rna.tf32.f32 %0, %1;" : "=r"(bits) : "f"(value));
  return __uint_as_float(bits);
}
WS_INLINE float approximate_exp2(float x) {
  float result;
  asm("ex2.approx.f32 %0, %1;" : "=f"(result) : "f"(x));
  return result;
}
WS_INLINE float approximate_reciprocal(float x) {
  float result;
  asm("rcp.approx.f32 %0, %1;" : "=f"(result) : "f"(x));
  return result;
}
// 2 to the power of x, results below the least normal number as zero.
WS_INLINE float flushed_exp2(float x) {
  float result;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(x));
  return result;
}
// Two floats rounded to nearest, ties to even; the first in the lower half.
WS_INLINE unsigned half_pair(float first, float second) {
  unsigned bits;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(bits) : "f"(second), "f"(first));
  return bits;
}
WS_INLINE unsigned bfloat16_pair(float first, float second) {
  unsigned bits;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(bits) : "f"(second), "f"(first));
  return bits;
}
// NaN where either is.
WS_INLINE float max_nan(float a, float b) {
  float result;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(result) : "f"(a), "f"(b));
  return result;
}
WS_INLINE float min_nan(float a, float b) {
  float result;
  asm("min.NaN.f32 %0, %1, %2;" : "=f"(result) : "f"(a), "f"(b));
  return result;
}

// ---- memory -------------------------------------------------------------------------------------------

// Of memory that is not written meanwhile. Volatile: a load that is written early, to overlap an exchange, stays there.
WS_INLINE uint4 load_constant(const uint4* from) {
  uint4 word;
  asm volatile("ld.global.nc.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(word.x), "=r"(word.y), "=r"(word.z), "=r"(word.w) : "l"(from));
  return word;
}
// The same, kept out of the first-level cache.
WS_INLINE uint4 load_constant_once(const uint4* from) {
  uint4 word;
  asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(word.x), "=r"(word.y), "=r"(word.z), "=r"(word.w) : "l"(from));
  return word;
}
// The second-level cache gives up first what was read by this policy: it is not read again.
WS_INLINE unsigned long long last_use() {
  unsigned long long policy;
  asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
  return policy;
}
// What was read by this one it keeps longest.
WS_INLINE unsigned long long used_again() {
  unsigned long long policy;
  asm("createpolicy.fractional.L2::evict_last.b64 %0, 1.0;" : "=l"(policy));
  return policy;
}
WS_INLINE uint4 load_constant_by(const uint4* from, unsigned long long policy) {
  uint4 word;
  asm volatile("ld.global.nc.L1::no_allocate.L2::cache_hint.v4.u32 {%0, %1, %2, %3}, [%4], %5;"
               : "=r"(word.x), "=r"(word.y), "=r"(word.z), "=r"(word.w) : "l"(from), "l"(policy));
  return word;
}
WS_INLINE uint4 load_constant_last(const uint4* from) { return load_constant_by(from, last_use()); }
// Brings bytes into the second-level cache; address and count are multiples of 16. Before sm_90 nothing does that at
// once: a hint that is not given.
WS_INLINE void prefetch([[maybe_unused]] const void* from, [[maybe_unused]] unsigned bytes) {
#if __CUDA_ARCH__ >= 900
  asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" :: "l"(from), "r"(bytes) : "memory");
#endif
}

// Two words at once, through which blocks talk; unordered with anything else.
WS_INLINE void store_relaxed(unsigned long long* to, unsigned long long first, unsigned long long second) {
  asm volatile("st.relaxed.gpu.global.v2.b64 [%0], {%1, %2};" :: "l"(to), "l"(first), "l"(second) : "memory");
}
WS_INLINE void load_relaxed(const unsigned long long* from, unsigned long long& first, unsigned long long& second) {
  asm volatile("ld.relaxed.gpu.global.v2.b64 {%0, %1}, [%2];" : "=l"(first), "=l"(second) : "l"(from) : "memory");
}
// One word.
WS_INLINE void store_relaxed(unsigned long long* to, unsigned long long word) {
  asm volatile("st.relaxed.gpu.global.b64 [%0], %1;" :: "l"(to), "l"(word) : "memory");
}
// Adds to four floats in the second-level cache, and does not wait for it; nobody else may touch them meanwhile. Before sm_90
// they come one by one.
WS_INLINE void add_floats(float4* to, float4 four) {
#if __CUDA_ARCH__ >= 900
  asm volatile("red.relaxed.gpu.global.add.v4.f32 [%0], {%1, %2, %3, %4};"
               :: "l"(to), "f"(four.x), "f"(four.y), "f"(four.z), "f"(four.w) : "memory");
#else
  float* each = reinterpret_cast<float*>(to);
  atomicAdd(each, four.x), atomicAdd(each + 1, four.y), atomicAdd(each + 2, four.z), atomicAdd(each + 3, four.w);
#endif
}
// What was written before a counter came so far is there for the caller afterwards.
WS_INLINE unsigned load_acquire(const unsigned* counter) {
  unsigned count;
  asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(count) : "l"(counter) : "memory");
  return count;
}
// Adds one, after all that the caller knows to be written.
WS_INLINE void count_release(unsigned* counter) {
  asm volatile("red.release.gpu.global.add.u32 [%0], 1;" :: "l"(counter) : "memory");
}
// The same, and what others knew before they added is there for the caller; what was there before.
WS_INLINE unsigned increment(unsigned* counter) {
  unsigned before;
  asm volatile("atom.add.acq_rel.gpu.global.u32 %0, [%1], 1;" : "=r"(before) : "l"(counter) : "memory");
  return before;
}

// ---- shared memory ------------------------------------------------------------------------------------

// A place in the block's shared memory, and one in that of any block of the cluster.
using SharedAddress = unsigned;
using ClusterAddress = unsigned;
WS_INLINE SharedAddress shared_address(const void* place) {
  return static_cast<unsigned>(__cvta_generic_to_shared(place));
}
WS_INLINE ClusterAddress in_block_of_cluster(SharedAddress place, int rank) {
  unsigned remote;
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(remote) : "r"(place), "r"(rank));
  return remote;
}
WS_INLINE void store_to_cluster(ClusterAddress place, unsigned word) {
  asm volatile("st.shared::cluster.u32 [%0], %1;" :: "r"(place), "r"(word) : "memory");
}
WS_INLINE void cluster_arrive() { asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory"); }
WS_INLINE void cluster_wait() { asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory"); }

// Asynchronous copies into shared memory: of 16 bytes, and of 4 or 8.
WS_INLINE void copy_async_16(SharedAddress to, const void* from) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" :: "r"(to), "l"(from) : "memory");
}
WS_INLINE void copy_async_16_last(SharedAddress to, const void* from) {
  asm volatile("cp.async.cg.shared.global.L2::cache_hint [%0], [%1], 16, %2;" :: "r"(to), "l"(from), "l"(last_use()) : "memory");
}
template <int kBytes> WS_INLINE void copy_async(SharedAddress to, const void* from) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], %2;" :: "r"(to), "l"(from), "n"(kBytes) : "memory");
}
WS_INLINE void commit_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int kPending> WS_INLINE void wait_copies() { asm volatile("cp.async.wait_group %0;" :: "n"(kPending) : "memory"); }

// ---- tensor cores, by a warp ----------------------------------------------------------------------------

// sums += left (16 x 16) times right (16 x 8), of bfloat16 or half. Of lane 4 g + q: left's rows g and g + 8 at columns 2 q and
// 2 q + 1, then both at the columns 8 further; right's column g at those rows; sums of rows g and g + 8 at columns 2 q and 2 q + 1.
WS_INLINE void multiply_bfloat16(float (&sums)[4], const unsigned (&left)[4], const unsigned (&right)[2]) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3])
      : "r"(left[0]), "r"(left[1]), "r"(left[2]), "r"(left[3]), "r"(right[0]), "r"(right[1]));
}
WS_INLINE void multiply_half(float (&sums)[4], const unsigned (&left)[4], const unsigned (&right)[2]) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3])
      : "r"(left[0]), "r"(left[1]), "r"(left[2]), "r"(left[3]), "r"(right[0]), "r"(right[1]));
}

// ---- programmatic dependent launch ----------------------------------------------------------------------

// Nothing before sm_90, where a kernel begins when the previous one has ended.
#if __CUDA_ARCH__ >= 900
WS_INLINE void launch_dependents() { asm volatile("griddepcontrol.launch_dependents;"); }
WS_INLINE void wait_for_previous() { asm volatile("griddepcontrol.wait;" ::: "memory"); }
#else
WS_INLINE void launch_dependents() {}
WS_INLINE void wait_for_previous() {}
#endif

}  // namespace ws::ptx
