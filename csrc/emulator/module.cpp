// The Python module of the emulated GPU, for tests: every operator on numpy arrays, through the
// launcher that the CUDA backend uses.
//
// Element types: numpy has no bfloat16, so uint16 stands for it; float16 and float32 stand for
// themselves. Each tensor is declared to the machine under its name, outputs and scratch are filled
// with NaN, and what the last call loaded from and stored to each tensor can be asked for.
#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <memory>
#include <new>
#include <optional>
#include <utility>
#include <vector>

#include "emulator/machine.h"
#include "xpress/launch.h"

namespace py = pybind11;

namespace xpress {
namespace {

using Array = py::array;
using Shape = std::vector<int64_t>;

// The GPU that is emulated, and the order in which its threads run.
struct Gpu {
  uint64_t seed = 0;
  int num_sms = 3;
  int64_t shared_bytes_per_cta = 227 << 10;
  bool has_clusters = true;

  DeviceLimits limits() const { return {num_sms, shared_bytes_per_cta, has_clusters}; }
};

DType dtype_of(const Array& array) {
  switch (array.dtype().char_()) {
    case 'f':
      return DType::kFloat32;
    case 'H':
      return DType::kBFloat16;
    case 'e':
      return DType::kFloat16;
    default:
      throw py::type_error("expected float32, float16, or uint16 for bfloat16");
  }
}

// One call of an operator: declares its tensors to the machine.
class Call {
 public:
  explicit Call(const Gpu& gpu) {
    emulator::forget_all();
    emulator::set_seed(gpu.seed);
  }

  const void* in(const char* name, const Array& array) {
    // A view is declared from its first to its last element.
    int64_t extent = array.itemsize();
    for (py::ssize_t i = 0; i < array.ndim(); ++i) {
      if (array.shape(i) == 0) return array.data();
      extent += (array.shape(i) - 1) * array.strides(i);
    }
    emulator::declare(name, array.data(), extent, /*writable=*/false);
    return array.data();
  }

  template <class T>
  const T* in_of(const char* name, const Array& array) {
    return static_cast<const T*>(in(name, array));
  }

  // [n0, n1, width], or [n1, width] as one block.
  StridedRows rows(const char* name, const Array& array) {
    const int64_t size = array.itemsize();
    const bool is_batch = array.ndim() == 3;
    return {in(name, array), dtype_of(array), is_batch ? array.strides(0) / size : 0,
            array.strides(is_batch ? 1 : 0) / size};
  }

  Ids ids(const char* name, const Array& array) {
    return {in_of<int64_t>(name, array), array.strides(0) / 8,
            array.ndim() == 2 ? array.strides(1) / 8 : 0};
  }

  template <class T>
  py::array_t<T> out(const char* name, const Shape& shape) {
    py::array_t<T> array(shape);
    poison(name, array.mutable_data(), array.nbytes());
    return array;
  }

  // An output in the type of the weights.
  Array out_like(const char* name, const Shape& shape, const Array& weight) {
    Array array(weight.dtype(), shape);
    poison(name, array.mutable_data(), array.nbytes());
    return array;
  }

  void* scratch(int64_t bytes) {
    constexpr std::align_val_t kAlignment{128};
    const auto free = [](char* memory) { ::operator delete(memory, kAlignment); };
    char* memory = static_cast<char*>(::operator new(static_cast<size_t>(bytes) + 1, kAlignment));
    scratch_.emplace_back(memory, free);
    poison("scratch", memory, bytes);
    return memory;
  }

 private:
  void poison(const char* name, void* data, int64_t bytes) {
    std::memset(data, 0xff, static_cast<size_t>(bytes));
    emulator::declare(name, data, bytes, /*writable=*/true);
  }

