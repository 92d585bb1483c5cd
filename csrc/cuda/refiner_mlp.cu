#include <algorithm>

#include "cuda/refiner_mlp_plan.h"
#include "cuda/weight_type.h"
#include "device/launch.h"
#include "kernels/refiner_mlp.cuh"
#include "xpress/launch.h"

namespace xpress::cuda {
namespace {

template <class T>
Status run(const RefinerMlpParams& p, void* scratch, const DeviceLimits& limits, void* stream) {
  using Kernel = kernels::RefinerMlp<T>;
  const RefinerMlpPlan plan = plan_refiner_mlp(p.rows, p.r, p.m, sizeof(T), limits);
  if (std::max(plan.hidden.shared_bytes, plan.down.shared_bytes) > limits.shared_bytes_per_cta) {
    return Status::kUnsupportedShape;
  }
  T* hidden = static_cast<T*>(scratch);
  const auto tiling = [](const MlpProductPlan& product) {
    return typename Kernel::Tiling{product.row_tiles, product.column_tiles, product.chunk};
  };
  XPRESS_TRY(device::launch(
      kernels::mlp_hidden_kernel<T>, {plan.hidden.ctas, Kernel::kThreads, plan.hidden.shared_bytes},
      stream,
      typename Kernel::HiddenParams{tiling(plan.hidden), p.rows, p.m, static_cast<int>(p.r), p.c,
                                    static_cast<const T*>(p.mlp_gate_up), hidden}));
  return device::launch(kernels::mlp_down_kernel<T>,
                        {plan.down.ctas, Kernel::kThreads, plan.down.shared_bytes}, stream,
                        typename Kernel::DownParams{
                            tiling(plan.down), p.rows, p.r, static_cast<int>(p.m), p.c, hidden,
                            static_cast<const T*>(p.mlp_down), static_cast<T*>(p.out)});
}

}  // namespace

// The hidden layer, in the widest weight type.
int64_t mlp_scratch_bytes(int64_t rows, int64_t m) {
  return rows * m * static_cast<int64_t>(sizeof(float));
}

Status refiner_mlp(const RefinerMlpParams& p, void* scratch, const DeviceLimits& limits,
                   void* stream) {
  if (p.rows == 0) return Status::kOk;
  return with_weight_type(
      p.weight_dtype, [&](auto type) { return run<decltype(type)>(p, scratch, limits, stream); });
}

}  // namespace xpress::cuda
