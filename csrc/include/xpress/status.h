// What a launch function returns. Nothing is ever silently not launched: whatever a launcher does
// not support has a code here, which the torch layer turns into an exception.
#pragma once

namespace xpress {

enum class Status : int {
  kOk = 0,
  kInvalidArgument = 1,   // a null pointer or a negative size
  kUnsupportedShape = 2,  // a size that no kernel of this build covers
  kNoKernelImage = 3,     // the build has no code for the architecture of this GPU
  kCudaError = 4,         // any other failure that the CUDA runtime reports
};

}  // namespace xpress
