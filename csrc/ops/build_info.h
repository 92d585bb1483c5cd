// Facts of this build that messages need.
#pragma once

namespace xpress::ops {

// What the CUDA half was compiled for, "8.0,9.0a"; empty without one.
const char* built_architectures();

// Why there is no CUDA half; empty with one.
const char* no_cuda_reason();

}  // namespace xpress::ops
