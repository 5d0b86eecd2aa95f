// column_scan: one fused group
// for all b:16, m:1024; over k:1024
//   running = cumsum(x[1048576 b + 1024 k + m])
//   y[1048576 b + 1024 k + m] = running * 2
// cpu_scan: scan = columns, stores = plain, block = 1024, tile = 1024, threads = 0
struct column_scan_scan {
  using Outer = ws::Space<16>;
  using Scans = ws::ScanList<ws::Scan<ws::Sum, double, false, false>>;
  static constexpr ws::ScanColumnTiling kTiling{.rows = 1024, .columns = 1024, .tile = 1024, .threads = 0};
  const float* __restrict x;
  float* __restrict y;
  long b;
  long k;
  WS_INLINE void locate(const long* at) { b = at[0]; }
  WS_INLINE void row(const long* at) { k = at[0]; }
  WS_INLINE void step(Scans::Running<1024>& running, long m, long e) const {
    const double running2_here = running.take<0>(e, x[1048576 * b + 1024 * k + m]);
    y[1048576 * b + 1024 * k + m] = static_cast<float>(running2_here) * 2.0f;
  }
};

extern "C" void column_scan(void* const* arguments) {
  ws::scan_columns(ws::bind<column_scan_scan, 2>(arguments));
}
