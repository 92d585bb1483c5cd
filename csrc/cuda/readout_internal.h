// The full readout as other launchers use it: no outputs of its own, only keys.
#pragma once

#include "xpress/device_limits.h"
#include "xpress/params.h"
#include "xpress/status.h"

namespace xpress::cuda {

struct ReadoutLaunch {
  int64_t N, D, V, r;
  StridedRows z;            // [N, D, r] weight type
  StridedRows base_logits;  // [N, D, V]
  const void* readout;      // [V, r] weight type
  DType weight_dtype;
  const int32_t* settled;  // [N]: rows d < settled[n] are left out; null: none is
  uint64_t* keys;          // [N * D]: raised to the argmax key of each row that is not left out
  float* logits;           // [N * D, V]: written in place of keys where it is not null
};

Status launch_readout(const ReadoutLaunch& p, const DeviceLimits& limits, void* stream);

}  // namespace xpress::cuda
