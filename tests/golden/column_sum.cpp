// column_sum: one fused group
// for all j:4096; over i:512
//   all = sum(x[4096 i + j])
//   y[j] = all
// cpu_column_reduction: reduce = split, stores = plain, tile = 2048, threads = 0
struct column_sum_columns {
  static constexpr ws::ColumnTiling kTiling{.columns = 4096, .rows = 512, .tile = 2048, .pieces = 16, .threads = 0};
  using Outer = ws::Space<>;
  using Rows = ws::Space<>;
  using Sweep0 = ws::Reductions<ws::Reduction<ws::Sum, float>>;
  using Sweeps = ws::List<Sweep0>;
  const float* __restrict x;
  float* __restrict y;
  double* __restrict all_pieces;
  const Sweep0::Running<2048>* found0;
  long i;
  WS_INLINE void row(const long* at) { i = at[0]; }
  WS_INLINE auto piece(ws::Number<0>) const { return all_pieces; }
  WS_INLINE void ahead(long j, long count) const { ws::ask_for(x + (4096 * (i + 1) + j), count); }
  WS_INLINE void fold(ws::Number<0>, Sweep0::Running<2048>& found, long j, long e) const {
    found.take<0>(e, x[4096 * i + j]);
  }
  WS_INLINE void learn(ws::Number<0>, const Sweep0::Running<2048>& found) { found0 = &found; }
  WS_INLINE void store_column(long j, long e) const { y[j] = found0->get<0>(e); }
};

extern "C" void column_sum(void* const* arguments) {
  ws::reduce_columns(ws::bind<column_sum_columns, 3>(arguments));
}
