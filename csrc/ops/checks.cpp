#include "checks.h"

#include "xpress/limits.h"

namespace xpress::ops {

std::string dtype_name(ScalarType dtype) {
  switch (dtype) {
    case ScalarType::Float:
      return "float32";
    case ScalarType::BFloat16:
      return "bfloat16";
    case ScalarType::Half:
      return "float16";
    case ScalarType::Double:
      return "float64";
    case ScalarType::Long:
      return "int64";
    case ScalarType::Int:
      return "int32";
    case ScalarType::Short:
      return "int16";
    case ScalarType::Char:
      return "int8";
    case ScalarType::Byte:
      return "uint8";
    case ScalarType::Bool:
      return "bool";
    case ScalarType::ComplexHalf:
      return "complex32";
    case ScalarType::ComplexFloat:
      return "complex64";
    case ScalarType::ComplexDouble:
      return "complex128";
    case ScalarType::Float8_e5m2:
      return "float8_e5m2";
    case ScalarType::Float8_e4m3fn:
      return "float8_e4m3fn";
    default:
      return "dtype number " + std::to_string(static_cast<int>(dtype));
  }
}

std::string shape_text(const Tensor& tensor) {
  std::ostringstream text;
  text << "[";
  for (int64_t i = 0; i < tensor.dim(); ++i) text << (i ? ", " : "") << tensor.size(i);
  text << "]";
  return text.str();
}

namespace {

// None reaches an operator as an undefined tensor.
void check_given(const Tensor& tensor, const char* name) {
  if (!tensor.defined()) fail_value(name, " is None; expected a tensor");
}

std::string device_name(const Tensor& tensor) {
  if (tensor.is_cpu()) return "the CPU";
  if (tensor.is_cuda()) return "cuda:" + std::to_string(tensor.get_device_index());
  return "another device";
}

bool is_on(const Tensor& tensor, DeviceType type) {
  return type == DeviceType::CPU ? tensor.is_cpu() : tensor.is_cuda();
}

}  // namespace

int32_t common_device(DeviceType type, const std::vector<Named>& tensors) {
  const Named* first = nullptr;
  for (const Named& named : tensors) {
    if (named.tensor == nullptr) continue;
    check_given(*named.tensor, named.name);
    if (first == nullptr && is_on(*named.tensor, type)) first = &named;
  }
  const char* kind = type == DeviceType::CPU ? "the CPU" : "a CUDA device";
  for (const auto& [tensor, name] : tensors) {
    if (tensor == nullptr) continue;
    if (first == nullptr) fail_value(name, " is on ", device_name(*tensor), "; expected ", kind);
    if (is_on(*tensor, type) && tensor->get_device_index() == first->tensor->get_device_index()) {
      continue;
    }
    fail_value(name, " is on ", device_name(*tensor), "; expected ", device_name(*first->tensor),
               ", where ", first->name, " is; move all to one device");
  }
  return first == nullptr ? 0 : first->tensor->get_device_index();
}

void check_dim(const Tensor& tensor, const char* name, int64_t dim, const char* letters) {
  check_given(tensor, name);
  if (tensor.dim() != dim) {
    fail_value(name, " has shape ", shape_text(tensor), "; expected ", dim, " dimensions ",
               letters);
  }
}

void check_shape(const Tensor& tensor, const char* name, std::initializer_list<int64_t> expected,
                 const char* letters) {
  check_dim(tensor, name, static_cast<int64_t>(expected.size()), letters);
  int64_t i = 0;
  bool equal = true;
  std::ostringstream wanted;
  for (const int64_t size : expected) {
    wanted << (i ? ", " : "") << size;
    equal = equal && tensor.size(i) == size;
    ++i;
  }
  if (!equal) {
    fail_value(name, " has shape ", shape_text(tensor), "; expected ", letters, " = [",
               wanted.str(), "]");
  }
}

void check_contiguous(const Tensor& tensor, const char* name) {
  if (!tensor.is_contiguous()) {
    fail_value(name, " of shape ", shape_text(tensor), " is not contiguous; pass ", name,
               ".contiguous()");
  }
}

void check_inner_stride(const Tensor& tensor, const char* name) {
  const int64_t last = tensor.dim() - 1;
  if (tensor.size(last) > 1 && tensor.stride(last) != 1) {
    fail_value(name, " has innermost stride ", tensor.stride(last),
               "; expected 1 (outer strides are free); pass ", name, ".contiguous()");
  }
}

void check_dtype(const Tensor& tensor, const char* name, ScalarType expected) {
  check_given(tensor, name);
  if (tensor.scalar_type() != expected) {
    fail_value(name, " has dtype ", dtype_name(tensor.scalar_type()), "; expected ",
               dtype_name(expected));
  }
}

DType float_dtype(const Tensor& tensor, const char* name) {
  check_given(tensor, name);
  switch (tensor.scalar_type()) {
    case ScalarType::Float:
      return DType::kFloat32;
    case ScalarType::BFloat16:
      return DType::kBFloat16;
    case ScalarType::Half:
      return DType::kFloat16;
    default:
      fail_value(name, " has dtype ", dtype_name(tensor.scalar_type()),
                 "; expected float32, bfloat16 or float16");
  }
}

namespace {
const char* name_of(DType dtype) {
  return dtype == DType::kFloat32 ? "float32" : dtype == DType::kBFloat16 ? "bfloat16" : "float16";
}
}  // namespace

const void* weight(const Tensor& tensor, const char* name, DType expected, const char* type_of) {
  if (float_dtype(tensor, name) != expected) {
    fail_value(name, " has dtype ", dtype_name(tensor.scalar_type()), "; expected ",
               name_of(expected), ", the dtype of ", type_of, " (all weights are of one dtype)");
  }
  check_contiguous(tensor, name);
  const auto address = reinterpret_cast<uintptr_t>(tensor.const_data_ptr());
  if (address % 16 != 0) {
    fail_value(name, " starts ", address % 16,
               " bytes past a 16-byte boundary; expected 16-byte alignment; pass ", name,
               ".clone()");
  }
  return tensor.const_data_ptr();
}

const float* fp32(const Tensor& tensor, const char* name) {
  check_dtype(tensor, name, ScalarType::Float);
  check_contiguous(tensor, name);
  return static_cast<const float*>(tensor.const_data_ptr());
}

StridedRows strided_rows(const Tensor& tensor, const char* name) {
  const DType dtype = float_dtype(tensor, name);
  check_inner_stride(tensor, name);
  const int64_t rows = tensor.dim() - 2;
  return {tensor.const_data_ptr(), dtype, rows > 0 ? tensor.stride(0) : 0, tensor.stride(rows)};
}

Ids ids_of(const Tensor& tensor, const char* name) {
  check_dtype(tensor, name, ScalarType::Long);
  return {static_cast<const int64_t*>(tensor.const_data_ptr()), tensor.stride(0),
          tensor.dim() == 2 ? tensor.stride(1) : 0};
}

void check_ids(const Tensor& tensor, const char* name, int64_t limit, const char* table) {
  const auto* ids = static_cast<const int64_t*>(tensor.const_data_ptr());
  // As [n0, n1, n2], with leading dimensions of 1.
  int64_t size[3] = {1, 1, 1}, stride[3] = {0, 0, 0};
  const int64_t skipped = 3 - tensor.dim();
  for (int64_t d = skipped; d < 3; ++d) {
    size[d] = tensor.size(d - skipped), stride[d] = tensor.stride(d - skipped);
  }
  for (int64_t i0 = 0; i0 < size[0]; ++i0) {
    for (int64_t i1 = 0; i1 < size[1]; ++i1) {
      for (int64_t i2 = 0; i2 < size[2]; ++i2) {
        const int64_t id = ids[i0 * stride[0] + i1 * stride[1] + i2 * stride[2]];
        if (id >= 0 && id < limit) continue;
        const int64_t position[3] = {i0, i1, i2};
        std::ostringstream where;
        for (int64_t d = skipped; d < 3; ++d) where << (d > skipped ? ", " : "[") << position[d];
        fail_index(name, where.str(), "] is ", id, "; expected 0 <= id < ", limit, ", ", table);
      }
    }
  }
}

void check_offsets(const Tensor& tensor, const char* name, int64_t limit, const char* table) {
  const auto* offsets = static_cast<const int64_t*>(tensor.const_data_ptr());
  for (int64_t v = 0; v < tensor.numel(); ++v) {
    if (offsets[v] >= -v && offsets[v] < limit - v) continue;
    fail_index(name, "[", v, "] is ", offsets[v], "; expected 0 <= v + ", name, "[v] < ", limit,
               ", ", table);
  }
}

namespace {

struct Bytes {
  uintptr_t begin, end;
};

// From the first to past the last byte that any element of the tensor can lie in.
Bytes bytes_of(const Tensor& tensor) {
  int64_t last = 0;
  for (int64_t i = 0; i < tensor.dim(); ++i) {
    if (tensor.size(i) == 0) return {0, 0};
    last += (tensor.size(i) - 1) * tensor.stride(i);
  }
  const auto begin = reinterpret_cast<uintptr_t>(tensor.const_data_ptr());
  return {begin, begin + (last + 1) * tensor.element_size()};
}

void check_pair(const Named& output, const Named& other) {
  if (other.tensor == nullptr) return;
  const Bytes a = bytes_of(*output.tensor), b = bytes_of(*other.tensor);
  if (a.begin < b.end && b.begin < a.end) {
    fail_value(output.name, " shares memory with ", other.name,
               "; expected memory of its own; pass a tensor from torch.empty");
  }
}

}  // namespace

void check_apart(const std::vector<Named>& outputs, const std::vector<Named>& inputs) {
  for (size_t i = 0; i < outputs.size(); ++i) {
    for (size_t j = 0; j < i; ++j) check_pair(outputs[i], outputs[j]);
    for (const Named& input : inputs) check_pair(outputs[i], input);
  }
}

void check_blocks(int64_t N, const char* name) {
  if (N < 0 || N > kMaxBlocks) {
    fail_value(name, " has N = ", N, " blocks; expected 0 <= N <= ", kMaxBlocks);
  }
}

void check_block(int64_t B, const char* name) {
  if (B < 2 || B > kMaxBlock) {
    fail_value(name, " has block size B = ", B, "; expected 2 <= B <= ", kMaxBlock);
  }
}

void check_rank(int64_t r, const char* name) {
  if (r < 32 || r > kMaxRank || r % 32 != 0) {
    fail_value(name, " has rank r = ", r, "; expected a multiple of 32 up to ", kMaxRank,
               "; pad with zeros, as XPressRefiner.fold() does");
  }
}

void check_multiple_of_32(int64_t size, const char* what, const char* name) {
  if (size < 32 || size % 32 != 0 || size > INT32_MAX) {
    fail_value(name, " has ", what, " = ", size,
               "; expected a positive multiple of 32 below 2^31; pad with zeros, as "
               "XPressRefiner.fold() does");
  }
}

void check_vocabulary(int64_t V, const char* name) {
  if (V < 1 || V > INT32_MAX) {
    fail_value(name, " has vocabulary size V = ", V, "; expected 1 <= V < 2^31");
  }
}

}  // namespace xpress::ops
