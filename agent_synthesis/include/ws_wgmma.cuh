// Warpgroup matrix products (wgmma) of 16-bit, of TF32 and of 8-bit float operands in shared memory, for sm_90a.
//
// 64 rows of A times N rows of B, 16 deep (TF32: 8; 8 bits: 32), added to float accumulators in registers. Operands lie in shared memory with the
// 128-byte swizzle of the copy engine, in blocks of 64 rows by 64 elements of depth (8 kilobytes; TF32: by 32): along the
// depth, a row of the block is 128 bytes; across, as 16-bit elements may lie, 64 rows' elements of one depth are. Thread t of the warpgroup holds, of result row
// 16 * (t / 32) + t % 32 / 4 (+ 8), columns 8 * i + 2 * (t % 4) (+ 1): accumulators 4 * i + {0, 1} are the upper row's,
// 4 * i + {2, 3} the lower row's.
#pragma once
#include "ws_barrier.cuh"
#include "ws_product_shape.cuh"

namespace ws {

// Describes an operand whose first row begins at a multiple of one kilobyte (PTX ISA, matrix descriptor): bytes over 16
// between eight rows, or between eight elements of depth, and across also between blocks of 64 rows, `kBlockDepth` deep.
template <Direction kDirection, int kBlockDepth = 64> WS_INLINE uint64 operand_at(const void* rows) {
  constexpr uint64 kSwizzle128 = 1ULL << 62;
  constexpr uint64 kEight = 1024 / 16;
  constexpr uint64 kNextBlock = kDirection == kAcross ? kBlockDepth * 128 / 16 : 1;
  return kSwizzle128 | (kEight << 32) | (kNextBlock << 16) | ((shared_address(rows) & 0x3ffff) >> 4);
}

// An operand of rows of `kBytes` each, swizzled as wide, in eights that are `kPitch` rows apart; the first may begin at any row.
template <int kBytes, int kPitch> WS_INLINE uint64 rows_at(const void* rows) {
  constexpr uint64 kSwizzle = kBytes == 128 ? 1 : kBytes == 64 ? 2 : 3, kEight = kPitch * kBytes / 16;
  return (kSwizzle << 62) | (kEight << 32) | (1ULL << 16) | ((shared_address(rows) & 0x3ffff) >> 4);
}

// The same rows, `depth` elements further along.
template <Direction kDirection, class T = half> WS_INLINE uint64 further(uint64 operand, int depth) {
  return operand + depth * (kDirection == kAcross ? 128 : static_cast<int>(sizeof(T))) / 16;
}

// Before products that follow other uses of their accumulators.
WS_INLINE void products_begin() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
// Products since the last call become one batch.
WS_INLINE void products_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
// Until at most that many batches are unfinished.
template <int kPending> WS_INLINE void products_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
}
// Keeps the compiler from moving uses of accumulators across this point.
template <int kCount> WS_INLINE void settle(float (&accumulators)[kCount]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) asm volatile("" : "+f"(accumulators[i])::"memory");
}
// The same of an operand in registers.
template <int kCount> WS_INLINE void settle(unsigned (&operand)[kCount]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) asm volatile("" : "+r"(operand[i])::"memory");
}

#define WS_SUMS_8(d, i) \
  "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3]), "+f"(d[i + 4]), "+f"(d[i + 5]), "+f"(d[i + 6]), "+f"(d[i + 7])
#define WS_SUMS_FROM(d, i) WS_SUMS_8(d, i), WS_SUMS_8(d, i + 8), WS_SUMS_8(d, i + 16), WS_SUMS_8(d, i + 24)
#define WS_SUMS_16(d) WS_SUMS_8(d, 0), WS_SUMS_8(d, 8)
#define WS_SUMS_32(d) WS_SUMS_FROM(d, 0)
#define WS_SUMS_64(d) WS_SUMS_32(d), WS_SUMS_FROM(d, 32)
#define WS_SUMS_96(d) WS_SUMS_64(d), WS_SUMS_FROM(d, 64)
#define WS_SUMS_128(d) WS_SUMS_96(d), WS_SUMS_FROM(d, 96)

#define WS_NAMES_16 "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15"
#define WS_NAMES_32 \
  "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, " \
  "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
#define WS_NAMES_64 WS_NAMES_32 \
  ", "\
  "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, " \
  "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
#define WS_NAMES_96 WS_NAMES_64 \
  ", "\
  "%64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, " \
  "%80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95"
#define WS_NAMES_128 WS_NAMES_96 \
  ", "\
  "%96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111, " \
  "%112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, %125, %126, %127"

template <class T> constexpr bool kIsHalf = false;
template <> constexpr bool kIsHalf<half> = true;
template <class T> constexpr bool kIsTf32 = false;
template <> constexpr bool kIsTf32<tf32> = true;
template <class T> constexpr bool kIsE4m3 = false;
template <bool kSaturates> constexpr bool kIsE4m3<float8_e4m3<kSaturates>> = true;
template <class T> constexpr bool kIsE5m2 = false;
template <> constexpr bool kIsE5m2<float8_e5m2> = true;
template <class T> constexpr bool kLiesAlong = kIsTf32<T> || kIsE4m3<T> || kIsE5m2<T>;

