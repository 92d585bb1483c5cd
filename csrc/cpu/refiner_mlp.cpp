// refiner_mlp: z = c + W_down( silu(W_gate c) * (W_up c) ), SwiGLU with a residual.
//
// c is rounded to the weight type for the products (the residual keeps it in fp32), the hidden
// layer and z are rounded once each.
#include "operators.h"
#include "parallel.h"

namespace xpress::cpu::XPRESS_CPU_NAMESPACE {

template <class T>
void refiner_mlp_rows(const RefinerMlpRows<T>& p) {
  const int64_t r = p.r, m = p.m;
  parallel_items(m / kPanel, [&](int64_t panel) {
    const T* gate = p.mlp_gate_up + panel * kPanel * r;
    const T* up = p.mlp_gate_up + (m + panel * kPanel) * r;
    float* out = p.mlp_hidden + panel * kPanel;
    for_each_panel_row(gate, r, p.rounded_c, p.rows, r,
                       [&](int64_t i, const float* dots) { store(out + i * m, load(dots)); });
    for_each_wide_panel_row(up, r, p.rounded_c, p.rows, [&](int64_t i, const float* dots) {
      store(out + i * m, round_to(silu_times(load(out + i * m), load(dots)), T{}));
    });
  });
  parallel_items(r / kPanel, [&](int64_t panel) {
    const float* hidden[kMlpRows];
    for (int64_t i = 0; i < p.rows; ++i) hidden[i] = p.mlp_hidden + i * m;
    const T* down = p.mlp_down + panel * kPanel * m;
    for_each_wide_panel_row(down, m, hidden, p.rows, [&](int64_t i, const float* dots) {
      const int64_t c = panel * kPanel;
      store(p.z[i] + c, round_to(add(load(p.c[i] + c), load(dots)), T{}));
    });
  });
}

template void refiner_mlp_rows(const RefinerMlpRows<float>&);
template void refiner_mlp_rows(const RefinerMlpRows<bf16>&);
template void refiner_mlp_rows(const RefinerMlpRows<fp16>&);

namespace {

template <class T>
void mlp(const RefinerMlpParams& p, const T* mlp_gate_up, float* scratch) {
  float* rounded = scratch;                // [kMlpRows, r]
  float* z = rounded + kMlpRows * p.r;     // [kMlpRows, r]
  float* mlp_hidden = z + kMlpRows * p.r;  // [kMlpRows, m]
  for (int64_t row0 = 0; row0 < p.rows; row0 += kMlpRows) {
    const int64_t rows = min64(kMlpRows, p.rows - row0);
    const float* c_rows[kMlpRows];
    const float* rounded_rows[kMlpRows];
    float* z_rows[kMlpRows];
    for (int64_t i = 0; i < rows; ++i) {
      c_rows[i] = p.c + (row0 + i) * p.r;
      rounded_rows[i] = rounded + i * p.r;
      z_rows[i] = z + i * p.r;
      round_row<T>(c_rows[i], p.r, rounded + i * p.r);
    }
    refiner_mlp_rows(RefinerMlpRows<T>{rows, p.r, p.m, c_rows, rounded_rows, mlp_gate_up,
                                       static_cast<const T*>(p.mlp_down), mlp_hidden, z_rows});
    T* out = static_cast<T*>(p.out) + row0 * p.r;
    for (int64_t i = 0; i < rows * p.r; i += kLanes) store_as(out + i, load(z + i));
  }
}

}  // namespace

void refiner_mlp(const RefinerMlpParams& p, void* scratch) {
  with_type(p.weight_dtype, p.mlp_gate_up,
            [&](auto* gate_up) { mlp(p, gate_up, static_cast<float*>(scratch)); });
}

}  // namespace xpress::cpu::XPRESS_CPU_NAMESPACE
