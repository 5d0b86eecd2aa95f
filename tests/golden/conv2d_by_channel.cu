// ws_conv2d: conv2d.default
// for all i0:8, i1:64, i2:56, i3:56; over j0:3, j1:3
//   r0 = sum(args_0[200704 i0 + 3136 i1 + 56 i2 + i3 + 56 j0 + j1 + -57] * args_1[9 i1 + 3 j0 + j1]) where i2 + j0 + -1 in 0..55, i3 + j1 + -1 in 0..55
//   conv2d[200704 i0 + 3136 i1 + 56 i2 + i3] = r0 + args_2[i1]
// cuda_convolution: shared = no, dependent_launch = yes, threads = 128, rows = 4, outputs = 4, vector_width = 4, min_blocks = 1
struct ws_conv2d_convolution {
  const float* __restrict__ args_0;
  const float* __restrict__ args_1;
  const float* __restrict__ args_2;
  float* __restrict__ conv2d;

  using Offset = int;
  using Value = float;
  static constexpr ws::ConvolutionTiling kTiling{.threads = 128, .rows = 4, .outputs = 4, .vector_width = 4,
      .store_width = 4, .across = 0, .weights_differ = false, .overlap = true};
  static constexpr ws::Slide kRow{.data = 56, .outputs = 56, .size = 3, .stride = 1, .dilation = 1, .padding = 1};
  static constexpr ws::Slide kDown{.data = 56, .outputs = 56, .size = 3, .stride = 1, .dilation = 1, .padding = 1};
  using Deep = ws::Slides<>;
  using Outer = ws::Axes<8, 64>;
  using Channels = ws::Axes<1>;

  WS_INLINE ws::Pack<Value, 4> load(const int (&at)[2], const int (&channel)[1], const int (&place)[1], int h,
      int w_begin) const {
    const auto& [i0, i1] = at;
    ws::Pack<Value, 4> values;
    const ws::Pack<float, 4> args_0_pack = ws::load<4, ws::kShared>(args_0 + (56 * h + 200704 * i0 + 3136 * i1 + w_begin));
    #pragma unroll
    for (int e = 0; e < 4; ++e) {
      values[e] = args_0_pack[e];
    }
    return values;
  }
  WS_INLINE Value weight(const int (&at)[2], const int (&channel)[1], const int (&element)[1], int kh, int kw,
      int i3) const {
    const auto& [i0, i1] = at;
    return args_1[9 * i1 + 3 * kh + kw];
  }
  WS_INLINE void store(const int (&at)[2], int i2, int i3_begin, const Value (&sums)[4]) const {
    const auto& [i0, i1] = at;
    ws::Pack<float, 4> conv2d_pack;
    const float args_2_at = args_2[i1];
    #pragma unroll
    for (int e = 0; e < 4; ++e) {
      conv2d_pack[e] = sums[e] + args_2_at;
    }
    ws::store(conv2d + (200704 * i0 + 3136 * i1 + 56 * i2 + i3_begin), conv2d_pack);
  }
};

extern "C" __global__ void __launch_bounds__(128, 1) ws_conv2d(
    const float* __restrict__ args_0, const float* __restrict__ args_1, const float* __restrict__ args_2,
    float* __restrict__ conv2d) {
  ws::convolve(ws_conv2d_convolution{args_0, args_1, args_2, conv2d});
}
