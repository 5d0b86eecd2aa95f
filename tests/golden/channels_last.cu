// channels_last: contiguous.default
// for all i0:8, i1:784, i2:96
//   contiguous[75264 i0 + 96 i1 + i2] = args_0[75264 i0 + i1 + 784 i2]
// cuda_transpose: loads = cached, stores = plain, preload = yes, order = along, exp = accurate, dependent_launch = yes, threads = 256, along = 32, across = 32, vector_width = 4
struct channels_last_transpose {
  const float* __restrict__ args_0;
  float* __restrict__ contiguous;

  using Offset = int;
  static constexpr ws::TransposeTiling kTiling{.threads = 256, .along = 32, .across = 32, .vector_width = 4,
      .element_bytes = 4, .along_extent = 96, .across_extent = 784, .prefetch = true, .across_first = false,
      .overlap = true};
  using Outer = ws::Axes<8>;
  using Across = ws::List<ws::Pack<float, 4>>;
  using Along = ws::List<>;
  using Results = ws::List<>;

  WS_INLINE ws::Pack<float, 4> load(ws::AcrossLoad<0>, const int (&at)[1], int i1_begin, int i2) const {
    const auto& [i0] = at;
    return ws::load<4, ws::kShared>(args_0 + (75264 * i0 + i1_begin + 784 * i2));
  }
  WS_INLINE void compute(const int (&at)[1], int i1, int i2_begin, const ws::Pack<float, 4>& args_0_vector) const {
    const auto& [i0] = at;
    ws::Pack<float, 4> contiguous_pack;
    #pragma unroll
    for (int e = 0; e < 4; ++e) {
      contiguous_pack[e] = args_0_vector[e];
    }
    ws::store(contiguous + (75264 * i0 + 96 * i1 + i2_begin), contiguous_pack);
  }
};

extern "C" __global__ void __launch_bounds__(256, 4) channels_last(
    const float* __restrict__ args_0, float* __restrict__ contiguous) {
  alignas(16) __shared__ ws::TransposeTiles<channels_last_transpose> tiles;
  ws::transpose(channels_last_transpose{args_0, contiguous}, tiles);
}
