// The operators of the torch layer, written once for every backend: check arguments, allocate
// outputs and scratch, fill the parameter structs, run. No arithmetic.
//
// A Backend is made from a call's tensors, which it requires to be on one device of its kind, and
// has
//   kWorkspaceAlignment            bytes, of jacobi_refine's workspace
//   empty(sizes, dtype)            a tensor on the call's device
//   checks_ids(), on_host(tensor)  whether ids are read before a launch; a tensor's data to read
//   NAME(params[, scratch])        runs the operator, or throws
//   ..._scratch_bytes(sizes)       how much scratch it wants
#pragma once

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>

#include <tuple>
#include <vector>

#include "checks.h"
#include "xpress/limits.h"
#include "xpress/params.h"

namespace xpress::ops {

// Bytes of jacobi_refine's workspace on CUDA; 0 in a build without CUDA operators.
int64_t cuda_workspace_bytes(int64_t N, int64_t B, int64_t H, int64_t r, int64_t m, int64_t top_c,
                             bool exact);

template <class T>
T* data(const Tensor& tensor) {
  return static_cast<T*>(tensor.mutable_data_ptr());
}

inline const Tensor* get_if(const std::optional<Tensor>& tensor) {
  return tensor.has_value() ? &*tensor : nullptr;
}

template <class Backend>
Tensor scratch(const Backend& backend, int64_t bytes) {
  return backend.empty({bytes}, ScalarType::Byte);
}

// Where the ids are; they are read only where the backend says so.
template <class Backend>
Ids checked_ids(const Backend& backend, const Tensor& tensor, const char* name, int64_t limit,
                const char* table) {
  const Ids ids = ids_of(tensor, name);
  if (backend.checks_ids()) check_ids(backend.on_host(tensor), name, limit, table);
  return ids;
}

template <class Backend>
Tensor project_hidden(const Tensor hidden, const Tensor hidden_proj) {
  const Backend backend({{&hidden, "hidden"}, {&hidden_proj, "hidden_proj"}});
  check_dim(hidden, "hidden", 3, "[N, B, H]");
  const int64_t N = hidden.size(0), B = hidden.size(1), H = hidden.size(2);
  check_dim(hidden_proj, "hidden_proj", 3, "[2, r, H]");
  const int64_t r = hidden_proj.size(1);
  check_shape(hidden_proj, "hidden_proj", {2, r, H}, "[2, r, H]");
  check_block(B, "hidden");
  check_rank(r, "hidden_proj");
  check_multiple_of_32(H, "H", "hidden");
  const StridedRows rows = strided_rows(hidden, "hidden");
  const DType type = float_dtype(hidden_proj, "hidden_proj");
  const void* proj = weight(hidden_proj, "hidden_proj", type, "hidden_proj");
  Tensor out = backend.empty({N, B, r}, ScalarType::Float);
  if (N == 0) return out;
  Tensor temporary = scratch(backend, backend.project_scratch_bytes(N, B, H));
  backend.project_hidden({N, B, H, r, rows, proj, type, data<float>(out)}, data<void>(temporary));
  return out;
}

// fp32, or fp64 so that gradients can be checked.
inline bool check_mix_dtypes(const Tensor& x, const Tensor& mixer) {
  const bool is_double = x.scalar_type() == ScalarType::Double;
  if (!is_double) check_dtype(x, "x", ScalarType::Float);
  check_dtype(mixer, "mixer", x.scalar_type());
  return is_double;
}

inline void check_mix(const Tensor& x, const Tensor& mixer) {
  check_dim(x, "x", 3, "[N, B, r]");
  const int64_t B = x.size(1), r = x.size(2);
  check_block(B, "x");
  check_rank(r, "x");
  check_shape(mixer, "mixer", {B, B, r}, "[B, B, r]");
  check_contiguous(x, "x");
  check_contiguous(mixer, "mixer");
}

template <class Backend>
Tensor causal_mix(const Tensor x, const Tensor mixer) {
  const Backend backend({{&x, "x"}, {&mixer, "mixer"}});
  check_mix(x, mixer);
  const bool is_double = check_mix_dtypes(x, mixer);
  Tensor out = backend.empty({x.size(0), x.size(1), x.size(2)}, x.scalar_type());
  backend.causal_mix({x.size(0), x.size(1), x.size(2), is_double, x.const_data_ptr(),
                      mixer.const_data_ptr(), data<void>(out)});
  return out;
}

template <class Backend>
std::tuple<Tensor, Tensor> causal_mix_backward(const Tensor grad_out, const Tensor x,
                                               const Tensor mixer) {
  const Backend backend({{&grad_out, "grad_out"}, {&x, "x"}, {&mixer, "mixer"}});
  check_mix(x, mixer);
  const bool is_double = check_mix_dtypes(x, mixer);
  const int64_t N = x.size(0), B = x.size(1), r = x.size(2);
  check_shape(grad_out, "grad_out", {N, B, r}, "[N, B, r]");
  check_dtype(grad_out, "grad_out", x.scalar_type());
  check_contiguous(grad_out, "grad_out");
  Tensor grad_x = backend.empty({N, B, r}, x.scalar_type());
  Tensor grad_mixer = backend.empty({B, B, r}, x.scalar_type());
  backend.causal_mix_backward({N, B, r, is_double, grad_out.const_data_ptr(), x.const_data_ptr(),
                               mixer.const_data_ptr(), data<void>(grad_x), data<void>(grad_mixer)});
  return {grad_x, grad_mixer};
}

template <class Backend>
Tensor fuse_mix(const Tensor context, const Tensor prev, const Tensor token_table,
                const Tensor mixer) {
  const Backend backend(
      {{&context, "context"}, {&prev, "prev"}, {&token_table, "token_table"}, {&mixer, "mixer"}});
  check_dim(context, "context", 3, "[N, B, r]");
  const int64_t N = context.size(0), B = context.size(1), r = context.size(2);
  check_block(B, "context");
  check_rank(r, "context");
  check_dim(token_table, "token_table", 2, "[V_t, r]");
  check_shape(token_table, "token_table", {token_table.size(0), r}, "[V_t, r]");
  check_shape(prev, "prev", {N, B}, "[N, B]");
  check_shape(mixer, "mixer", {B, B, r}, "[B, B, r]");
  const DType type = float_dtype(token_table, "token_table");
  Tensor out = backend.empty({N, B, r}, ScalarType::Float);
  backend.fuse_mix(
      {N, B, r, token_table.size(0), fp32(context, "context"),
       checked_ids(backend, prev, "prev", token_table.size(0), "the rows of token_table"),
       weight(token_table, "token_table", type, "token_table"), type, fp32(mixer, "mixer"),
       data<float>(out)});
  return out;
}

template <class Backend>
Tensor refiner_mlp(const Tensor c, const Tensor mlp_gate_up, const Tensor mlp_down) {
  const Backend backend({{&c, "c"}, {&mlp_gate_up, "mlp_gate_up"}, {&mlp_down, "mlp_down"}});
  check_dim(c, "c", 3, "[N, B, r]");
  const int64_t r = c.size(2);
  check_rank(r, "c");
  check_dim(mlp_down, "mlp_down", 2, "[r, m]");
  const int64_t m = mlp_down.size(1);
  check_multiple_of_32(m, "m", "mlp_down");
  check_shape(mlp_down, "mlp_down", {r, m}, "[r, m]");
  check_shape(mlp_gate_up, "mlp_gate_up", {2 * m, r}, "[2m, r]");
  const DType type = float_dtype(mlp_gate_up, "mlp_gate_up");
  const void* gate_up = weight(mlp_gate_up, "mlp_gate_up", type, "mlp_gate_up");
  const void* down = weight(mlp_down, "mlp_down", type, "mlp_gate_up");
  const float* rows = fp32(c, "c");
  Tensor out = backend.empty({c.size(0), c.size(1), r}, mlp_gate_up.scalar_type());
  const int64_t count = c.size(0) * c.size(1);
  if (count == 0) return out;
  Tensor temporary = scratch(backend, backend.mlp_scratch_bytes(count, r, m));
  backend.refiner_mlp({count, r, m, rows, gate_up, down, type, data<void>(out)},
                      data<void>(temporary));
  return out;
}

template <class Backend>
std::tuple<Tensor, Tensor> top_candidates(const Tensor base_logits, int64_t C) {
  const Backend backend({{&base_logits, "base_logits"}});
  check_dim(base_logits, "base_logits", 3, "[N, D, V]");
  const int64_t N = base_logits.size(0), D = base_logits.size(1), V = base_logits.size(2);
  check_vocabulary(V, "base_logits");
  const int64_t limit = V < kMaxCandidates ? V : kMaxCandidates;
  if (C < 1 || C > limit) {
    fail_value("C is ", C, "; expected 1 <= C <= min(V, ", kMaxCandidates, ") = ", limit);
  }
  const StridedRows rows = strided_rows(base_logits, "base_logits");
  Tensor ids = backend.empty({N, D, C}, ScalarType::Long);
  Tensor logits = backend.empty({N, D, C}, ScalarType::Float);
  if (N * D == 0) return {ids, logits};
  backend.top_candidates({N, D, V, C, rows, data<int64_t>(ids), data<float>(logits)});
  return {ids, logits};
}

// Shapes and types that readout_argmax and refined_logits share.
inline void check_readout(const Tensor& z, const Tensor& readout) {
  check_dim(readout, "readout", 2, "[V, r]");
  check_vocabulary(readout.size(0), "readout");
  check_rank(readout.size(1), "readout");
  float_dtype(readout, "readout");
  check_dtype(z, "z", readout.scalar_type());
}

template <class Backend>
std::tuple<Tensor, Tensor> readout_argmax(const Tensor z, const Tensor base_logits,
                                          const Tensor readout,
                                          const std::optional<Tensor> candidates) {
  const Backend backend({{&z, "z"},
                         {&base_logits, "base_logits"},
                         {&readout, "readout"},
                         {get_if(candidates), "candidates"}});
  check_readout(z, readout);
  check_dim(z, "z", 3, "[N, D, r]");
  const int64_t N = z.size(0), D = z.size(1), V = readout.size(0), r = readout.size(1);
  check_shape(z, "z", {N, D, r}, "[N, D, r]");
  check_shape(base_logits, "base_logits", {N, D, V}, "[N, D, V]");
  const DType type = float_dtype(readout, "readout");
  const void* rows_of_readout = weight(readout, "readout", type, "readout");
  int64_t C = 0;
  const int64_t* ids = nullptr;
  if (candidates.has_value()) {
    check_dim(*candidates, "candidates", 3, "[N, D, C]");
    C = candidates->size(2);
    check_shape(*candidates, "candidates", {N, D, C}, "[N, D, C]");
    if (C < 1) fail_value("candidates has C = 0 ids a slot; expected at least 1");
    check_dtype(*candidates, "candidates", ScalarType::Long);
    check_contiguous(*candidates, "candidates");
    ids = static_cast<const int64_t*>(candidates->const_data_ptr());
    if (backend.checks_ids()) {
      check_ids(backend.on_host(*candidates), "candidates", V, "the rows of readout");
    }
  }
  const StridedRows z_rows = strided_rows(z, "z");
  const StridedRows base = strided_rows(base_logits, "base_logits");
  Tensor index = backend.empty({N, D}, ScalarType::Long);
  Tensor value = backend.empty({N, D}, ScalarType::Float);
  if (N * D == 0) return {index, value};
  Tensor temporary = scratch(backend, backend.readout_scratch_bytes(N * D, r));
  backend.readout_argmax({N, D, V, r, C, z_rows, base, rows_of_readout, type, ids,
                          data<int64_t>(index), data<float>(value)},
                         data<void>(temporary));
  return {index, value};
}

template <class Backend>
void write_refined_logits(const Backend& backend, const Tensor& z, const Tensor& base_logits,
                          const Tensor& readout, const Tensor& out) {
  check_readout(z, readout);
  check_dim(z, "z", 2, "[R, r]");
  const int64_t R = z.size(0), V = readout.size(0), r = readout.size(1);
  check_shape(z, "z", {R, r}, "[R, r]");
  check_shape(base_logits, "base_logits", {R, V}, "[R, V]");
  check_shape(out, "out", {R, V}, "[R, V]");
  fp32(out, "out");
  const DType type = float_dtype(readout, "readout");
  const void* rows_of_readout = weight(readout, "readout", type, "readout");
  const StridedRows z_rows = strided_rows(z, "z");
  const StridedRows base = strided_rows(base_logits, "base_logits");
  check_apart({{&out, "out"}}, {{&z, "z"}, {&base_logits, "base_logits"}, {&readout, "readout"}});
  if (R == 0) return;
  Tensor temporary = scratch(backend, backend.refined_scratch_bytes(r));
  backend.refined_logits({R, V, r, z_rows, base, rows_of_readout, type, data<float>(out)},
                         data<void>(temporary));
}

template <class Backend>
void refined_logits_out(const Tensor z, const Tensor base_logits, const Tensor readout,
                        Tensor out) {
  const Backend backend(
      {{&z, "z"}, {&base_logits, "base_logits"}, {&readout, "readout"}, {&out, "out"}});
  write_refined_logits(backend, z, base_logits, readout, out);
}

template <class Backend>
Tensor refined_logits(const Tensor z, const Tensor base_logits, const Tensor readout) {
  const Backend backend({{&z, "z"}, {&base_logits, "base_logits"}, {&readout, "readout"}});
  check_dim(z, "z", 2, "[R, r]");
  check_dim(readout, "readout", 2, "[V, r]");
  Tensor out = backend.empty({z.size(0), readout.size(0)}, ScalarType::Float);
  write_refined_logits(backend, z, base_logits, readout, out);
  return out;
}

// The tensors that jacobi_refine reads.
struct JacobiInputs {
  const Tensor &base_logits, &hidden, &anchor, &predecessor, &hidden_proj, &token_table, &mixer,
      &mlp_gate_up, &mlp_down, &readout;
  const Tensor *seed_tokens, *d2t;  // null: none

