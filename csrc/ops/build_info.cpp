// What this build of the library is, for xpress_ext.build_info(): facts fixed when it was compiled
// and the instruction set that the CPU operators chose.
#include "build_info.h"

#include <torch/csrc/stable/library.h>

#include <string>

#include "cpu/dispatch.h"

namespace xpress::ops {

const char* built_architectures() { return XPRESS_CUDA_ARCHS; }
const char* no_cuda_reason() { return XPRESS_NO_CUDA_REASON; }

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
  add("cpu_isa", cpu::isa_name());
  add("cuda", XPRESS_WITH_CUDA ? "1" : "0");
  add("cuda_archs", built_architectures());
  add("nvcc", XPRESS_NVCC_VERSION);
  add("no_cuda_reason", no_cuda_reason());
  return text;
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(xpress, m) {
  m.def("_build_info() -> str");
  m.def("_device_probe(Tensor(a!) arch) -> int");
}

STABLE_TORCH_LIBRARY_IMPL(xpress, CompositeExplicitAutograd, m) {
  m.impl("_build_info", TORCH_BOX(&build_info));
}

}  // namespace xpress::ops
