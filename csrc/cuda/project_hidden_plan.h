// Tiles and grids of project_hidden. No choice here changes a bit of the result.
#pragma once

#include <algorithm>
#include <cstdint>

#include "xpress/device_limits.h"

namespace xpress::cuda {

// Blocks are taken in rounds of at most this many, which bounds the scratch memory.
constexpr int64_t kProjectRound = 64;

// Shared memory of a CTA at most; the largest tile is not chosen where there is less.
constexpr int64_t kProjectSharedBytes = 96 << 10;

struct ProjectHiddenPlan {
  int64_t round;     // blocks per pair of launches
  int row_tiles;     // of 16 slots, per CTA: 1, 2 or 4
  int column_tiles;  // of 8 columns, per CTA: 1, or 4 where there are 4 row tiles
  int group;         // whole blocks of a CTA
};

inline int64_t project_ctas(int64_t blocks, int64_t r, const ProjectHiddenPlan& plan) {
  return (blocks + plan.group - 1) / plan.group * (r / (8 * plan.column_tiles));
}

// The largest tile reads the rounded rows a quarter as often. It is for the tensor cores, that is,
// for 16-bit weights, and pays only where enough CTAs are left to read from half of the SMs.
inline ProjectHiddenPlan plan_project_hidden(int64_t N, int64_t B, int64_t r, int64_t element_size,
                                             const DeviceLimits& limits) {
  constexpr int64_t kMeans = 16;
  const auto plan = [&](int row_tiles, int column_tiles) {
    const int64_t group = std::min({16 * row_tiles / B, kMeans, N});
    return ProjectHiddenPlan{std::min(N, kProjectRound), row_tiles, column_tiles,
                             static_cast<int>(group)};
  };
  const ProjectHiddenPlan large = plan(4, 4);
  const bool is_enough = 2 * project_ctas(large.round, r, large) >= limits.num_sms;
  const bool has_room = limits.shared_bytes_per_cta >= kProjectSharedBytes;
  if (element_size == 2 && is_enough && has_room) return large;
  return plan(N * B <= 16 ? 1 : 2, 1);
}

}  // namespace xpress::cuda
