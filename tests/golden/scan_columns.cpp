// column_scan: one fused group
// for all b:16, m:1024; over k:1024
//   running = cumsum(x[1048576 b + 1024 k + m])
//   y[1048576 b + 1024 k + m] = running * 2
// cpu_scan: scan = columns, stores = plain, block = 1024, tile = 1024, threads = 0
extern "C" void column_scan(void* const* arguments) {
  const float* __restrict x = static_cast<const float*>(arguments[0]);
  float* __restrict y = static_cast<float*>(arguments[1]);
  constexpr long kExtent = 1024, kTile = 1024;
  #pragma omp parallel for schedule(static) collapse(2)
  for (long b = 0; b < 16; ++b) {
    for (long m_begin = 0; m_begin < kExtent; m_begin += kTile) {
      const long m_end = m_begin + kTile < kExtent ? m_begin + kTile : kExtent;
      alignas(64) double running_tile[kTile];
      ws::fill(running_tile, double(0.0));
      for (long k = 0; k < 1024; ++k) {
        #pragma omp simd
        for (long m = m_begin; m < m_end; ++m) {
          const double running_here = ws::Sum::of<double>(running_tile[m - m_begin], x[1048576 * b + 1024 * k + m]);
          running_tile[m - m_begin] = running_here;
          y[1048576 * b + 1024 * k + m] = static_cast<float>(running_here) * 2.0f;
        }
      }
    }
  }
}
