// The grid of fuse_mix: 32 channels of a block per CTA, a warp per slot up to 16 warps.
#pragma once

#include <algorithm>
#include <cstdint>

#include "xpress/device_limits.h"

namespace xpress::cuda {

struct FuseMixPlan {
  int64_t ctas;
  int threads;
};

inline FuseMixPlan plan_fuse_mix(int64_t N, int64_t B, int64_t r, const DeviceLimits&) {
  constexpr int64_t kChannels = 32, kMaxWarps = 16;
  return {N * (r / kChannels), static_cast<int>(32 * std::min(B, kMaxWarps))};
}

}  // namespace xpress::cuda
