// Element types of the operators' tensors, free of torch.
#pragma once

#include <cstddef>
#include <cstdint>

// Functions of these headers that kernels call too.
#ifdef __CUDACC__
#define XPRESS_HOST_DEVICE __host__ __device__
#else
#define XPRESS_HOST_DEVICE
#endif

namespace xpress {

enum class DType : int32_t { kFloat32, kBFloat16, kFloat16 };

// Storage of one 16-bit element. Arithmetic is always done in fp32.
struct bf16 {
  uint16_t bits;
};
struct fp16 {
  uint16_t bits;
};

XPRESS_HOST_DEVICE inline int64_t element_size(DType dtype) {
  return dtype == DType::kFloat32 ? 4 : 2;
}

}  // namespace xpress
