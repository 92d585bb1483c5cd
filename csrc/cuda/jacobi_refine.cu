#include "cuda/jacobi_refine_plan.h"
#include "cuda/readout_internal.h"
#include "cuda/top_candidates_internal.h"
#include "cuda/weight_type.h"
#include "device/launch.h"
#include "kernels/jacobi_candidates.cuh"
#include "kernels/jacobi_latent.cuh"
#include "kernels/jacobi_state.cuh"
#include "xpress/launch.h"

namespace xpress::cuda {
namespace {

// The walk of one draft, as launches on one stream. Nothing is waited for: how many passes a block
// really needs, its kernels find out.
template <class T>
class Walk {
 public:
  Walk(const JacobiRefineParams& p, const DeviceLimits& limits, void* stream)
      : p_(p),
        limits_(limits),
        stream_(stream),
        D_(p.B - 1),
        w_(p.workspace, {p.N, p.B, p.H, p.r, p.m, p.top_c, p.exact},
           project_scratch_bytes(p.N, p.B, p.H)),
        plan_(plan_jacobi(p.B, p.r, p.m, sizeof(T), kFixedBytes, limits)) {}

  Status run() {
    if (plan_.chunk == 0) return Status::kUnsupportedShape;
    const int64_t cap = std::min(p_.num_passes, D_);
    XPRESS_TRY(context());
    XPRESS_TRY(start());
    if (p_.exact) {
      for (int64_t round = 0; round < D_; ++round) {
        XPRESS_TRY(candidate_passes(D_));
        XPRESS_TRY(full_readout());
        XPRESS_TRY(prove());
      }
    } else if (p_.top_c > 0) {
      XPRESS_TRY(candidate_passes(cap));
    } else {
      for (int64_t pass = 0; pass < cap; ++pass) {
        XPRESS_TRY(latent(/*commits=*/pass > 0));
        XPRESS_TRY(full_readout());
      }
    }
    return finish(/*commits=*/p_.top_c == 0);
  }

 private:
  using Latent = kernels::JacobiLatent<T>;
  using Candidates = kernels::JacobiCandidates<T>;
  static constexpr int64_t kFixedBytes = Latent::kSharedBytes + sizeof(typename Candidates::Shared);

  Status context() {
    XPRESS_TRY(
        project_hidden({p_.N, p_.B, p_.H, p_.r, p_.hidden, p_.hidden_proj, p_.weight_dtype, w_.c},
                       w_.project_scratch, limits_, stream_));
    return causal_mix({p_.N, p_.B, p_.r, false, w_.c, p_.mixer, w_.context}, limits_, stream_);
  }

  Status start() {
    const bool seeded = p_.seed_tokens.data != nullptr;
    if (p_.top_c > 0 || !seeded) {
      XPRESS_TRY(launch_top_candidates({p_.N, D_, p_.V, std::max<int64_t>(p_.top_c, 1), w_.capacity,
                                        p_.base_logits, w_.candidate_ids, w_.candidate_logits},
                                       limits_, stream_));
    }
    return device::launch(kernels::jacobi_start_kernel, {p_.N, 32}, stream_,
                          kernels::JacobiStart::Params{state(), p_.anchor, p_.predecessor,
                                                       p_.seed_tokens, static_cast<int>(p_.top_c)});
  }

  Status latent(bool commits) {
    return device::launch(kernels::jacobi_latent_kernel<T>, cluster_shape(), stream_,
                          typename Latent::Params{state(), stage(), commits});
  }

  Status candidate_passes(int64_t cap) {
    return device::launch(
        kernels::jacobi_candidates_kernel<T>, cluster_shape(), stream_,
        typename Candidates::Params{state(), stage(), static_cast<const T*>(p_.readout),
                                    static_cast<int>(cap), p_.exact});
  }

  Status full_readout() {
    const T* first_slot = static_cast<const T*>(w_.z) + p_.r;
    return launch_readout({p_.N,
                           D_,
                           p_.V,
                           p_.r,
                           {first_slot, p_.weight_dtype, p_.B * p_.r, p_.r},
                           p_.base_logits,
                           p_.readout,
                           p_.weight_dtype,
                           w_.settled,
                           w_.keys,
                           /*logits=*/nullptr},
                          limits_, stream_);
  }

  Status prove() {
    return device::launch(kernels::jacobi_prove_kernel, {p_.N, 32}, stream_,
                          kernels::JacobiProve::Params{state(), p_.base_logits});
  }

  Status finish(bool commits) {
    const int64_t shared_bytes = (p_.B + 1) * static_cast<int64_t>(sizeof(int64_t));
    return device::launch(kernels::jacobi_finish_kernel, {p_.N, 32, shared_bytes}, stream_,
                          kernels::JacobiFinish::Params{state(), commits, p_.tokens});
  }

  kernels::JacobiState state() const {
    return {p_.N,
            static_cast<int>(p_.B),
            p_.V_t,
            p_.d2t,
            w_.ids,
            w_.settled,
            p_.passes,
            p_.full_readouts,
            w_.keys,
            static_cast<int>(w_.capacity),
            w_.candidate_ids,
            w_.candidate_logits,
            w_.candidate_count};
  }

  typename Latent::Stage stage() const {
    return {static_cast<int>(p_.B),
            static_cast<int>(p_.r),
            static_cast<int>(p_.m),
            plan_.chunk,
            w_.context,
            static_cast<const T*>(p_.token_table),
            p_.mixer,
            static_cast<const T*>(p_.mlp_gate_up),
            static_cast<const T*>(p_.mlp_down),
            w_.c,
            static_cast<T*>(w_.z)};
  }

  device::LaunchShape cluster_shape() const {
    return {p_.N * plan_.cluster, Latent::kThreads, plan_.shared_bytes, plan_.cluster};
  }

  const JacobiRefineParams& p_;
  const DeviceLimits& limits_;
  void* const stream_;
  const int64_t D_;
  const JacobiWorkspace w_;
  const JacobiPlan plan_;
};

}  // namespace

int64_t jacobi_workspace_bytes(int64_t N, int64_t B, int64_t H, int64_t r, int64_t m, int64_t top_c,
                               bool exact) {
  return JacobiWorkspace(nullptr, {N, B, H, r, m, top_c, exact}, project_scratch_bytes(N, B, H))
      .bytes;
}

Status jacobi_refine(const JacobiRefineParams& p, const DeviceLimits& limits, void* stream) {
  if (p.N == 0) return Status::kOk;
  return with_weight_type(p.weight_dtype,
                          [&](auto type) { return Walk<decltype(type)>(p, limits, stream).run(); });
}

}  // namespace xpress::cuda
