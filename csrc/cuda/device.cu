// What the launchers and the torch layer ask of the present GPU. The only file here that calls the
// CUDA runtime itself; the emulator does without it.

#include <cuda_runtime.h>

#include "device/launch.h"
#include "xpress/device.h"
#include "xpress/device_limits.h"

namespace xpress {
namespace {

struct ProbeParams {
  int* arch;  // [1]
};

// The smallest kernel of the library. It answers the one question that the host cannot: is there
// code in this build that the present GPU runs, and which architecture was it compiled for?
XPRESS_KERNEL(1) device_probe_kernel(ProbeParams p) {
#ifdef __CUDA_ARCH__
  *p.arch = __CUDA_ARCH__;
#endif
}

Status attribute(cudaDeviceAttr name, int* value) {
  int device = 0;
  const Status status = device::to_status(cudaGetDevice(&device));
  if (status != Status::kOk) return status;
  return device::to_status(cudaDeviceGetAttribute(value, name, device));
}

}  // namespace

Status device_limits(DeviceLimits* limits) {
  int num_sms = 0, shared_bytes = 0, major = 0;
  for (const Status status : {attribute(cudaDevAttrMultiProcessorCount, &num_sms),
                              attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin, &shared_bytes),
                              attribute(cudaDevAttrComputeCapabilityMajor, &major)}) {
    if (status != Status::kOk) return status;
  }
  *limits = {num_sms, shared_bytes, major >= 9};
  return Status::kOk;
}

Status select_device(int device) { return device::to_status(cudaSetDevice(device)); }

Status synchronize(void* stream) {
  return device::to_status(cudaStreamSynchronize(static_cast<cudaStream_t>(stream)));
}

const char* last_cuda_error() { return cudaGetErrorString(cudaGetLastError()); }

int compute_capability() {
  int major = 0, minor = 0;
  if (attribute(cudaDevAttrComputeCapabilityMajor, &major) != Status::kOk) return 0;
  if (attribute(cudaDevAttrComputeCapabilityMinor, &minor) != Status::kOk) return 0;
  return 10 * major + minor;
}

Status launch_device_probe(int* arch, void* stream) {
  if (arch == nullptr) return Status::kInvalidArgument;
  return device::launch(device_probe_kernel, {1, 1}, stream, ProbeParams{arch});
}

}  // namespace xpress
