// The smallest kernel of the library. It answers the one question that the host cannot: is there
// code in this build that the present GPU runs, and which architecture was it compiled for?

#include <cuda_runtime.h>

#include "xpress/device_probe.h"

namespace xpress {
namespace {

__global__ void device_probe_kernel(int* arch) {
#ifdef __CUDA_ARCH__
  *arch = __CUDA_ARCH__;
#endif
}

Status to_status(cudaError_t error) {
  switch (error) {
    case cudaSuccess:
      return Status::kOk;
    case cudaErrorNoKernelImageForDevice:
    case cudaErrorInvalidDeviceFunction:
      return Status::kNoKernelImage;
    default:
      return Status::kCudaError;
  }
}

}  // namespace

Status launch_device_probe(int* arch, void* stream) {
  if (arch == nullptr) return Status::kInvalidArgument;
  device_probe_kernel<<<1, 1, 0, static_cast<cudaStream_t>(stream)>>>(arch);
  return to_status(cudaGetLastError());
}

}  // namespace xpress
