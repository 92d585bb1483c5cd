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

// Returns from the calling function where a step of several did not succeed.
#define XPRESS_TRY(step)                                                \
  do {                                                                  \
    const ::xpress::Status status_of_step = (step);                     \
    if (status_of_step != ::xpress::Status::kOk) return status_of_step; \
  } while (false)

}  // namespace xpress
