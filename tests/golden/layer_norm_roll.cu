// layer_norm_roll: one fused group
// for all i:16; over j:4194304
//   total = sum(x[4194304 i + j])
//   squares = sum((x[4194304 i + j] - (total / 4.1943e+06)) * (x[4194304 i + j] - (total / 4.1943e+06)))
//   y[4194304 i + j] = (((x[4194304 i + j] - (total / 4.1943e+06)) * rsqrt(((squares / 4.1943e+06) + 1e-05))) * weight[j]) + bias[j]
// cuda_row_reduction: reduce = roll, merge = yes, loads = once, stores = streaming, preload = no, overlap = yes, exp = accurate, threads = 512, lanes = 512, splits = 128, pack = 4, packs = 2, min_blocks = 1, depth = 14, lag = 12, held = 20
extern "C" __global__ void __launch_bounds__(512, 1) layer_norm_roll(
    const float* __restrict__ x, const float* __restrict__ weight, const float* __restrict__ bias,
    float* __restrict__ y, ws::uint64* slots, ws::uint64* arrivals) {
  constexpr int kColumns = 4194304;
  constexpr int kThreads = 512;
  constexpr int kPacks = 2;  // of a thread, in each part
  constexpr int kParts = 8;  // of a block's row
  constexpr int kPart = 524288;  // elements from one to the next
  constexpr int kDepth = 14;  // parts in shared memory or on the way there
  constexpr int kLead = 12;  // parts that are added up before they are stored
  constexpr int kTeams = 1;  // rows in work at once
  constexpr int kSplits = 128;
  const int rank = blockIdx.x % kSplits;
  const int team = blockIdx.x / kSplits;
  const int first = rank * 2048 + 4 * threadIdx.x;
  extern __shared__ uint4 ring[];
  auto* x_ring = reinterpret_cast<ws::Pack<float, 4>*>(ring) + threadIdx.x;
  __shared__ ws::Moments<float, true> total_box[2][16];
  const auto slots_of = [&](int turn) {  // two sets of slots take turns
    return reinterpret_cast<ws::Slot<ws::Moments<float, true>>*>(slots) + (team * 2 + turn % 2) * kSplits;
  };
  const auto fetch = [&](int number) {
    const int row = team + number / kParts * kTeams;
    if (row < 16) {
      const int i = row;
      const int begin = first + number % kParts * kPart;
      #pragma unroll
      for (int v = 0; v < kPacks; ++v) {
        const int j_begin = begin + v * 262144;
        ws::copy_async<ws::kLast>(x_ring + (number % kDepth * kPacks + v) * kThreads, x + (4194304 * i + j_begin));
      }
    }
    ws::commit_copies();
  };
  const auto ask = [&](int number) {
    const int row = team + number / kParts * kTeams;
    if (row < 16) {
      const int i = row;
      const int begin = first + number % kParts * kPart;
      if (threadIdx.x % 32 == 0) {
        #pragma unroll
        for (int v = 0; v < kPacks; ++v) {
          const int j_begin = begin + v * 262144;
          ws::prefetch(x + (4194304 * i + j_begin), 512);
        }
      }
    }
  };
  ws::Moments<float, true> own_total = ws::Moments<float, true>::empty();
  const auto add_up = [&](int number) {
    const int row = team + number / kParts * kTeams;
    if (row < 16) {
      const int i = row;
      const int begin = first + number % kParts * kPart;
      ws::wait_copies<kDepth - kLead>();
      ws::Pack<float, 4> x_row[kPacks];
      #pragma unroll
      for (int v = 0; v < kPacks; ++v) {
        const int j_begin = begin + v * 262144;
        x_row[v] = x_ring[(number % kDepth * kPacks + v) * kThreads];
      }
      ws::Lanes<ws::Sum, float, 4> total_lanes;
      #pragma unroll
      for (int v = 0; v < kPacks; ++v) {
        const int j_begin = begin + v * 262144;
        #pragma unroll
        for (int e = 0; e < 4; ++e) {
          total_lanes.take(e, x_row[v][e]);
        }
      }
      constexpr float count2 = 8;
      const float thread_mean = total_lanes.folded() * (1.0f / count2);
      ws::Lanes<ws::Sum, float, 4> squares_lanes;
      #pragma unroll
      for (int v = 0; v < kPacks; ++v) {
        const int j_begin = begin + v * 262144;
        #pragma unroll
        for (int e = 0; e < 4; ++e) {
          const float difference = x_row[v][e] - thread_mean;
          squares_lanes.take(e, difference * difference);
        }
      }
      own_total = ws::Moments<float, true>::join(own_total, ws::Moments<float, true>{thread_mean, count2, squares_lanes.folded()});
      if (number % kParts == kParts - 1) {
        const int turn = number / kParts;
        ws::tell_team<16>(own_total, total_box[0], slots_of(turn), rank, turn + 1);
        own_total = ws::Moments<float, true>::empty();
      }
    }
  };
  ws::wait_for_previous();
  ws::Pack<float, 4> weight_held[8 * kPacks];
  #pragma unroll
  for (int part = 0; part < 8; ++part) {
    const int begin = first + part * kPart;
    #pragma unroll
    for (int v = 0; v < kPacks; ++v) {
      const int j_begin = begin + v * 262144;
      weight_held[part * kPacks + v] = ws::load<4, ws::kLast>(weight + j_begin);
    }
  }
  ws::Pack<float, 4> bias_held[2 * kPacks];
  #pragma unroll
  for (int part = 0; part < 2; ++part) {
    const int begin = first + part * kPart;
    #pragma unroll
    for (int v = 0; v < kPacks; ++v) {
      const int j_begin = begin + v * 262144;
      bias_held[part * kPacks + v] = ws::load<4, ws::kLast>(bias + j_begin);
    }
  }
  ws::Pack<float, 4> next_bias[kPacks];
  for (int number = 0; number < kDepth - kLead; ++number) fetch(number);
  for (int number = 0; number < kLead; ++number) {
    fetch(number + kDepth - kLead);
    add_up(number);
  }
  int turn = 0;
  for (int row = team; row < 16; row += kTeams, ++turn) {
    const int i = row;
    const ws::Moments<float, true> total_state = ws::hear_team<16, kSplits>(total_box[1], slots_of(turn), turn + 1);
    const float total = total_state.mean * total_state.count;
    const float squares = total_state.squares;
    const float rsqrt = ws::rsqrt((squares / 4194304.0f) + 1e-05f);
    #pragma unroll
    for (int part = 0; part < kParts; ++part) {
      const int number = turn * kParts + part;
      const int begin = first + part * kPart;
      ws::Pack<float, 4> bias_row[kPacks];
      #pragma unroll
      for (int v = 0; v < kPacks; ++v) {
        const int j_begin = begin + v * 262144;
        bias_row[v] = part < 2 ? bias_held[part < 2 ? part * kPacks + v : 0] : next_bias[v];
      }
      ws::Pack<float, 4> x_row2[kPacks];
      #pragma unroll
      for (int v = 0; v < kPacks; ++v) {
        const int j_begin = begin + v * 262144;
        x_row2[v] = x_ring[(number % kDepth * kPacks + v) * kThreads];
      }
      #pragma unroll
      for (int v = 0; v < kPacks; ++v) {
        const int j_begin = begin + v * 262144;
        ws::Pack<float, 4> y_pack;
        #pragma unroll
        for (int e = 0; e < 4; ++e) {
          const float product = ((x_row2[v][e] - total_state.mean) * rsqrt) * weight_held[part * kPacks + v][e];
          y_pack[e] = product + bias_row[v][e];
        }
        ws::store_streaming(y + (4194304 * i + j_begin), y_pack);
      }
      fetch(number + kDepth);
      ask(number + kDepth + 1);
      const int following = (part + 1) % kParts;
      if (following >= 2) {
        const int next_begin = first + following * kPart;
        #pragma unroll
        for (int v = 0; v < kPacks; ++v) {
          const int j_begin = next_begin + v * 262144;
          next_bias[v] = ws::load_again<4>(bias + j_begin, row + (following > 0 ? 1 : 2) * kTeams >= 16);
        }
      }
      add_up(number + kLead);
    }
  }
  ws::launch_dependents();
  ws::clear_slots<kSplits>(slots_of(0), arrivals + team);
}
