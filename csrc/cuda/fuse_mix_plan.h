// The grid of fuse_mix: that of causal_mix, whose sum it is.
#pragma once

#include "cuda/causal_mix_plan.h"

namespace xpress::cuda {

using FuseMixPlan = CausalMixPlan;

inline FuseMixPlan plan_fuse_mix(int64_t N, int64_t B, int64_t r, const DeviceLimits& limits) {
  return plan_causal_mix(N, B, r, limits);
}

}  // namespace xpress::cuda