// `sums` (+)= A * B^T for N = 2 * count of accumulators; `keep` 0 forgets what the sums held.
#define WS_ASSEMBLY(COUNT, COLUMNS, DEPTH, TYPE, A, B, KEEP, DIRECTIONS)                                             \
  asm volatile(                                                                                                      \
      "{\n"                                                                                                          \
      ".reg .pred keep;\n"                                                                                           \
      "setp.ne.b32 keep, " KEEP ", 0;\n"                                                                             \
      "wgmma.mma_async.sync.aligned.m64n" COLUMNS "k" DEPTH ".f32." TYPE "." TYPE " {" WS_NAMES_##COUNT "}, " A ", " \
      B ", keep, 1, 1" DIRECTIONS ";\n"                                                                              \
      "}"                                                                                                            \
      : WS_SUMS_##COUNT(sums)                                                                                        \
      : "l"(a), "l"(b), "r"(keep), "n"(static_cast<int>(kLeft)), "n"(static_cast<int>(kRight)))
#define WS_PRODUCT(COUNT, COLUMNS, A, B, KEEP, LEFT, RIGHT)                                                          \
  template <class T, Direction kLeft, Direction kRight>                                                              \
  WS_INLINE void multiply_add(float (&sums)[COUNT], uint64 a, uint64 b, int keep) {                                  \
    static_assert(!kLiesAlong<T> || (kLeft == kAlong && kRight == kAlong), "only 16 bits may lie across the depth"); \
    if constexpr (kIsTf32<T>) WS_ASSEMBLY(COUNT, COLUMNS, "8", "tf32", A, B, KEEP, "");                              \
    else if constexpr (kIsE4m3<T>) WS_ASSEMBLY(COUNT, COLUMNS, "32", "e4m3", A, B, KEEP, "");                        \
    else if constexpr (kIsE5m2<T>) WS_ASSEMBLY(COUNT, COLUMNS, "32", "e5m2", A, B, KEEP, "");                        \
    else if constexpr (kIsHalf<T>) WS_ASSEMBLY(COUNT, COLUMNS, "16", "f16", A, B, KEEP, ", " LEFT ", " RIGHT);       \
    else WS_ASSEMBLY(COUNT, COLUMNS, "16", "bf16", A, B, KEEP, ", " LEFT ", " RIGHT);                                \
  }
WS_PRODUCT(32, "64", "%32", "%33", "%34", "%35", "%36")
WS_PRODUCT(64, "128", "%64", "%65", "%66", "%67", "%68")
WS_PRODUCT(96, "192", "%96", "%97", "%98", "%99", "%100")
WS_PRODUCT(128, "256", "%128", "%129", "%130", "%131", "%132")

// The same with A in registers: of row t / 4 (+ 8) of a warp's sixteen, elements 2 * (t % 4) (+ 1) of depth, upper row first,
// then those 8 deeper: as accumulators 0 to 7 of sixteen columns are, when each two neighbours share a register.
#define WS_ASSEMBLY_HELD(COUNT, COLUMNS, TYPE, A0, A1, A2, A3, B, KEEP, RIGHT)                                       \
  asm volatile(                                                                                                      \
      "{\n"                                                                                                          \
      ".reg .pred keep;\n"                                                                                           \
      "setp.ne.b32 keep, " KEEP ", 0;\n"                                                                             \
      "wgmma.mma_async.sync.aligned.m64n" COLUMNS "k16.f32." TYPE "." TYPE " {" WS_NAMES_##COUNT "}, {" A0 ", " A1   \
      ", " A2 ", " A3 "}, " B ", keep, 1, 1, " RIGHT ";\n"                                                           \
      "}"                                                                                                            \
      : WS_SUMS_##COUNT(sums)                                                                                        \
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(keep), "n"(static_cast<int>(kRight)))
#define WS_PRODUCT_HELD(COUNT, COLUMNS, A0, A1, A2, A3, B, KEEP, RIGHT)                                              \
  template <class T, Direction kRight>                                                                               \
  WS_INLINE void multiply_add_held(float (&sums)[COUNT], const unsigned* a, uint64 b, int keep) {                    \
    if constexpr (kIsHalf<T>) WS_ASSEMBLY_HELD(COUNT, COLUMNS, "f16", A0, A1, A2, A3, B, KEEP, RIGHT);               \
    else WS_ASSEMBLY_HELD(COUNT, COLUMNS, "bf16", A0, A1, A2, A3, B, KEEP, RIGHT);                                   \
  }
WS_PRODUCT_HELD(16, "32", "%16", "%17", "%18", "%19", "%20", "%21", "%22")
WS_PRODUCT_HELD(32, "64", "%32", "%33", "%34", "%35", "%36", "%37", "%38")
WS_PRODUCT_HELD(64, "128", "%64", "%65", "%66", "%67", "%68", "%69", "%70")
WS_PRODUCT_HELD(96, "192", "%96", "%97", "%98", "%99", "%100", "%101", "%102")
WS_PRODUCT_HELD(128, "256", "%128", "%129", "%130", "%131", "%132", "%133", "%134")

#undef WS_ASSEMBLY_HELD
#undef WS_PRODUCT_HELD
#undef WS_ASSEMBLY
#undef WS_PRODUCT
#undef WS_SUMS_8
#undef WS_SUMS_FROM
#undef WS_SUMS_16
#undef WS_SUMS_32
#undef WS_SUMS_64
#undef WS_SUMS_96
#undef WS_SUMS_128
#undef WS_NAMES_16
#undef WS_NAMES_32
#undef WS_NAMES_64
#undef WS_NAMES_96
#undef WS_NAMES_128

}  // namespace ws
