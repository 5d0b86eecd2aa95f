// running_cumsum: running sum
// for all i:4096; over j:4096
//   running = cumsum(x[4096 i + j])
//   y[4096 i + j] = running
// cpu_scan: scan = rows, stores = plain, block = 1024, tile = 1024, threads = 0
extern "C" void running_cumsum(void* const* arguments) {
  const float* __restrict x = static_cast<const float*>(arguments[0]);
  float* __restrict y = static_cast<float*>(arguments[1]);
  constexpr long kExtent = 4096, kBlock = 1024;
  constexpr long kBlocks = (kExtent + kBlock - 1) / kBlock;
  #pragma omp parallel for schedule(static)
  for (long i = 0; i < 4096; ++i) {
    alignas(64) double running_block[kBlock];
    double running_before = 0.0;
    for (long block = 0; block < kBlocks; ++block) {
      const long j_begin = block * kBlock;
      const long j_end = j_begin + kBlock < kExtent ? j_begin + kBlock : kExtent;
      #pragma omp simd
      for (long j = j_begin; j < j_end; ++j) {
        running_block[j - j_begin] = x[4096 * i + j];
      }
      ws::scan<ws::Sum, false, false>(running_block, j_end - j_begin, double(0.0), running_before);
      #pragma omp simd
      for (long j = j_begin; j < j_end; ++j) {
        y[4096 * i + j] = static_cast<float>(running_block[j - j_begin]);
      }
    }
  }
}
