// The present GPU, for the torch layer: what the CUDA runtime says of it and of failures, and the
// device probe: which code of this build does it run?
#pragma once

#include "xpress/status.h"

namespace xpress {

// Makes a device the current one of this library's own copy of the CUDA runtime.
Status select_device(int device);

// Waits for all work on `stream` (a cudaStream_t); errors of kernels that ran on it come up here.
Status synchronize(void* stream);

// What the CUDA runtime says of the last failure on this thread, which is thereby forgotten.
const char* last_cuda_error();

// Compute capability of the current device as 10 * major + minor; 0 where it cannot be had.
int compute_capability();

// Writes the architecture that the running code was compiled for, as __CUDA_ARCH__ counts it
// (900 for compute capability 9.0), to `arch`, in the order of `stream` (a cudaStream_t).
// Returns kNoKernelImage where the build holds no code that runs on the current GPU.
Status launch_device_probe(int* arch,  // [1], device memory
                           void* stream);

}  // namespace xpress
