// ws_scaled_dot_product_attention: scaled_dot_product_attention.default
// for all i0:2, i1:2048, i2:16, i3:128; over j:2048
//   r0 = sum(args_2[4194304 i0 + 128 i2 + i3 + 2048 j] * softmax(0.0883883 * sum of 128 args_0[4194304 i0 + 2048 i1 + 128 i2] * args_1[4194304 i0 + 128 i2 + 2048 j]))
//   scaled_dot_product_attention[4194304 i0 + 2048 i1 + 128 i2 + i3] = r0
// cuda_attention: ping_pong = yes, keys = 128, stages = 2, warpgroups = 2, lag = 0
using ws_scaled_dot_product_attention_shape = ws::Attention<ws::bfloat16,
    ws::AttentionExtents{.layers = 32, .inner = 16, .queries = 2048, .keys = 2048, .depth = 128,
                         .columns = 128, .pack = 8, .causal = false},
    ws::AttentionOffsets{.queries = 0, .keys = 0, .values = 0},
    ws::AttentionTiling{.keys = 128, .stages = 2, .warpgroups = 2, .turns = true, .lag = 0}>;

struct ws_scaled_dot_product_attention_end {
  ws::bfloat16* __restrict__ scaled_dot_product_attention;
  WS_INLINE void operator()(int batch, int m, int n_begin, ws::Pack<float, 8> sums) const {
    ws::Pack<ws::bfloat16, 8> scaled_dot_product_attention_pack;
    #pragma unroll
    for (int e = 0; e < 8; ++e) {
      scaled_dot_product_attention_pack[e] = ws::narrow<ws::bfloat16>(sums[e]);
    }
    ws::store(scaled_dot_product_attention + (2048 * m + n_begin + 4194304 * static_cast<int>(static_cast<unsigned>(batch) / 16u) + 128 * static_cast<int>(static_cast<unsigned>(batch) % 16u)), scaled_dot_product_attention_pack);
  }
};

extern "C" __global__ void __launch_bounds__(ws_scaled_dot_product_attention_shape::kThreads, 1) ws_scaled_dot_product_attention_attention(
    const __grid_constant__ ws::TensorMap queries_map, const __grid_constant__ ws::TensorMap keys_map,
    const __grid_constant__ ws::TensorMap values_map, ws::bfloat16* __restrict__ scaled_dot_product_attention) {
  constexpr float kScoreToLog2 = 0.12751743082459868f;  // 0.08838834764831845 of the scores, base 2
  ws::attention<ws_scaled_dot_product_attention_shape>(queries_map, keys_map, values_map, kScoreToLog2,
                nullptr, ws_scaled_dot_product_attention_end{scaled_dot_product_attention});
}
