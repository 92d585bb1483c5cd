// What a launcher must know of the GPU to choose tiles and grids. The choice is a pure function of
// the sizes and of this, so that it can be tested without a GPU.
#pragma once

#include <cstdint>

#include "xpress/status.h"

namespace xpress {

struct DeviceLimits {
  int num_sms;
  int64_t shared_bytes_per_cta;  // the most dynamic shared memory that a CTA may ask for
  bool has_clusters;             // compute capability 9.0 or newer
};

// The limits of the current CUDA device.
Status device_limits(DeviceLimits* limits);

}  // namespace xpress
