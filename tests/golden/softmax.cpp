// softmax: softmax over the last dimension
// for all i:4096; over j:1024
//   row_max = max(x[1024 i + j])
//   row_sum = sum(exp((x[1024 i + j] - row_max)))
//   y[1024 i + j] = exp((x[1024 i + j] - row_max)) / row_sum
// cpu_row_reduction: reduce = rows, sweeps = cached, stores = plain, lanes = 64, block = 4096, threads = 0
struct softmax_rows {
  static constexpr ws::RowTiling kTiling{.columns = 1024, .block = 1024, .lanes = 64, .split = false, .online = false,
      .threads = 0};
  using Outer = ws::Space<4096>;
  using Parts = ws::Space<>;
  using Sweep0 = ws::Reductions<ws::Reduction<ws::Maximum, float>>;
  using Sweep1 = ws::Reductions<ws::Reduction<ws::Sum, float>>;
  using Sweeps = ws::List<Sweep0, Sweep1>;
  const float* __restrict x;
  float* __restrict y;
  long i;
  float row_max;
  float row_sum;
  float reciprocal;
  WS_INLINE void locate(const long* at) { i = at[0]; }
  WS_INLINE void learn(ws::Number<0>, const Sweep0::Running<1>& found) { row_max = found.get<0>(); }
  WS_INLINE void learn(ws::Number<1>, const Sweep1::Running<1>& found) {
    row_sum = found.get<0>();
    reciprocal = 1.0f / row_sum;
  }
  WS_INLINE void fold(ws::Number<0>, Sweep0::Running<kTiling.lanes>& found, long j, long lane) const {
    found.take<0>(lane, x[1024 * i + j]);
  }
  WS_INLINE void fold(ws::Number<1>, Sweep1::Running<kTiling.lanes>& found, long j, long lane) const {
    const float exp_value = ws::exp(x[1024 * i + j] - row_max);
    y[1024 * i + j] = exp_value;
    found.take<0>(lane, exp_value);
  }
  WS_INLINE void store(long j, long e) const { y[1024 * i + j] = y[1024 * i + j] * reciprocal; }
};

extern "C" void softmax(void* const* arguments) {
  ws::reduce_rows(ws::bind<softmax_rows, 2>(arguments));
}
