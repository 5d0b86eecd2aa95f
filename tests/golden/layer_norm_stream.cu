// layer_norm_stream: one fused group
// for all i:4096; over j:393216
//   total = sum(x[393216 i + j])
//   squares = sum((x[393216 i + j] - (total / 393216)) * (x[393216 i + j] - (total / 393216)))
//   y[393216 i + j] = (((x[393216 i + j] - (total / 393216)) * rsqrt(((squares / 393216) + 1e-05))) * weight[j]) + bias[j]
// cuda_row_reduction: reduce = stream, merge = yes, loads = once, stores = streaming, preload = yes, overlap = yes, exp = accurate, threads = 128, lanes = 128, splits = 64, pack = 4, packs = 12, min_blocks = 2, depth = 4, lag = 2, held = 0
extern "C" __global__ void __launch_bounds__(128, 2) layer_norm_stream(
    const float* __restrict__ x, const float* __restrict__ weight, const float* __restrict__ bias,
    float* __restrict__ y, ws::uint64* mailboxes) {
  constexpr int kColumns = 393216;
  constexpr int kPacks = 12;  // of a thread, in each row
  constexpr int kThreads = 128;
  constexpr int kTeams = 4;  // rows in work at once
  constexpr int kDepth = 4;  // rows that a block has on chip or on the way
  constexpr int kSplits = 64;
  constexpr int kLag = 2;  // turns from a block's own state to the row's
  const int rank = blockIdx.x % kSplits;
  const int team = blockIdx.x / kSplits;
  const int first = rank * 6144 + 4 * threadIdx.x;
  extern __shared__ uint4 ring[];
  auto* x_ring = reinterpret_cast<ws::Pack<float, 4>*>(ring) + threadIdx.x;
  __shared__ ws::Moments<float, true> total_box[2][4];
  __shared__ ws::Moments<float, true> total_agreed[2];
  auto inbox = [&](int turn) {  // of all blocks of the row
    return reinterpret_cast<ws::Slot<ws::Moments<float, true>>*>(mailboxes) + (team * 2 * kLag + turn % (2 * kLag)) * (kSplits * kSplits);
  };
  auto fetch = [&](int turn, int slot) {
    const int row = team + turn * kTeams;
    if (row < 4096) {
      const int i = row;
      #pragma unroll
      for (int v = 0; v < kPacks; ++v) {
        const int j_begin = first + v * 512;
        ws::copy_async(x_ring + slot * (kPacks * kThreads) + v * kThreads, x + (393216 * i + j_begin));
      }
    }
    ws::commit_copies();
  };
  ws::wait_for_previous();
  for (int slot = 0; slot < kDepth; ++slot) fetch(slot, slot);
  ws::Pack<float, 4> weight_row[kPacks];
  ws::Pack<float, 4> bias_row[kPacks];
  #pragma unroll
  for (int v = 0; v < kPacks; ++v) {
    const int j_begin = first + v * 512;
    weight_row[v] = ws::load<4, ws::kShared>(weight + j_begin);
    bias_row[v] = ws::load<4, ws::kShared>(bias + j_begin);
  }
  const int turns = (4095 - team) / kTeams + 1;
  int newest = 0, oldest = 0;  // slots of the ring

  for (int turn = 0; turn < turns + kLag; ++turn) {
    ws::Mail<kSplits, ws::Moments<float, true>> mail;
    if (threadIdx.x < 32 && turn >= kLag) mail = ws::look<kSplits>(inbox(turn - kLag), rank);
    if (turn < turns) {
      const int row = team + turn * kTeams;
      const int i = row;
      const ws::Pack<float, 4>* x_places = x_ring + newest * (kPacks * kThreads);
      ws::wait_copies<kDepth - 1 - kLag>();
      ws::Lanes<ws::Sum, float, 4> total_lanes;
      #pragma unroll
      for (int v = 0; v < kPacks; ++v) {
        const int j_begin = first + v * 512;
        const ws::Pack<float, 4> x_pack = x_places[v * kThreads];
        #pragma unroll
        for (int e = 0; e < 4; ++e) {
          total_lanes.take(e, x_pack[e]);
        }
      }
      constexpr float count2 = 48;
      const float thread_mean = total_lanes.folded() * (1.0f / count2);
      ws::Lanes<ws::Sum, float, 4> squares_lanes;
      #pragma unroll
      for (int v = 0; v < kPacks; ++v) {
        const int j_begin = first + v * 512;
        const ws::Pack<float, 4> x_pack2 = x_places[v * kThreads];
        #pragma unroll
        for (int e = 0; e < 4; ++e) {
          const float difference = x_pack2[e] - thread_mean;
          squares_lanes.take(e, difference * difference);
        }
      }
      const ws::Moments<float, true> own_total = ws::Moments<float, true>{thread_mean, count2, squares_lanes.folded()};
      const ws::Moments<float, true> mine = ws::Moments<float, true>::over_lanes<32>(own_total);
      if (threadIdx.x % 32 == 0) total_box[turn % 2][threadIdx.x / 32] = mine;
      newest = newest + 1 == kDepth ? 0 : newest + 1;
    }
    if (threadIdx.x < 32 && turn >= kLag) {
      const ws::Moments<float, true> all = ws::take_from_blocks(mail, inbox(turn - kLag), rank, (turn - kLag));
      if (threadIdx.x == 0) total_agreed[turn % 2] = all;
    }
    __syncthreads();
    if (threadIdx.x >= kThreads - 32 && turn < turns)
      ws::send_to_blocks<kSplits>(ws::over_array<4>(total_box[turn % 2]), inbox(turn), rank, turn);
    if (turn >= kLag) {
      const int row = team + (turn - kLag) * kTeams;
      const int i = row;
      const ws::Pack<float, 4>* x_places = x_ring + oldest * (kPacks * kThreads);
      const ws::Moments<float, true> total_state = total_agreed[turn % 2];
      const float total = total_state.mean * total_state.count;
      const float squares = total_state.squares;
      const float rsqrt = ws::rsqrt((squares / 393216.0f) + 1e-05f);
      #pragma unroll
      for (int v = 0; v < kPacks; ++v) {
        const int j_begin = first + v * 512;
        ws::Pack<float, 4> y_pack;
        const ws::Pack<float, 4> x_pack3 = x_places[v * kThreads];
        #pragma unroll
        for (int e = 0; e < 4; ++e) {
          const float total2 = (((x_pack3[e] - total_state.mean) * rsqrt) * weight_row[v][e]) + bias_row[v][e];
          y_pack[e] = total2;
        }
        ws::store_streaming(y + (393216 * i + j_begin), y_pack);
      }
      fetch((turn - kLag) + kDepth, oldest);
      oldest = oldest + 1 == kDepth ? 0 : oldest + 1;
    }
  }
  ws::launch_dependents();
  if (threadIdx.x < 32)
    for (int turn_of_box = 0; turn_of_box < 2 * kLag; ++turn_of_box)
      ws::clear_mailboxes<kSplits>(inbox(turn_of_box), rank);
}
