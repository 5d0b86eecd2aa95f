// ws_max_pool2d: max_pool2d.default
// for all i0:512, i1:28, i2:28; over j0:3, j1:3
//   r0 = max(args_0[3136 i0 + 112 i1 + 2 i2 + 56 j0 + j1 + -57]) where 2 i1 + j0 + -1 in 0..55, 2 i2 + j1 + -1 in 0..55
//   max_pool2d[784 i0 + 28 i1 + i2] = r0
// cuda_window: reuse = columns, dependent_launch = yes, threads = 256, vector_width = 2, rows = 8, vectors = 1, min_blocks = 4
struct ws_max_pool2d_window {
  const float* __restrict__ args_0;
  float* __restrict__ max_pool2d;

  using Offset = int;
  static constexpr ws::WindowTiling kTiling{.threads = 256, .group = 32, .vector_width = 2, .vectors = 28, .rows = 8,
      .outputs = 28, .columns = 60, .whole_rows = true, .overlap = true};
  static constexpr ws::Slide kRow{.data = 56, .outputs = 28, .size = 3, .stride = 2, .dilation = 1, .padding = 1};
  static constexpr ws::Slide kDown{.data = 56, .outputs = 28, .size = 3, .stride = 2, .dilation = 1, .padding = 1};
  using Deep = ws::Slides<>;
  using Outer = ws::Axes<512>;

  struct State { float r0; };
  WS_INLINE static State empty() { return {-ws::infinity<float>()}; }
  WS_INLINE static void join(State& a, const State& b) { a.r0 = ws::joined<ws::Maximum, float>(a.r0, b.r0); }

  WS_INLINE ws::States<State, 2> load(const int (&at)[1], int h, int w_begin, bool inside) const {
    const auto& [i0] = at;
    ws::States<State, 2> values;
    const ws::Pack<float, 2> args_0_pack = ws::load<2, ws::kShared>(args_0 + (56 * h + 3136 * i0 + w_begin));
    #pragma unroll
    for (int e = 0; e < 2; ++e) {
      values[e] = {inside ? args_0_pack[e] : -ws::infinity<float>()};
    }
    return values;
  }
  WS_INLINE void store(const int (&at)[1], int i1, int i2, const State& total) const {
    const auto& [i0] = at;
    max_pool2d[784 * i0 + 28 * i1 + i2] = total.r0;
  }
};

extern "C" __global__ void __launch_bounds__(256, 4) ws_max_pool2d(
    const float* __restrict__ args_0, float* __restrict__ max_pool2d) {
  alignas(16) __shared__ ws::WindowTile<ws_max_pool2d_window>::Columns columns;
  ws::reduce_windows(ws_max_pool2d_window{args_0, max_pool2d}, columns);
}
