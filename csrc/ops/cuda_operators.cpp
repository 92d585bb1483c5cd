// The operators for tensors on a GPU: the current stream of their device, its limits, and a Status
// that becomes an exception. Nothing waits for the GPU, but for XPRESS_CHECK=1 (below).
#include <torch/csrc/stable/accelerator.h>

#include <array>
#include <cstdlib>
#include <cstring>
#include <mutex>
#include <stdexcept>
#include <utility>

#include "build_info.h"
#include "operators.h"
#include "xpress/device.h"
#include "xpress/launch.h"

// Exported by a CUDA build of torch only; weak, so that the library loads under a CPU build.
extern "C" __attribute__((weak)) AOTITorchError
aoti_torch_get_current_cuda_stream(int32_t device_index, void** ret_stream);

namespace xpress::ops {
namespace {

using Sizes = std::initializer_list<std::pair<const char*, int64_t>>;

// RuntimeError in Python.
template <class... Parts>
[[noreturn]] void fail(const Parts&... parts) {
  std::ostringstream message;
  (message << ... << parts);
  throw std::runtime_error(message.str());
}

// "9.0" for 90.
std::string capability_text(int capability) {
  return std::to_string(capability / 10) + "." + std::to_string(capability % 10);
}

// A Status as an exception; `name` is the operator's.
void require_ok(Status status, const char* name, Sizes sizes) {
  if (status == Status::kOk) return;
  // Asked in any case: told here, the error must not come up in somebody else's call.
  const std::string error = last_cuda_error();
  const std::string capability = capability_text(compute_capability());
  std::ostringstream call;
  call << name << "(";
  const char* separator = "";
  for (const auto& [letter, size] : sizes) {
    call << separator << letter << " = " << size;
    separator = ", ";
  }
  call << ")";
  switch (status) {
    case Status::kNoKernelImage:
      fail(name, ": the CUDA operators of this build are for compute capability ",
           built_architectures(), ", but this GPU is ", capability,
           "; build xpress_ext again with TORCH_CUDA_ARCH_LIST=", capability);
    case Status::kCudaError:
      fail(call.str(), ": CUDA error: ", error);
    default:
      fail_value(call.str(), ": no CUDA kernel of this build takes these sizes on a GPU of compute",
                 " capability ", capability, "; use smaller ones, or move the tensors to the CPU");
  }
}

// Asked of the runtime once per device.
DeviceLimits limits_of(int32_t device) {
  constexpr int32_t kDevices = 64;
  static std::array<DeviceLimits, kDevices> limits;
  static std::array<std::once_flag, kDevices> once;
  if (device >= kDevices) fail("cuda:", device, " is beyond the ", kDevices, " devices supported");
  std::call_once(once[device], [device] {
    require_ok(device_limits(&limits[device]), "device_limits", {{"device", device}});
  });
  return limits[device];
}

// XPRESS_CHECK=1, looked up at every call: ids are copied to the CPU and checked before a launch,
// and the stream is waited for after it, so that its errors come up in the call that caused them.
bool check_is_on() {
  const char* value = std::getenv("XPRESS_CHECK");
  return value != nullptr && std::strcmp(value, "1") == 0;
}

void* current_stream(int32_t device) {
  void* stream = nullptr;
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_current_cuda_stream(device, &stream));
  return stream;
}

class CudaBackend {
 public:
  static constexpr int64_t kWorkspaceAlignment = 128;

  explicit CudaBackend(const std::vector<Named>& tensors)
      : device_(common_device(DeviceType::CUDA, tensors)), guard_(device_), check_(check_is_on()) {
    // The guard's is torch's copy of the CUDA runtime, which need not be this library's.
    require_ok(select_device(device_), "select_device", {{"device", device_}});
  }

  Tensor empty(std::initializer_list<int64_t> sizes, ScalarType dtype) const {
    return torch::stable::empty({sizes.begin(), sizes.size()}, dtype, std::nullopt,
                                torch::stable::Device(DeviceType::CUDA, device_));
  }
  bool checks_ids() const { return check_; }
  static Tensor on_host(const Tensor& tensor) {
    return torch::stable::to(tensor, torch::stable::Device(DeviceType::CPU));
  }

