// The device probe: which code of this build does the present GPU run?
#pragma once

#include "xpress/status.h"

namespace xpress {

// Writes the architecture that the running code was compiled for, as __CUDA_ARCH__ counts it
// (900 for compute capability 9.0), to `arch`, in the order of `stream` (a cudaStream_t).
// Returns kNoKernelImage where the build holds no code that runs on the current GPU.
Status launch_device_probe(int* arch,  // [1], device memory
                           void* stream);

}  // namespace xpress
