// project_hidden: xh_k = A_h h_k + A_g g for every slot, once per block.
//
// h_k is rounded to the weight type before the product; g is the fp32 mean of the h_k as given,
// rounded likewise. Blocks are taken in groups so that the widened rows stay within
// kProjectScratchBytes.
#include "operators.h"
#include "parallel.h"

namespace xpress::cpu::XPRESS_CPU_NAMESPACE {

namespace {

// Rounded slot rows [B, H], then the rounded mean [H], of one block.
template <class T, class S>
void widen_block(const ProjectHiddenParams& p, const S*, int64_t n, float* rows) {
  float* mean = rows + p.B * p.H;
  for (int64_t h = 0; h < p.H; h += kLanes) {
    F16 sum = zero();
    for (int64_t k = 0; k < p.B; ++k) {
      const F16 x = load(static_cast<const S*>(p.hidden.row(n, k)) + h);
      store(rows + k * p.H + h, round_to(x, T{}));
      sum = add(sum, x);
    }
    store(mean + h, round_to(div(sum, set1(static_cast<float>(p.B))), T{}));
  }
}

template <class T>
void project(const ProjectHiddenParams& p, const T* hidden_proj, float* scratch) {
  const int64_t group = project_group(p.N, p.B, p.H);
  const int64_t block_floats = (p.B + 1) * p.H;
  const int64_t panels = p.r / kPanel;
  for (int64_t n0 = 0; n0 < p.N; n0 += group) {
    const int64_t blocks = min64(group, p.N - n0);
    parallel_items(blocks, [&](int64_t b) {
      with_type(p.hidden.dtype, nullptr,
                [&](auto* type) { widen_block<T>(p, type, n0 + b, scratch + b * block_floats); });
    });
    parallel_items(panels, [&](int64_t panel) {
      const T* a_h = hidden_proj + panel * kPanel * p.H;
      const T* a_g = hidden_proj + (p.r + panel * kPanel) * p.H;
      for (int64_t b = 0; b < blocks; ++b) {
        const float* rows[kMaxBlock + 1];
        for (int64_t k = 0; k <= p.B; ++k) rows[k] = scratch + b * block_floats + k * p.H;
        float mean_part[kPanel];
        for_each_panel_row(a_g, p.H, rows + p.B, 1, p.H, [&](int64_t, const float* dots) {
          for (int i = 0; i < kPanel; ++i) mean_part[i] = dots[i];
        });
        float* out = p.out + (n0 + b) * p.B * p.r + panel * kPanel;
        for_each_panel_row(a_h, p.H, rows, p.B, p.H, [&](int64_t k, const float* dots) {
          store(out + k * p.r, add(load(dots), load(mean_part)));
        });
      }
    });
  }
}

}  // namespace

void project_hidden(const ProjectHiddenParams& p, void* scratch) {
  with_type(p.weight_dtype, p.hidden_proj,
            [&](auto* hidden_proj) { project(p, hidden_proj, static_cast<float*>(scratch)); });
}

}  // namespace xpress::cpu::XPRESS_CPU_NAMESPACE