  static int64_t project_scratch_bytes(int64_t N, int64_t B, int64_t H) {
    return cuda::project_scratch_bytes(N, B, H);
  }
  static int64_t mlp_scratch_bytes(int64_t rows, int64_t, int64_t m) {
    return cuda::mlp_scratch_bytes(rows, m);
  }
  static int64_t readout_scratch_bytes(int64_t rows, int64_t) {
    return cuda::readout_scratch_bytes(rows);
  }
  static int64_t refined_scratch_bytes(int64_t) { return 0; }
  static int64_t jacobi_workspace_bytes(int64_t N, int64_t B, int64_t H, int64_t r, int64_t m,
                                        int64_t top_c, bool exact) {
    return cuda::jacobi_workspace_bytes(N, B, H, r, m, top_c, exact);
  }

  void project_hidden(const ProjectHiddenParams& p, void* scratch) const {
    run("project_hidden", {{"N", p.N}, {"B", p.B}, {"H", p.H}, {"r", p.r}}, cuda::project_hidden, p,
        scratch);
  }
  void causal_mix(const CausalMixParams& p) const {
    run("causal_mix", {{"N", p.N}, {"B", p.B}, {"r", p.r}}, cuda::causal_mix, p);
  }
  void causal_mix_backward(const CausalMixBackwardParams& p) const {
    run("causal_mix_backward", {{"N", p.N}, {"B", p.B}, {"r", p.r}}, cuda::causal_mix_backward, p);
  }
  void fuse_mix(const FuseMixParams& p) const {
    run("fuse_mix", {{"N", p.N}, {"B", p.B}, {"r", p.r}, {"V_t", p.V_t}}, cuda::fuse_mix, p);
  }
  void refiner_mlp(const RefinerMlpParams& p, void* scratch) const {
    run("refiner_mlp", {{"rows", p.rows}, {"r", p.r}, {"m", p.m}}, cuda::refiner_mlp, p, scratch);
  }
  void top_candidates(const TopCandidatesParams& p) const {
    run("top_candidates", {{"N", p.N}, {"D", p.D}, {"V", p.V}, {"C", p.C}}, cuda::top_candidates,
        p);
  }
  void readout_argmax(const ReadoutArgmaxParams& p, void* scratch) const {
    run("readout_argmax", {{"N", p.N}, {"D", p.D}, {"V", p.V}, {"r", p.r}, {"C", p.C}},
        cuda::readout_argmax, p, scratch);
  }
  void refined_logits(const RefinedLogitsParams& p, void*) const {
    run("refined_logits", {{"R", p.R}, {"V", p.V}, {"r", p.r}}, cuda::refined_logits, p);
  }
  void jacobi_refine(const JacobiRefineParams& p) const {
    run("jacobi_refine",
        {{"N", p.N},
         {"B", p.B},
         {"V", p.V},
         {"H", p.H},
         {"r", p.r},
         {"m", p.m},
         {"top_c", p.top_c}},
        cuda::jacobi_refine, p);
  }

 private:
  // `scratch` is nothing, or one pointer.
  template <class Launch, class Params, class... Scratch>
  void run(const char* name, Sizes sizes, Launch launch, const Params& p,
           Scratch... scratch) const {
    void* stream = current_stream(device_);
    require_ok(launch(p, scratch..., limits_of(device_), stream), name, sizes);
    if (check_) require_ok(synchronize(stream), name, sizes);
  }

  int32_t device_;
  torch::stable::accelerator::DeviceGuard guard_;
  bool check_;
};

// arch: int32 [1] on the GPU. Returns an xpress::Status.
int64_t device_probe(const Tensor arch) {
  const CudaBackend backend({{&arch, "arch"}});
  check_shape(arch, "arch", {1}, "[1]");
  check_dtype(arch, "arch", ScalarType::Int);
  return static_cast<int64_t>(
      launch_device_probe(data<int>(arch), current_stream(arch.get_device_index())));
}

}  // namespace

int64_t cuda_workspace_bytes(int64_t N, int64_t B, int64_t H, int64_t r, int64_t m, int64_t top_c,
                             bool exact) {
  return cuda::jacobi_workspace_bytes(N, B, H, r, m, top_c, exact);
}

STABLE_TORCH_LIBRARY_IMPL(xpress, CUDA, m) {
  register_operators<CudaBackend>(m);
  m.impl("_device_probe", TORCH_BOX(&device_probe));
}

}  // namespace xpress::ops
