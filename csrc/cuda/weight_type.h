// From the weights' type, known at run time, to a launcher's template.
#pragma once

#include "xpress/dtype.h"
#include "xpress/status.h"

namespace xpress::cuda {

// Calls run with a value of the type that `dtype` names; its value means nothing.
template <class Run>
Status with_weight_type(DType dtype, const Run& run) {
  switch (dtype) {
    case DType::kBFloat16:
      return run(bf16{});
    case DType::kFloat16:
      return run(fp16{});
    default:
      return run(float{});
  }
}

}  // namespace xpress::cuda
