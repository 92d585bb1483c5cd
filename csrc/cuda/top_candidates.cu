#include "cuda/top_candidates_internal.h"
#include "cuda/top_candidates_plan.h"
#include "device/launch.h"
#include "kernels/top_candidates.cuh"
#include "xpress/launch.h"

namespace xpress::cuda {

Status launch_top_candidates(const TopCandidatesLaunch& p, const DeviceLimits& limits,
                             void* stream) {
  using Kernel = kernels::TopCandidates;
  const TopCandidatesPlan plan = plan_top_candidates(p.V, p.C, element_size(p.base_logits.dtype),
                                                     Kernel::kSharedBytes, limits);
  return device::launch(kernels::top_candidates_kernel,
                        {p.N * p.D * plan.cluster, plan.threads, plan.shared_bytes, plan.cluster},
                        stream,
                        Kernel::Params{p.D, p.V, static_cast<int>(p.C), plan.group, p.capacity,
                                       plan.keeps, p.base_logits, p.ids, p.logits});
}

Status top_candidates(const TopCandidatesParams& p, const DeviceLimits& limits, void* stream) {
  if (p.N * p.D == 0) return Status::kOk;
  return launch_top_candidates({p.N, p.D, p.V, p.C, p.C, p.base_logits, p.ids, p.logits}, limits,
                               stream);
}

}  // namespace xpress::cuda
