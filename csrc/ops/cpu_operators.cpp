// The operators for tensors in the CPU's memory.
#include <algorithm>

#include "cpu/dispatch.h"
#include "operators.h"

namespace xpress::cpu {

// csrc/cpu's way to torch's thread pool (cpu/parallel.h).
void run_on_pool(int64_t max_threads, void (*body)(void*), void* context) {
  torch::stable::parallel_for(0, max_threads, 1, [&](int64_t, int64_t) { body(context); });
}

}  // namespace xpress::cpu

namespace xpress::ops {
namespace {

using cpu::kernels;

struct CpuBackend {
  static constexpr int64_t kWorkspaceAlignment = 64;

  explicit CpuBackend(const std::vector<Named>& tensors) {
    common_device(DeviceType::CPU, tensors);
  }

  static Tensor empty(std::initializer_list<int64_t> sizes, ScalarType dtype) {
    return torch::stable::empty({sizes.begin(), sizes.size()}, dtype);
  }
  static bool checks_ids() { return true; }
  static const Tensor& on_host(const Tensor& tensor) { return tensor; }

  static int64_t project_scratch_bytes(int64_t N, int64_t B, int64_t H) {
    return cpu::project_scratch_bytes(N, B, H);
  }
  static int64_t mlp_scratch_bytes(int64_t, int64_t r, int64_t m) {
    return cpu::mlp_scratch_bytes(r, m);
  }
  static int64_t readout_scratch_bytes(int64_t, int64_t r) { return cpu::readout_scratch_bytes(r); }
  static int64_t refined_scratch_bytes(int64_t r) { return cpu::readout_scratch_bytes(r); }
  static int64_t jacobi_workspace_bytes(int64_t N, int64_t B, int64_t H, int64_t r, int64_t m,
                                        int64_t top_c, bool exact) {
    return cpu::jacobi_workspace_bytes(N, B, H, r, m, top_c, exact);
  }

  static void project_hidden(const ProjectHiddenParams& p, void* scratch) {
    kernels().project_hidden(p, scratch);
  }
  static void causal_mix(const CausalMixParams& p) { kernels().causal_mix(p); }
  static void causal_mix_backward(const CausalMixBackwardParams& p) {
    kernels().causal_mix_backward(p);
  }
  static void fuse_mix(const FuseMixParams& p) { kernels().fuse_mix(p); }
  static void refiner_mlp(const RefinerMlpParams& p, void* scratch) {
    kernels().refiner_mlp(p, scratch);
  }
  static void top_candidates(const TopCandidatesParams& p) { kernels().top_candidates(p); }
  static void readout_argmax(const ReadoutArgmaxParams& p, void* scratch) {
    kernels().readout_argmax(p, scratch);
  }
  static void refined_logits(const RefinedLogitsParams& p, void* scratch) {
    kernels().refined_logits(p, scratch);
  }
  static void jacobi_refine(const JacobiRefineParams& p) { kernels().jacobi_refine(p); }
};

}  // namespace

// Bytes of jacobi_refine's workspace on a device; without one, what does on any device.
int64_t jacobi_workspace(int64_t N, int64_t B, int64_t H, int64_t r, int64_t m, int64_t top_c,
                         bool exact, const std::optional<torch::stable::Device> device) {
  check_blocks(N, "the call");
  check_block(B, "the call");
  check_rank(r, "the call");
  check_multiple_of_32(H, "H", "the call");
  check_multiple_of_32(m, "m", "the call");
  if (top_c < 0 || top_c > kMaxCandidates) {
    fail_value("top_c is ", top_c, "; expected 0 <= top_c <= ", kMaxCandidates);
  }
  if (exact && top_c == 0) fail_value("exact is True with top_c = 0; exact needs top_c >= 1");
  const int64_t on_cpu = cpu::jacobi_workspace_bytes(N, B, H, r, m, top_c, exact);
  const int64_t on_cuda = cuda_workspace_bytes(N, B, H, r, m, top_c, exact);
  if (!device.has_value()) return std::max(on_cpu, on_cuda);
  if (device->type() == DeviceType::CPU) return on_cpu;
  if (device->type() == DeviceType::CUDA) return on_cuda;
  fail_value("device is neither the CPU nor a CUDA device; there are operators for those only");
}

STABLE_TORCH_LIBRARY_IMPL(xpress, CPU, m) { register_operators<CpuBackend>(m); }

STABLE_TORCH_LIBRARY_IMPL(xpress, CompositeExplicitAutograd, m) {
  m.impl("jacobi_workspace", TORCH_BOX(&jacobi_workspace));
}

}  // namespace xpress::ops
