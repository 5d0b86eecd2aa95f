// column_scan: one fused group
// for all b:16, m:4096; over k:4096
//   running = cumsum(x[16777216 b + 4096 k + m])
//   y[16777216 b + 4096 k + m] = running * 2
// cuda_scan: scan = columns, loads = cached, stores = plain, exp = accurate, dependent_launch = yes, prefetch = no, threads = 512, lanes = 32, vector_width = 4, vectors = 8, ctas = 1, min_blocks = 1
struct column_scan_scan {
  const float* __restrict__ x;
  float* __restrict__ y;
  int b;
  using Offset = int;
  static constexpr ws::ColumnScanTiling kTiling{.rows = 4096, .columns = 4096, .others = 16, .vector_width = 4,
      .rows_in_flight = 8, .threads = 512, .lanes = 32, .ctas_per_column = 1, .reverse = false, .overlap = true};
  using Scan0 = ws::Scan<0, ws::Sum, float, double, false>;
  using Scans = ws::ScanList<Scan0>;
  struct Values {
    ws::Lanes<ws::Sum, float, 4> running[8];
    WS_INLINE auto& of(Scan0) { return running; }
  };
  WS_INLINE void begin(unsigned outer) { b = outer; }
  struct Vector { ws::Pack<float, 4> x; };
  WS_INLINE Vector load(int k, int m_begin) const {
    return {ws::load<4, ws::kShared>(x + (16777216 * b + 4096 * k + m_begin))};
  }
  WS_INLINE void value(Scan0, Values& values, int v, const Vector& vector, int k, int m_begin) const {
    #pragma unroll
    for (int e = 0; e < 4; ++e) {
      values.running[v].lane[e] = vector.x[e];
    }
  }
  WS_INLINE void store(const Values& values, int v, const Vector& vector, int k, int m_begin) const {
    ws::Pack<float, 4> y_pack;
    #pragma unroll
    for (int e = 0; e < 4; ++e) {
      y_pack[e] = values.running[v].lane[e] * 2.0f;
    }
    ws::store(y + (16777216 * b + 4096 * k + m_begin), y_pack);
  }
};

extern "C" __global__ void __launch_bounds__(512, 1) column_scan(const float* __restrict__ x, float* __restrict__ y) {
  ws::scan_whole_columns(column_scan_scan{x, y});
}
