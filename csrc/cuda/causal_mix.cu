#include "cuda/causal_mix_plan.h"
#include "device/launch.h"
#include "kernels/causal_mix.cuh"
#include "xpress/launch.h"

namespace xpress::cuda {
namespace {

template <class T>
Status run(const CausalMixParams& p, const DeviceLimits& limits, void* stream) {
  using Kernel = kernels::CausalMix<T>;
  const CausalMixPlan plan = plan_causal_mix(p.N, p.B, p.r, limits);
  return device::launch(
      kernels::causal_mix_kernel<T>, {plan.ctas, plan.threads, sizeof(typename Kernel::Shared)},
      stream,
      typename Kernel::Params{static_cast<int>(p.B), p.r, static_cast<const T*>(p.x),
                              static_cast<const T*>(p.mixer), static_cast<T*>(p.out)});
}

}  // namespace

Status causal_mix(const CausalMixParams& p, const DeviceLimits& limits, void* stream) {
  if (p.N == 0) return Status::kOk;
  return p.is_double ? run<double>(p, limits, stream) : run<float>(p, limits, stream);
}

}  // namespace xpress::cuda
