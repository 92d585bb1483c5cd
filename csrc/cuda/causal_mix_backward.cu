#include "cuda/causal_mix_backward_plan.h"
#include "device/launch.h"
#include "kernels/causal_mix_backward.cuh"
#include "xpress/launch.h"

namespace xpress::cuda {
namespace {

template <class T>
Status run(const CausalMixBackwardParams& p, const DeviceLimits& limits, void* stream) {
  using Kernel = kernels::CausalMixBackward<T>;
  const CausalMixBackwardPlan plan = plan_causal_mix_backward(p.N, p.B, p.r, limits);
  const typename Kernel::Params params{static_cast<int>(p.B),
                                       p.N,
                                       p.r,
                                       static_cast<const T*>(p.grad_out),
                                       static_cast<const T*>(p.x),
                                       static_cast<const T*>(p.mixer),
                                       static_cast<T*>(p.grad_x),
                                       static_cast<T*>(p.grad_mixer)};
  if (p.N > 0) {
    XPRESS_TRY(device::launch(kernels::causal_mix_grad_x_kernel<T>,
                              {plan.x.ctas, plan.x.threads, sizeof(typename Kernel::SharedForX)},
                              stream, params));
  }
  return device::launch(
      kernels::causal_mix_grad_mixer_kernel<T>,
      {plan.mixer.ctas, plan.mixer.threads, sizeof(typename Kernel::SharedForMixer)}, stream,
      params);
}

}  // namespace

Status causal_mix_backward(const CausalMixBackwardParams& p, const DeviceLimits& limits,
                           void* stream) {
  return p.is_double ? run<double>(p, limits, stream) : run<float>(p, limits, stream);
}

}  // namespace xpress::cuda
