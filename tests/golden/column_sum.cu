// column_sum: sum of the rows
// for all m:8192; over k:8192
//   total = sum(x[8192 k + m])
//   y[m] = total
// cuda_column_reduction: loads = evict_first, stores = plain, exp = accurate, dependent_launch = yes, threads = 256, lanes = 32, ctas = 4, vector_width = 4, unroll = 8, min_blocks = 2
struct column_sum_columns {
  const float* __restrict__ x;
  float* __restrict__ y;
  using Offset = int;
  static constexpr ws::ColumnTiling kTiling{.rows = 8192, .columns = 8192, .others = 1, .visits = 1, .vector_width = 4,
      .threads = 256, .lanes = 32, .ctas_per_column = 4, .rows_in_flight = 8, .overlap = true, .counts = false};
  using Results0 = ws::Results<ws::Lanes<ws::Sum, float, 4>>;
  static WS_INLINE Results0 few(ws::ColumnVisit<0>) { return Results0(); }
  Results0 total;
  WS_INLINE Results0& results(ws::ColumnVisit<0>) { return total; }
  struct Row0 { ws::Pack<float, 4> x; };
  WS_INLINE Row0 load(ws::ColumnVisit<0>, int k, int m_begin) const {
    return {ws::load<4, ws::kOnce>(x + (8192 * k + m_begin))};
  }
  WS_INLINE void fold(const Row0& row, int k, int m_begin, Results0& part) const {
    #pragma unroll
    for (int e = 0; e < 4; ++e) {
      part.take<0>(e, row.x[e]);
    }
  }
  WS_INLINE void store_columns(int m_begin) const {
    ws::Pack<float, 4> y_pack;
    #pragma unroll
    for (int e = 0; e < 4; ++e) {
      y_pack[e] = total.value<0>(e);
    }
    ws::store(y + m_begin, y_pack);
  }
};

extern "C" __global__ void __launch_bounds__(256, 2) column_sum(
    const float* __restrict__ x, float* __restrict__ y, unsigned* arrived, float* total_partials) {
  ws::reduce_columns(column_sum_columns{x, y}, arrived, total_partials);
}
