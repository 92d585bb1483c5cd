// Every operator's schema, written once. Shapes and dtypes: xpress_ext/ops.py; semantics:
// xpress_ext/reference.py.
#include <torch/csrc/stable/library.h>

STABLE_TORCH_LIBRARY(xpress, m) {
  m.def("project_hidden(Tensor hidden, Tensor hidden_proj) -> Tensor");
  m.def("causal_mix(Tensor x, Tensor mixer) -> Tensor");
  m.def("causal_mix_backward(Tensor grad_out, Tensor x, Tensor mixer) -> (Tensor, Tensor)");
  m.def("fuse_mix(Tensor context, Tensor prev, Tensor token_table, Tensor mixer) -> Tensor");
  m.def("refiner_mlp(Tensor c, Tensor mlp_gate_up, Tensor mlp_down) -> Tensor");
  m.def("top_candidates(Tensor base_logits, int C) -> (Tensor ids, Tensor logits)");
  m.def(
      "readout_argmax(Tensor z, Tensor base_logits, Tensor readout, Tensor? candidates=None)"
      " -> (Tensor index, Tensor value)");
  m.def("refined_logits(Tensor z, Tensor base_logits, Tensor readout) -> Tensor");
  m.def(
      "refined_logits.out(Tensor z, Tensor base_logits, Tensor readout, *, Tensor(a!) out)"
      " -> ()");
  m.def(
      "jacobi_refine(Tensor base_logits, Tensor hidden, Tensor anchor, Tensor predecessor,"
      " Tensor hidden_proj, Tensor token_table, Tensor mixer, Tensor mlp_gate_up,"
      " Tensor mlp_down, Tensor readout, int num_passes, int top_c=0, bool exact=False,"
      " Tensor? seed_tokens=None, Tensor? d2t=None)"
      " -> (Tensor tokens, Tensor passes, Tensor full_readouts)");
  m.def(
      "jacobi_refine.out(Tensor base_logits, Tensor hidden, Tensor anchor, Tensor predecessor,"
      " Tensor hidden_proj, Tensor token_table, Tensor mixer, Tensor mlp_gate_up,"
      " Tensor mlp_down, Tensor readout, int num_passes, int top_c=0, bool exact=False,"
      " Tensor? seed_tokens=None, Tensor? d2t=None, *, Tensor(a!) tokens, Tensor(b!) passes,"
      " Tensor(c!) full_readouts, Tensor(d!) workspace) -> ()");
  m.def(
      "jacobi_workspace(int N, int B, int H, int r, int m, int top_c=0, bool exact=False,"
      " Device? device=None) -> int");
}
