// Cluster, threads and groups of top_candidates. No choice here changes a bit of the result.
#pragma once

#include <cstdint>

#include "xpress/device_limits.h"

namespace xpress::cuda {

struct TopCandidatesPlan {
  int cluster;
  int threads;
  int group;   // threads whose greatest keys are compared as one
  bool keeps;  // logits in shared memory after the first walk
  int64_t shared_bytes;
};

// The largest groups of which there are 2C: fewer maxima are compared, and still few keys reach the
// bound that they give.
inline TopCandidatesPlan plan_top_candidates(int64_t V, int64_t C, int64_t element_size,
                                             int64_t fixed_bytes, const DeviceLimits& limits) {
  constexpr int kMaxGroups = 2048;
  TopCandidatesPlan plan{};
  plan.cluster = limits.has_clusters ? 8 : 1;
  plan.threads = limits.has_clusters ? 512 : 1024;
  const int threads = plan.cluster * plan.threads;
  plan.group = 32;
  while (plan.group > 1 && threads / plan.group < 2 * C && 2 * threads / plan.group <= kMaxGroups) {
    plan.group /= 2;
  }
  const int64_t share = (V + plan.cluster - 1) / plan.cluster * element_size + 32;
  plan.keeps = fixed_bytes + share <= limits.shared_bytes_per_cta;
  plan.shared_bytes = fixed_bytes + (plan.keeps ? share : 0);
  return plan;
}

}  // namespace xpress::cuda
