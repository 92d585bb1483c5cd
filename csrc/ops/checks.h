// Argument checks of the torch layer. Each failure names the argument, its value, what was expected
// and, where it is not obvious, what to do.
#pragma once

#include <torch/csrc/stable/tensor.h>

#include <cstdint>
#include <initializer_list>
#include <optional>
#include <sstream>
#include <stdexcept>
#include <string>
#include <vector>

#include "xpress/params.h"

namespace xpress::ops {

using torch::headeronly::DeviceType;
using torch::headeronly::ScalarType;
using torch::stable::Tensor;

// ValueError in Python.
template <class... Parts>
[[noreturn]] void fail_value(const Parts&... parts) {
  std::ostringstream message;
  (message << ... << parts);
  throw std::invalid_argument(message.str());
}

// IndexError in Python.
template <class... Parts>
[[noreturn]] void fail_index(const Parts&... parts) {
  std::ostringstream message;
  (message << ... << parts);
  throw std::out_of_range(message.str());
}

std::string dtype_name(ScalarType dtype);
std::string shape_text(const Tensor& tensor);

// A tensor (null: none was given) and the name of its argument.
struct Named {
  const Tensor* tensor;
  const char* name;
};

// The index of the device that all the tensors are on; fails unless they are given, on a device of
// that type, and on one.
int32_t common_device(DeviceType type, const std::vector<Named>& tensors);

// Fails unless the tensor has `dim` dimensions; `letters` spells the expected shape, "[N, B, H]".
void check_dim(const Tensor& tensor, const char* name, int64_t dim, const char* letters);

// One expected size per dimension.
void check_shape(const Tensor& tensor, const char* name, std::initializer_list<int64_t> expected,
                 const char* letters);

void check_contiguous(const Tensor& tensor, const char* name);
void check_inner_stride(const Tensor& tensor, const char* name);
void check_dtype(const Tensor& tensor, const char* name, ScalarType expected);

// fp32, bf16 or fp16.
DType float_dtype(const Tensor& tensor, const char* name);

// A contiguous, 16-byte aligned weight of the given type.
const void* weight(const Tensor& tensor, const char* name, DType expected, const char* type_of);

// A contiguous fp32 tensor.
const float* fp32(const Tensor& tensor, const char* name);

// [n0, n1, width] (or [n1, width], as one block) with a contiguous innermost dimension.
StridedRows strided_rows(const Tensor& tensor, const char* name);

// int64 ids [n0] or [n0, n1], unread.
Ids ids_of(const Tensor& tensor, const char* name);

// Fails unless all int64 ids, in the CPU's memory, are in [0, limit); `table` names what limit
// counts. Up to three dimensions, of any strides.
void check_ids(const Tensor& tensor, const char* name, int64_t limit, const char* table);

// The same for contiguous offsets: v + offsets[v] is in [0, limit).
void check_offsets(const Tensor& tensor, const char* name, int64_t limit, const char* table);

// Fails where an output shares memory with an input or with another output.
void check_apart(const std::vector<Named>& outputs, const std::vector<Named>& inputs);

// Limits of the method's sizes.
void check_blocks(int64_t N, const char* name);
void check_block(int64_t B, const char* name);
void check_rank(int64_t r, const char* name);
void check_multiple_of_32(int64_t size, const char* what, const char* name);
void check_vocabulary(int64_t V, const char* name);

}  // namespace xpress::ops
