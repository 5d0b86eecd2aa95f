// running_cumsum: running sum
// for all i:32768; over j:32768
//   running = cumsum(x[32768 i + j])
//   y[32768 i + j] = running
// cuda_scan: scan = rows, loads = cached, stores = plain, exp = accurate, dependent_launch = yes, prefetch = no, threads = 512, lanes = 512, vector_width = 4, vectors = 16, ctas = 1, min_blocks = 1
struct running_cumsum_scan {
  const float* __restrict__ x;
  float* __restrict__ y;
  int i;
  using Offset = int;
  static constexpr ws::RowScanTiling kTiling{.rows = 32768, .columns = 32768, .vector_width = 4, .vectors = 16,
      .threads = 512, .lanes = 512, .reverse = true, .prefetch = false, .overlap = true};
  using Scan0 = ws::Scan<0, ws::Sum, float, double, false>;
  using Scans = ws::ScanList<Scan0>;
  struct Values {
    ws::Lanes<ws::Sum, float, 4> running[16];
    WS_INLINE auto& of(Scan0) { return running; }
  };
  WS_INLINE void begin(int row) { i = row; }
  struct Vector { ws::Pack<float, 4> x; };
  WS_INLINE Vector load(int j_begin) const { return {ws::load<4, ws::kShared>(x + (32768 * i + j_begin))}; }
  WS_INLINE void value(Scan0, Values& values, int v, const Vector& vector, int j_begin) const {
    #pragma unroll
    for (int e = 0; e < 4; ++e) {
      values.running[v].lane[e] = vector.x[e];
    }
  }
  WS_INLINE void store(const Values& values, int v, const Vector& vector, int j_begin) const {
    ws::Pack<float, 4> y_pack;
    #pragma unroll
    for (int e = 0; e < 4; ++e) {
      y_pack[e] = values.running[v].lane[e];
    }
    ws::store(y + (32768 * i + j_begin), y_pack);
  }
};

extern "C" __global__ void __launch_bounds__(512, 1) running_cumsum(
    const float* __restrict__ x, float* __restrict__ y) {
  ws::scan_rows(running_cumsum_scan{x, y});
}
