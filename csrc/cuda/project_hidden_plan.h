// Tiles and grids of project_hidden. No choice here changes a bit of the result.
#pragma once

#include <algorithm>
#include <cstdint>

#include "xpress/device_limits.h"

namespace xpress::cuda {

// Blocks are taken in rounds of at most this many, which bounds the scratch memory.
constexpr int64_t kProjectRound = 64;

struct ProjectHiddenPlan {
  int64_t round;    // blocks per pair of launches
  bool large_tile;  // 64 slots by 32 columns per CTA, else 32 by 8
  int group;        // whole blocks of a CTA
};

inline int64_t project_ctas(int64_t blocks, int64_t r, const ProjectHiddenPlan& plan) {
  return (blocks + plan.group - 1) / plan.group * (r / (plan.large_tile ? 32 : 8));
}

// The large tile reads the rounded rows a quarter as often. It is for the tensor cores, that is,
// for 16-bit weights, and pays only where enough CTAs are left to read from half of the SMs at
// least.
inline ProjectHiddenPlan plan_project_hidden(int64_t N, int64_t B, int64_t r, int64_t element_size,
                                             const DeviceLimits& limits) {
  constexpr int64_t kMeans = 16;
  const auto plan = [&](bool large_tile) {
    const int64_t slots = large_tile ? 64 : 32;
    const int64_t group = std::min({slots / B, kMeans, N});
    return ProjectHiddenPlan{std::min(N, kProjectRound), large_tile, static_cast<int>(group)};
  };
  const ProjectHiddenPlan large = plan(true);
  const bool is_enough = 2 * project_ctas(large.round, r, large) >= limits.num_sms;
  return element_size == 2 && is_enough ? large : plan(false);
}

}  // namespace xpress::cuda
