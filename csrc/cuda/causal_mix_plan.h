// The grid of causal_mix, and of its backward for x: 32 channels of a block per CTA, a warp per
// slot up to 16 warps.
#pragma once

#include <algorithm>
#include <cstdint>

#include "xpress/device_limits.h"

namespace xpress::cuda {

struct CausalMixPlan {
  int64_t ctas;
  int threads;
};

inline CausalMixPlan plan_causal_mix(int64_t N, int64_t B, int64_t r, const DeviceLimits&) {
  constexpr int64_t kChannels = 32, kMaxWarps = 16;
  return {N * (r / kChannels), static_cast<int>(32 * std::min(B, kMaxWarps))};
}

}  // namespace xpress::cuda