  std::vector<std::unique_ptr<char, void (*)(char*)>> scratch_;
};

void check(Status status) {
  if (status == Status::kOk) return;
  throw std::runtime_error("the launcher returned status " +
                           std::to_string(static_cast<int>(status)));
}

Array project_hidden(const Gpu& gpu, const Array& hidden, const Array& hidden_proj) {
  Call call(gpu);
  const int64_t N = hidden.shape(0), B = hidden.shape(1), H = hidden.shape(2);
  const int64_t r = hidden_proj.shape(1);
  auto out = call.out<float>("out", {N, B, r});
  check(cuda::project_hidden(
      {N, B, H, r, call.rows("hidden", hidden), call.in("hidden_proj", hidden_proj),
       dtype_of(hidden_proj), out.mutable_data()},
      call.scratch(cuda::project_scratch_bytes(N, B, H)), gpu.limits(), nullptr));
  return out;
}

// fp32 or fp64, all arguments alike.
bool is_double(const Array& array) { return array.dtype().char_() == 'd'; }

Array causal_mix(const Gpu& gpu, const Array& x, const Array& mixer) {
  Call call(gpu);
  const int64_t N = x.shape(0), B = x.shape(1), r = x.shape(2);
  Array out = call.out_like("out", {N, B, r}, x);
  check(cuda::causal_mix(
      {N, B, r, is_double(x), call.in("x", x), call.in("mixer", mixer), out.mutable_data()},
      gpu.limits(), nullptr));
  return out;
}

std::pair<Array, Array> causal_mix_backward(const Gpu& gpu, const Array& grad_out, const Array& x,
                                            const Array& mixer) {
  Call call(gpu);
  const int64_t N = x.shape(0), B = x.shape(1), r = x.shape(2);
  Array grad_x = call.out_like("grad_x", {N, B, r}, x);
  Array grad_mixer = call.out_like("grad_mixer", {B, B, r}, x);
  check(cuda::causal_mix_backward(
      {N, B, r, is_double(x), call.in("grad_out", grad_out), call.in("x", x),
       call.in("mixer", mixer), grad_x.mutable_data(), grad_mixer.mutable_data()},
      gpu.limits(), nullptr));
  return {grad_x, grad_mixer};
}

Array fuse_mix(const Gpu& gpu, const Array& context, const Array& prev, const Array& token_table,
               const Array& mixer) {
  Call call(gpu);
  const int64_t N = context.shape(0), B = context.shape(1), r = context.shape(2);
  auto out = call.out<float>("out", {N, B, r});
  check(
      cuda::fuse_mix({N, B, r, token_table.shape(0), call.in_of<float>("context", context),
                      call.ids("prev", prev), call.in("token_table", token_table),
                      dtype_of(token_table), call.in_of<float>("mixer", mixer), out.mutable_data()},
                     gpu.limits(), nullptr));
  return out;
}

Array refiner_mlp(const Gpu& gpu, const Array& c, const Array& mlp_gate_up, const Array& mlp_down) {
  Call call(gpu);
  const int64_t rows = c.shape(0) * c.shape(1), r = c.shape(2), m = mlp_down.shape(1);
  Array out = call.out_like("out", {c.shape(0), c.shape(1), r}, mlp_down);
  check(
      cuda::refiner_mlp({rows, r, m, call.in_of<float>("c", c), call.in("mlp_gate_up", mlp_gate_up),
                         call.in("mlp_down", mlp_down), dtype_of(mlp_down), out.mutable_data()},
                        call.scratch(cuda::mlp_scratch_bytes(rows, m)), gpu.limits(), nullptr));
  return out;
}

std::pair<Array, Array> top_candidates(const Gpu& gpu, const Array& base_logits, int64_t C) {
  Call call(gpu);
  const int64_t N = base_logits.shape(0), D = base_logits.shape(1), V = base_logits.shape(2);
  auto ids = call.out<int64_t>("ids", {N, D, C});
  auto logits = call.out<float>("logits", {N, D, C});
  check(cuda::top_candidates({N, D, V, C, call.rows("base_logits", base_logits), ids.mutable_data(),
                              logits.mutable_data()},
                             gpu.limits(), nullptr));
  return {ids, logits};
}

std::pair<Array, Array> readout_argmax(const Gpu& gpu, const Array& z, const Array& base_logits,
                                       const Array& readout,
                                       const std::optional<Array>& candidates) {
  Call call(gpu);
  const int64_t N = z.shape(0), D = z.shape(1), V = readout.shape(0), r = readout.shape(1);
  auto index = call.out<int64_t>("index", {N, D});
  auto value = call.out<float>("value", {N, D});
  check(cuda::readout_argmax(
      {N, D, V, r, candidates ? candidates->shape(2) : 0, call.rows("z", z),
       call.rows("base_logits", base_logits), call.in("readout", readout), dtype_of(readout),
       candidates ? call.in_of<int64_t>("candidates", *candidates) : nullptr, index.mutable_data(),
       value.mutable_data()},
      call.scratch(cuda::readout_scratch_bytes(N * D)), gpu.limits(), nullptr));
  return {index, value};
}

Array refined_logits(const Gpu& gpu, const Array& z, const Array& base_logits,
                     const Array& readout) {
  Call call(gpu);
  const int64_t R = z.shape(0), V = readout.shape(0), r = readout.shape(1);
  auto out = call.out<float>("out", {R, V});
  check(cuda::refined_logits({R, V, r, call.rows("z", z), call.rows("base_logits", base_logits),
                              call.in("readout", readout), dtype_of(readout), out.mutable_data()},
                             gpu.limits(), nullptr));
  return out;
}

std::tuple<Array, Array, Array> jacobi_refine(
    const Gpu& gpu, const Array& base_logits, const Array& hidden, const Array& anchor,
    const Array& predecessor, const Array& hidden_proj, const Array& token_table,
    const Array& mixer, const Array& mlp_gate_up, const Array& mlp_down, const Array& readout,
    int64_t num_passes, int64_t top_c, bool exact, const std::optional<Array>& seed_tokens,
    const std::optional<Array>& d2t) {
  Call call(gpu);
  JacobiRefineParams p{};
  p.N = hidden.shape(0), p.B = hidden.shape(1), p.H = hidden.shape(2);
  p.V = readout.shape(0), p.r = readout.shape(1), p.m = mlp_down.shape(1);
  p.V_t = token_table.shape(0);
  p.base_logits = call.rows("base_logits", base_logits);
  p.hidden = call.rows("hidden", hidden);
  p.anchor = call.ids("anchor", anchor);
  p.predecessor = call.ids("predecessor", predecessor);
  p.hidden_proj = call.in("hidden_proj", hidden_proj);
  p.token_table = call.in("token_table", token_table);
  p.mixer = call.in_of<float>("mixer", mixer);
  p.mlp_gate_up = call.in("mlp_gate_up", mlp_gate_up);
  p.mlp_down = call.in("mlp_down", mlp_down);
  p.readout = call.in("readout", readout);
  p.weight_dtype = dtype_of(readout);
  p.num_passes = num_passes, p.top_c = top_c, p.exact = exact;
  if (seed_tokens) p.seed_tokens = call.ids("seed_tokens", *seed_tokens);
  if (d2t) p.d2t = call.in_of<int64_t>("d2t", *d2t);
  auto tokens = call.out<int64_t>("tokens", {p.N, p.B - 1});
  auto passes = call.out<int32_t>("passes", {p.N});
  auto full_readouts = call.out<int32_t>("full_readouts", {p.N});
  p.tokens = tokens.mutable_data();
  p.passes = passes.mutable_data();
  p.full_readouts = full_readouts.mutable_data();
  p.workspace = call.scratch(cuda::jacobi_workspace_bytes(p.N, p.B, p.H, p.r, p.m, top_c, exact));
  check(cuda::jacobi_refine(p, gpu.limits(), nullptr));
  return {tokens, passes, full_readouts};
}

// Tensor -> (bytes loaded, bytes stored) of the last call.
py::dict traffic() {
  py::dict all;
  for (const emulator::Traffic& t : emulator::traffic()) {
    all[py::str(t.name)] = py::make_tuple(t.loaded, t.stored);
  }
  return all;
}

}  // namespace

PYBIND11_MODULE(xpress_emulator, m) {
  py::register_exception<emulator::Fault>(m, "Fault", PyExc_RuntimeError);
  py::class_<Gpu>(m, "Gpu").def(
      py::init([](uint64_t seed, int num_sms, int64_t shared_bytes_per_cta, bool has_clusters) {
        return Gpu{seed, num_sms, shared_bytes_per_cta, has_clusters};
      }),
      py::kw_only(), py::arg("seed") = Gpu{}.seed, py::arg("num_sms") = Gpu{}.num_sms,
      py::arg("shared_bytes_per_cta") = Gpu{}.shared_bytes_per_cta,
      py::arg("has_clusters") = Gpu{}.has_clusters);
  m.def("project_hidden", &project_hidden);
  m.def("causal_mix", &causal_mix);
  m.def("causal_mix_backward", &causal_mix_backward);
  m.def("fuse_mix", &fuse_mix);
  m.def("refiner_mlp", &refiner_mlp);
  m.def("top_candidates", &top_candidates);
  m.def("readout_argmax", &readout_argmax);
  m.def("refined_logits", &refined_logits);
  m.def("jacobi_refine", &jacobi_refine);
  m.def("traffic", &traffic);
}

}  // namespace xpress
