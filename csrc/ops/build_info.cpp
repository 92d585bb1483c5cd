// What this build of the library is, for xpress_ext.build_info(): facts fixed when it was compiled,
// the instruction set that the CPU operators chose, and a probe of the present GPU.

#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/tensor.h>

#include <string>

#include "cpu/dispatch.h"
#include "xpress/device_probe.h"

#if XPRESS_WITH_CUDA
// Exported by a CUDA build of torch only; weak, so that the library loads under a CPU build.
extern "C" __attribute__((weak)) AOTITorchError
aoti_torch_get_current_cuda_stream(int32_t device_index, void** ret_stream);
#endif

namespace {

// One "name=value" a line.
std::string build_info() {
  std::string text;
  const auto add = [&text](const char* name, const std::string& value) {
    text.append(name).append("=").append(value).append("\n");
  };
  add("version", XPRESS_VERSION);
  add("build_torch", XPRESS_BUILD_TORCH);
  add("compiler", XPRESS_CXX_COMPILER);
  add("cpu_isas", XPRESS_CPU_ISAS);
  add("cpu_isa", xpress::cpu::isa_name());
  add("cuda", XPRESS_WITH_CUDA ? "1" : "0");
  add("cuda_archs", XPRESS_CUDA_ARCHS);
  add("nvcc", XPRESS_NVCC_VERSION);
  add("no_cuda_reason", XPRESS_NO_CUDA_REASON);
  return text;
}

#if XPRESS_WITH_CUDA
// arch: int32 [1] on the GPU. Returns an xpress::Status.
int64_t device_probe(torch::stable::Tensor arch) {
  STD_TORCH_CHECK(arch.numel() == 1 && arch.element_size() == 4,
                  "_device_probe: arch must be one int32 element");
  const auto device = arch.get_device_index();
  const torch::stable::accelerator::DeviceGuard guard(device);
  void* stream = nullptr;
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_current_cuda_stream(device, &stream));
  return static_cast<int64_t>(
      xpress::launch_device_probe(static_cast<int*>(arch.data_ptr()), stream));
}
#endif

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(xpress, m) {
  m.def("_build_info() -> str");
  m.def("_device_probe(Tensor(a!) arch) -> int");
}

STABLE_TORCH_LIBRARY_IMPL(xpress, CompositeExplicitAutograd, m) {
  m.impl("_build_info", TORCH_BOX(&build_info));
}

#if XPRESS_WITH_CUDA
STABLE_TORCH_LIBRARY_IMPL(xpress, CUDA, m) { m.impl("_device_probe", TORCH_BOX(&device_probe)); }
#endif
