// The one way to start a kernel, for launchers (csrc/cuda). A kernel takes one parameter struct.
#pragma once

#include <cstdint>

#include "device/language.h"
#include "xpress/status.h"

#ifndef XPRESS_EMULATE
#include <cuda_runtime.h>
#endif

namespace xpress::device {

struct LaunchShape {
  int64_t ctas = 1;
  int threads = 32;
  int64_t shared_bytes = 0;  // dynamic shared memory of a CTA
  int cluster = 1;           // CTAs of a cluster; divides ctas
  bool cooperative = false;  // all CTAs at once, as grid_sync() needs
};

#ifdef XPRESS_EMULATE

template <class Params>
Status launch(void (*kernel)(Params), const LaunchShape& shape, void* /*stream*/,
              const Params& params) {
  if (shape.ctas < 1) return Status::kInvalidArgument;
  emulator::run_grid(
      {shape.ctas, shape.threads, shape.shared_bytes, shape.cluster, shape.cooperative},
      [&] { kernel(params); });
  return Status::kOk;
}

#else

inline Status to_status(cudaError_t error) {
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

// Enqueues `kernel` on `stream` (a cudaStream_t); nothing is waited for.
template <class Params>
Status launch(void (*kernel)(Params), const LaunchShape& shape, void* stream,
              const Params& params) {
  if (shape.ctas < 1 || shape.ctas > INT32_MAX) return Status::kInvalidArgument;
  constexpr int64_t kSharedWithoutAsking = 48 << 10;
  if (shape.shared_bytes > kSharedWithoutAsking) {
    const Status status = to_status(cudaFuncSetAttribute(
        kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(shape.shared_bytes)));
    if (status != Status::kOk) return status;
  }
  cudaLaunchAttribute attributes[2];
  unsigned count = 0;
  if (shape.cluster > 1) {
    attributes[count].id = cudaLaunchAttributeClusterDimension;
    attributes[count].val.clusterDim.x = static_cast<unsigned>(shape.cluster);
    attributes[count].val.clusterDim.y = 1;
    attributes[count].val.clusterDim.z = 1;
    ++count;
  }
  if (shape.cooperative) {
    attributes[count].id = cudaLaunchAttributeCooperative;
    attributes[count].val.cooperative = 1;
    ++count;
  }
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(static_cast<unsigned>(shape.ctas));
  config.blockDim = dim3(static_cast<unsigned>(shape.threads));
  config.dynamicSmemBytes = static_cast<size_t>(shape.shared_bytes);
  config.stream = static_cast<cudaStream_t>(stream);
  config.attrs = attributes;
  config.numAttrs = count;
  return to_status(cudaLaunchKernelEx(&config, kernel, params));
}

#endif

}  // namespace xpress::device
