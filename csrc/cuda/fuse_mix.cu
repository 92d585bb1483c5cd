#include "cuda/fuse_mix_plan.h"
#include "cuda/weight_type.h"
#include "device/launch.h"
#include "kernels/fuse_mix.cuh"
#include "xpress/launch.h"

namespace xpress::cuda {
namespace {

template <class T>
Status run(const FuseMixParams& p, const DeviceLimits& limits, void* stream) {
  using Kernel = kernels::FuseMix<T>;
  const FuseMixPlan plan = plan_fuse_mix(p.N, p.B, p.r, limits);
  return device::launch(
      kernels::fuse_mix_kernel<T>, {plan.ctas, plan.threads, sizeof(typename Kernel::Shared)},
      stream,
      typename Kernel::Params{static_cast<int>(p.B), p.r, p.V_t, p.context, p.prev,
                              static_cast<const T*>(p.token_table), p.mixer, p.out});
}

}  // namespace

Status fuse_mix(const FuseMixParams& p, const DeviceLimits& limits, void* stream) {
  if (p.N == 0) return Status::kOk;
  return with_weight_type(p.weight_dtype,
                          [&](auto type) { return run<decltype(type)>(p, limits, stream); });
}

}  // namespace xpress::cuda
