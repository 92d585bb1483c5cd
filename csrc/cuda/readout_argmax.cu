#include "cuda/readout_argmax_plan.h"
#include "cuda/readout_internal.h"
#include "cuda/weight_type.h"
#include "device/launch.h"
#include "kernels/readout_candidates.cuh"
#include "kernels/readout_keys.cuh"
#include "kernels/readout_stream.cuh"
#include "kernels/readout_tiled.cuh"
#include "xpress/launch.h"

namespace xpress::cuda {
namespace {

template <class T>
Status run_stream(const ReadoutLaunch& p, const DeviceLimits& limits, void* stream) {
  using Kernel = kernels::ReadoutStream<T>;
  const ReadoutPlan plan = plan_readout_stream(p.V, p.r, sizeof(typename Kernel::Shared), limits);
  return device::launch(kernels::readout_stream_kernel<T>,
                        {plan.ctas, Kernel::kThreads, plan.shared_bytes}, stream,
                        typename Kernel::Params{{p.N, p.D, p.z, p.base_logits, p.settled},
                                                p.V,
                                                static_cast<int>(p.r),
                                                static_cast<const T*>(p.readout),
                                                p.keys});
}

template <class T>
Status run_tiled(const ReadoutLaunch& p, const DeviceLimits& limits, void* stream) {
  using Kernel = kernels::ReadoutTiled;
  const ReadoutPlan plan =
      plan_readout_tiled(p.N * p.D, p.V, p.r, sizeof(T), sizeof(Kernel::Shared), limits);
  if (plan.stages == 0) return Status::kUnsupportedShape;
  return device::launch(kernels::readout_tiled_kernel<T>,
                        {plan.ctas, Kernel::kThreads, plan.shared_bytes}, stream,
                        Kernel::Params<T>{{p.N, p.D, p.z, p.base_logits, p.settled},
                                          p.V,
                                          static_cast<int>(p.r),
                                          plan.tile_rows,
                                          plan.chunk,
                                          plan.stages,
                                          static_cast<const T*>(p.readout),
                                          p.keys,
                                          p.logits});
}

template <class T>
Status run_candidates(const ReadoutArgmaxParams& p, void* stream) {
  using Kernel = kernels::ReadoutCandidates<T>;
  const int64_t shared_bytes = (sizeof(typename Kernel::Shared) + 15) / 16 * 16 + p.r * sizeof(T);
  return device::launch(
      kernels::readout_candidates_kernel<T>, {p.N * p.D, Kernel::kThreads, shared_bytes}, stream,
      typename Kernel::Params{p.D, p.V, p.C, static_cast<int>(p.r), p.z, p.base_logits,
                              static_cast<const T*>(p.readout), p.candidates, p.index, p.value});
}

}  // namespace

Status launch_readout(const ReadoutLaunch& p, const DeviceLimits& limits, void* stream) {
  const bool streams = p.N * p.D <= kernels::kProductRows && p.logits == nullptr;
  return with_weight_type(p.weight_dtype, [&](auto type) {
    using T = decltype(type);
    if constexpr (sizeof(T) == 2) {
      if (streams) return run_stream<T>(p, limits, stream);
    }
    return run_tiled<T>(p, limits, stream);
  });
}

int64_t readout_scratch_bytes(int64_t rows) {
  return rows * static_cast<int64_t>(sizeof(uint64_t));
}

Status readout_argmax(const ReadoutArgmaxParams& p, void* scratch, const DeviceLimits& limits,
                      void* stream) {
  const int64_t rows = p.N * p.D;
  if (rows == 0) return Status::kOk;
  if (p.candidates != nullptr) {
    return with_weight_type(p.weight_dtype,
                            [&](auto type) { return run_candidates<decltype(type)>(p, stream); });
  }
  using Keys = kernels::ReadoutKeys;
  uint64_t* keys = static_cast<uint64_t*>(scratch);
  const device::LaunchShape by_row{(rows + Keys::kThreads - 1) / Keys::kThreads, Keys::kThreads};
  const Keys::Params all{rows, keys, p.index, p.value};
  XPRESS_TRY(device::launch(kernels::clear_keys_kernel, by_row, stream, all));
  XPRESS_TRY(launch_readout({p.N, p.D, p.V, p.r, p.z, p.base_logits, p.readout, p.weight_dtype,
                             /*settled=*/nullptr, keys, /*logits=*/nullptr},
                            limits, stream));
  return device::launch(kernels::read_keys_kernel, by_row, stream, all);
}

Status refined_logits(const RefinedLogitsParams& p, const DeviceLimits& limits, void* stream) {
  if (p.R == 0) return Status::kOk;
  return launch_readout({1, p.R, p.V, p.r, p.z, p.base_logits, p.readout, p.weight_dtype,
                         /*settled=*/nullptr, /*keys=*/nullptr, p.out},
                        limits, stream);
}

}  // namespace xpress::cuda
