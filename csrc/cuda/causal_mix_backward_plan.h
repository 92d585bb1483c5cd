// The grids of causal_mix_backward: for x that of causal_mix, for the mixer one CTA per 4 by 4
// pairs of slots and 32 channels, whatever the number of blocks.
#pragma once

#include <cstdint>

#include "cuda/causal_mix_plan.h"

namespace xpress::cuda {

struct CausalMixBackwardPlan {
  CausalMixPlan x;
  CausalMixPlan mixer;
};

inline CausalMixBackwardPlan plan_causal_mix_backward(int64_t N, int64_t B, int64_t r,
                                                      const DeviceLimits& limits) {
  constexpr int64_t kChannels = 32, kTile = 4;
  constexpr int kThreads = 256;
  const int64_t tiles = (B + kTile - 1) / kTile;
  return {plan_causal_mix(N, B, r, limits), {tiles * tiles * (r / kChannels), kThreads}};
}

}  // namespace xpress::cuda
