#include <algorithm>

#include "cuda/project_hidden_plan.h"
#include "cuda/weight_type.h"
#include "device/launch.h"
#include "kernels/project_hidden.cuh"
#include "xpress/launch.h"

namespace xpress::cuda {
namespace {

template <class T, int kRowTiles, int kColumnTiles>
Status launch_tile(const ProjectHiddenParams& p, const ProjectHiddenPlan& plan, int64_t n0,
                   int64_t blocks, const T* rows, const T* means, void* stream) {
  using Kernel = kernels::ProjectHidden<T, kRowTiles, kColumnTiles>;
  static_assert(sizeof(typename Kernel::Shared) <= kProjectSharedBytes);
  return device::launch(
      kernels::project_hidden_kernel<T, kRowTiles, kColumnTiles>,
      {project_ctas(blocks, p.r, plan), Kernel::kThreads, sizeof(typename Kernel::Shared)}, stream,
      typename Kernel::Params{blocks, p.r, static_cast<int>(p.B), static_cast<int>(p.H), plan.group,
                              rows, means, static_cast<const T*>(p.hidden_proj),
                              p.out + n0 * p.B * p.r});
}

// For `blocks` blocks from n0 on.
template <class T>
Status launch_product(const ProjectHiddenParams& p, const ProjectHiddenPlan& plan, int64_t n0,
                      int64_t blocks, const T* rows, const T* means, void* stream) {
  if constexpr (sizeof(T) == 2) {
    if (plan.row_tiles == 4) return launch_tile<T, 4, 4>(p, plan, n0, blocks, rows, means, stream);
  }
  if (plan.row_tiles == 2) return launch_tile<T, 2, 1>(p, plan, n0, blocks, rows, means, stream);
  return launch_tile<T, 1, 1>(p, plan, n0, blocks, rows, means, stream);
}

template <class T>
Status run(const ProjectHiddenParams& p, void* scratch, const DeviceLimits& limits, void* stream) {
  const ProjectHiddenPlan plan = plan_project_hidden(p.N, p.B, p.r, sizeof(T), limits);
  T* rows = static_cast<T*>(scratch);        // [round, B, H]
  T* means = rows + plan.round * p.B * p.H;  // [round, H]
  for (int64_t n0 = 0; n0 < p.N; n0 += plan.round) {
    using Round = kernels::RoundHidden<T>;
    const int64_t blocks = std::min(plan.round, p.N - n0);
    StridedRows hidden = p.hidden;
    hidden.data = p.hidden.row(n0, 0);
    XPRESS_TRY(
        device::launch(kernels::round_hidden_kernel<T>,
                       {(blocks * p.H + Round::kThreads - 1) / Round::kThreads, Round::kThreads},
                       stream, typename Round::Params{blocks, p.B, p.H, hidden, rows, means}));
    XPRESS_TRY(launch_product(p, plan, n0, blocks, rows, means, stream));
  }
  return Status::kOk;
}

}  // namespace

// The rounded slots and means of a round of blocks, in the widest weight type.
int64_t project_scratch_bytes(int64_t N, int64_t B, int64_t H) {
  return std::min(N, kProjectRound) * (B + 1) * H * static_cast<int64_t>(sizeof(float));
}

Status project_hidden(const ProjectHiddenParams& p, void* scratch, const DeviceLimits& limits,
                      void* stream) {
  if (p.N == 0) return Status::kOk;
  return with_weight_type(
      p.weight_dtype, [&](auto type) { return run<decltype(type)>(p, scratch, limits, stream); });
}

}  // namespace xpress::cuda
