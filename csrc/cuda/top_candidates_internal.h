// top_candidates as other launchers use it: into rows with room for more.
#pragma once

#include "xpress/device_limits.h"
#include "xpress/params.h"
#include "xpress/status.h"

namespace xpress::cuda {

struct TopCandidatesLaunch {
  int64_t N, D, V, C;
  int64_t capacity;         // entries of a row, at least C
  StridedRows base_logits;  // [N, D, V]
  int64_t* ids;             // [N, D, capacity], the first C are written
  float* logits;            // [N, D, capacity], likewise
};

Status launch_top_candidates(const TopCandidatesLaunch& p, const DeviceLimits& limits,
                             void* stream);

}  // namespace xpress::cuda
