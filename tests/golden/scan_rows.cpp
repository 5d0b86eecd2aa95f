// running_cumsum: running sum
// for all i:4096; over j:4096
//   running = cumsum(x[4096 i + j])
//   y[4096 i + j] = running
// cpu_scan: scan = rows, stores = plain, block = 1024, tile = 1024, threads = 0
struct running_cumsum_scan {
  using Outer = ws::Space<4096>;
  using Scans = ws::ScanList<ws::Scan<ws::Sum, double, false, false>>;
  static constexpr ws::ScanTiling kTiling{.extent = 4096, .block = 1024, .parts = 1, .threads = 0};
  const float* __restrict x;
  float* __restrict y;
  long i;
  struct Held { Scans::Running<1024> scanned; };
  Held* held;
  WS_INLINE void locate(const long* at) { i = at[0]; }
  WS_INLINE void make(ws::Number<0>, long j, long e) const { held->scanned.set<0>(e, x[4096 * i + j]); }
  WS_INLINE void store(long j, long e) const { y[4096 * i + j] = static_cast<float>(held->scanned.get<0>(e)); }
};

extern "C" void running_cumsum(void* const* arguments) {
  ws::scan_rows(ws::bind<running_cumsum_scan, 2>(arguments));
}