  std::vector<Named> named() const {
    return {{&base_logits, "base_logits"},
            {&hidden, "hidden"},
            {&anchor, "anchor"},
            {&predecessor, "predecessor"},
            {&hidden_proj, "hidden_proj"},
            {&token_table, "token_table"},
            {&mixer, "mixer"},
            {&mlp_gate_up, "mlp_gate_up"},
            {&mlp_down, "mlp_down"},
            {&readout, "readout"},
            {seed_tokens, "seed_tokens"},
            {d2t, "d2t"}};
  }
};

// Checks all inputs and fills the parameters but for outputs and workspace.
template <class Backend>
JacobiRefineParams jacobi_params(const Backend& backend, const JacobiInputs& in, int64_t num_passes,
                                 int64_t top_c, bool exact) {
  JacobiRefineParams p{};
  check_dim(in.hidden, "hidden", 3, "[N, B, H]");
  check_dim(in.readout, "readout", 2, "[V, r]");
  check_dim(in.token_table, "token_table", 2, "[V_t, r]");
  check_dim(in.mlp_down, "mlp_down", 2, "[r, m]");
  p.N = in.hidden.size(0), p.B = in.hidden.size(1), p.H = in.hidden.size(2);
  p.V = in.readout.size(0), p.r = in.readout.size(1);
  p.V_t = in.token_table.size(0), p.m = in.mlp_down.size(1);
  const int64_t D = p.B - 1;
  check_blocks(p.N, "hidden");
  check_block(p.B, "hidden");
  check_rank(p.r, "readout");
  check_vocabulary(p.V, "readout");
  check_vocabulary(p.V_t, "token_table");
  check_multiple_of_32(p.H, "H", "hidden");
  check_multiple_of_32(p.m, "m", "mlp_down");
  check_shape(in.base_logits, "base_logits", {p.N, D, p.V}, "[N, B-1, V]");
  check_shape(in.anchor, "anchor", {p.N}, "[N]");
  check_shape(in.predecessor, "predecessor", {p.N}, "[N]");
  check_shape(in.hidden_proj, "hidden_proj", {2, p.r, p.H}, "[2, r, H]");
  check_shape(in.token_table, "token_table", {p.V_t, p.r}, "[V_t, r]");
  check_shape(in.mixer, "mixer", {p.B, p.B, p.r}, "[B, B, r]");
  check_shape(in.mlp_gate_up, "mlp_gate_up", {2 * p.m, p.r}, "[2m, r]");
  check_shape(in.mlp_down, "mlp_down", {p.r, p.m}, "[r, m]");

  p.weight_dtype = float_dtype(in.readout, "readout");
  p.readout = weight(in.readout, "readout", p.weight_dtype, "readout");
  p.hidden_proj = weight(in.hidden_proj, "hidden_proj", p.weight_dtype, "readout");
  p.token_table = weight(in.token_table, "token_table", p.weight_dtype, "readout");
  p.mlp_gate_up = weight(in.mlp_gate_up, "mlp_gate_up", p.weight_dtype, "readout");
  p.mlp_down = weight(in.mlp_down, "mlp_down", p.weight_dtype, "readout");
  check_dtype(in.mixer, "mixer", ScalarType::Float);
  p.mixer = static_cast<const float*>(weight(in.mixer, "mixer", DType::kFloat32, "mixer"));
  p.base_logits = strided_rows(in.base_logits, "base_logits");
  p.hidden = strided_rows(in.hidden, "hidden");

  if (num_passes < 1) fail_value("num_passes is ", num_passes, "; expected at least 1");
  const int64_t limit = p.V < kMaxCandidates ? p.V : kMaxCandidates;
  if (top_c < 0 || top_c > limit) {
    fail_value("top_c is ", top_c, "; expected 0 (the whole vocabulary) or 1 <= top_c <= min(V, ",
               kMaxCandidates, ") = ", limit);
  }
  if (exact && top_c == 0) {
    fail_value(
        "exact is True with top_c = 0; exact needs top_c >= 1 (top_c = 0 scores the whole "
        "vocabulary and needs no proof)");
  }
  if (exact && num_passes < D) {
    fail_value("exact is True with num_passes = ", num_passes,
               "; exact needs num_passes >= B-1 = ", D);
  }
  p.num_passes = num_passes, p.top_c = top_c, p.exact = exact;

  const char* table = "the rows of token_table";
  p.anchor = checked_ids(backend, in.anchor, "anchor", p.V_t, table);
  p.predecessor = checked_ids(backend, in.predecessor, "predecessor", p.V_t, table);
  if (in.seed_tokens != nullptr) {
    check_shape(*in.seed_tokens, "seed_tokens", {p.N, D}, "[N, B-1]");
    p.seed_tokens = checked_ids(backend, *in.seed_tokens, "seed_tokens", p.V_t, table);
  }
  if (in.d2t != nullptr) {
    check_shape(*in.d2t, "d2t", {p.V}, "[V]");
    check_dtype(*in.d2t, "d2t", ScalarType::Long);
    check_contiguous(*in.d2t, "d2t");
    if (backend.checks_ids()) check_offsets(backend.on_host(*in.d2t), "d2t", p.V_t, table);
    p.d2t = static_cast<const int64_t*>(in.d2t->const_data_ptr());
  } else if (p.V > p.V_t) {
    fail_value("readout has V = ", p.V, " rows, more than the V_t = ", p.V_t,
               " of token_table; pass d2t, or a token_table with a row for each draft id");
  }
  return p;
}

template <class Backend>
void run_jacobi(const Backend& backend, JacobiRefineParams& p, const Tensor& tokens,
                const Tensor& passes, const Tensor& full_readouts, const Tensor& workspace) {
  p.tokens = data<int64_t>(tokens);
  p.passes = data<int32_t>(passes);
  p.full_readouts = data<int32_t>(full_readouts);
  p.workspace = data<void>(workspace);
  if (p.N > 0) backend.jacobi_refine(p);
}

template <class Backend>
std::tuple<Tensor, Tensor, Tensor> jacobi_refine(const Tensor base_logits, const Tensor hidden,
                                                 const Tensor anchor, const Tensor predecessor,
                                                 const Tensor hidden_proj, const Tensor token_table,
                                                 const Tensor mixer, const Tensor mlp_gate_up,
                                                 const Tensor mlp_down, const Tensor readout,
                                                 int64_t num_passes, int64_t top_c, bool exact,
                                                 const std::optional<Tensor> seed_tokens,
                                                 const std::optional<Tensor> d2t) {
  const JacobiInputs in{base_logits,         hidden,     anchor,      predecessor, hidden_proj,
                        token_table,         mixer,      mlp_gate_up, mlp_down,    readout,
                        get_if(seed_tokens), get_if(d2t)};
  const Backend backend(in.named());
  JacobiRefineParams p = jacobi_params(backend, in, num_passes, top_c, exact);
  Tensor tokens = backend.empty({p.N, p.B - 1}, ScalarType::Long);
  Tensor passes = backend.empty({p.N}, ScalarType::Int);
  Tensor full_readouts = backend.empty({p.N}, ScalarType::Int);
  Tensor workspace =
      scratch(backend, backend.jacobi_workspace_bytes(p.N, p.B, p.H, p.r, p.m, p.top_c, p.exact));
  run_jacobi(backend, p, tokens, passes, full_readouts, workspace);
  return {tokens, passes, full_readouts};
}

template <class Backend>
void jacobi_refine_out(const Tensor base_logits, const Tensor hidden, const Tensor anchor,
                       const Tensor predecessor, const Tensor hidden_proj, const Tensor token_table,
                       const Tensor mixer, const Tensor mlp_gate_up, const Tensor mlp_down,
                       const Tensor readout, int64_t num_passes, int64_t top_c, bool exact,
                       const std::optional<Tensor> seed_tokens, const std::optional<Tensor> d2t,
                       Tensor tokens, Tensor passes, Tensor full_readouts, Tensor workspace) {
  const JacobiInputs in{base_logits,         hidden,     anchor,      predecessor, hidden_proj,
                        token_table,         mixer,      mlp_gate_up, mlp_down,    readout,
                        get_if(seed_tokens), get_if(d2t)};
  const std::vector<Named> inputs = in.named(), outputs = {{&tokens, "tokens"},
                                                           {&passes, "passes"},
                                                           {&full_readouts, "full_readouts"},
                                                           {&workspace, "workspace"}};
  std::vector<Named> all = inputs;
  all.insert(all.end(), outputs.begin(), outputs.end());
  const Backend backend(all);
  JacobiRefineParams p = jacobi_params(backend, in, num_passes, top_c, exact);
  check_shape(tokens, "tokens", {p.N, p.B - 1}, "[N, B-1]");
  check_shape(passes, "passes", {p.N}, "[N]");
  check_shape(full_readouts, "full_readouts", {p.N}, "[N]");
  check_dtype(tokens, "tokens", ScalarType::Long);
  check_dtype(passes, "passes", ScalarType::Int);
  check_dtype(full_readouts, "full_readouts", ScalarType::Int);
  check_dtype(workspace, "workspace", ScalarType::Byte);
  for (const auto& [tensor, name] : outputs) check_contiguous(*tensor, name);
  check_apart(outputs, inputs);
  const int64_t needed = backend.jacobi_workspace_bytes(p.N, p.B, p.H, p.r, p.m, p.top_c, p.exact);
  if (workspace.numel() < needed) {
    fail_value("workspace has ", workspace.numel(), " bytes; expected at least ", needed,
               ", as torch.ops.xpress.jacobi_workspace tells");
  }
  const auto address = reinterpret_cast<uintptr_t>(workspace.const_data_ptr());
  if (address % Backend::kWorkspaceAlignment != 0 && p.N > 0) {
    fail_value("workspace is not aligned to ", Backend::kWorkspaceAlignment,
               " bytes; pass a tensor of its own, not a slice");
  }
  run_jacobi(backend, p, tokens, passes, full_readouts, workspace);
}

// Registers every operator for a Backend.
template <class Backend>
void register_operators(torch::stable::detail::StableLibrary& m) {
  m.impl("project_hidden", TORCH_BOX(&project_hidden<Backend>));
  m.impl("causal_mix", TORCH_BOX(&causal_mix<Backend>));
  m.impl("causal_mix_backward", TORCH_BOX(&causal_mix_backward<Backend>));
  m.impl("fuse_mix", TORCH_BOX(&fuse_mix<Backend>));
  m.impl("refiner_mlp", TORCH_BOX(&refiner_mlp<Backend>));
  m.impl("top_candidates", TORCH_BOX(&top_candidates<Backend>));
  m.impl("readout_argmax", TORCH_BOX(&readout_argmax<Backend>));
  m.impl("refined_logits", TORCH_BOX(&refined_logits<Backend>));
  m.impl("refined_logits.out", TORCH_BOX(&refined_logits_out<Backend>));
  m.impl("jacobi_refine", TORCH_BOX(&jacobi_refine<Backend>));
  m.impl("jacobi_refine.out", TORCH_BOX(&jacobi_refine_out<Backend>));
}

}  // namespace xpress::ops
