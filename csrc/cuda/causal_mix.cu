#include "device/launch.h"
#include "kernels/causal_mix.cuh"
#include "xpress/launch.h"

namespace xpress::cuda {
namespace {

template <class T>
Status run(const CausalMixParams& p, void* stream) {
  using Kernel = kernels::CausalMix<T>;
  const device::LaunchShape shape{(p.N * p.r + Kernel::kThreads - 1) / Kernel::kThreads,
                                  Kernel::kThreads};
  return device::launch(
      kernels::causal_mix_kernel<T>, shape, stream,
      typename Kernel::Params{p.N, p.B, p.r, static_cast<const T*>(p.x),
                              static_cast<const T*>(p.mixer), static_cast<T*>(p.out)});
}

}  // namespace

Status causal_mix(const CausalMixParams& p, const DeviceLimits&, void* stream) {
  if (p.N == 0) return Status::kOk;
  return p.is_double ? run<double>(p, stream) : run<float>(p, stream);
}

}  // namespace xpress::cuda
