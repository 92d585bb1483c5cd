// In a build without CUDA operators: what tensors on a GPU get instead, a message that says so.
#include <stdexcept>

#include "build_info.h"
#include "operators.h"

namespace xpress::ops {
namespace {

// A function of an operator's signature that only throws.
template <class Signature>
struct Refusal;

template <class Result, class... Arguments>
struct Refusal<Result(Arguments...)> {
  static Result call(Arguments...) {
    throw std::runtime_error(std::string("CUDA operators are not in this build of xpress_ext (") +
                             no_cuda_reason() +
                             "): move the tensors to the CPU, or build it again with nvcc: "
                             "`XPRESS_CUDA=1 pip install .`");
  }
};

// The backend of whose operators nothing but the signatures is used.
struct None;

}  // namespace

int64_t cuda_workspace_bytes(int64_t, int64_t, int64_t, int64_t, int64_t, int64_t, bool) {
  return 0;
}

STABLE_TORCH_LIBRARY_IMPL(xpress, CUDA, m) {
  m.impl("project_hidden", TORCH_BOX(&Refusal<decltype(project_hidden<None>)>::call));
  m.impl("causal_mix", TORCH_BOX(&Refusal<decltype(causal_mix<None>)>::call));
  m.impl("causal_mix_backward", TORCH_BOX(&Refusal<decltype(causal_mix_backward<None>)>::call));
  m.impl("fuse_mix", TORCH_BOX(&Refusal<decltype(fuse_mix<None>)>::call));
  m.impl("refiner_mlp", TORCH_BOX(&Refusal<decltype(refiner_mlp<None>)>::call));
  m.impl("top_candidates", TORCH_BOX(&Refusal<decltype(top_candidates<None>)>::call));
  m.impl("readout_argmax", TORCH_BOX(&Refusal<decltype(readout_argmax<None>)>::call));
  m.impl("refined_logits", TORCH_BOX(&Refusal<decltype(refined_logits<None>)>::call));
  m.impl("refined_logits.out", TORCH_BOX(&Refusal<decltype(refined_logits_out<None>)>::call));
  m.impl("jacobi_refine", TORCH_BOX(&Refusal<decltype(jacobi_refine<None>)>::call));
  m.impl("jacobi_refine.out", TORCH_BOX(&Refusal<decltype(jacobi_refine_out<None>)>::call));
}

}  // namespace xpress::ops
