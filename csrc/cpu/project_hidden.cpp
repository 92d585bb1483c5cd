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

constexpr int64_t kProjectBlocks = 8;  // blocks that share one read of a panel of A_h and A_g

// Sixteen channels of xh for `blocks` <= kProjectBlocks blocks, whose widened rows start at `rows`.
template <class T>
void project_panel(const ProjectHiddenParams& p, const T* hidden_proj, int64_t channel, int64_t n0,
                   int64_t blocks, const float* rows) {
  const float* slots[kProjectBlocks * kMaxBlock];
  const float* means[kProjectBlocks];
  for (int64_t b = 0; b < blocks; ++b) {
    const float* block = rows + b * (p.B + 1) * p.H;
    for (int64_t k = 0; k < p.B; ++k) slots[b * p.B + k] = block + k * p.H;
    means[b] = block + p.B * p.H;
  }
  float mean_part[kProjectBlocks * kPanel];
  const T* a_h = hidden_proj + channel * p.H;
  const T* a_g = a_h + p.r * p.H;
  for_each_panel_row(a_g, p.H, means, blocks, p.H, [&](int64_t b, const float* dots) {
    store(mean_part + b * kPanel, load(dots));
  });
  float* out = p.out + n0 * p.B * p.r + channel;
  for_each_panel_row(a_h, p.H, slots, blocks * p.B, p.H, [&](int64_t row, const float* dots) {
    store(out + row * p.r, add(load(dots), load(mean_part + row / p.B * kPanel)));
  });
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
      for (int64_t b = 0; b < blocks; b += kProjectBlocks) {
        project_panel(p, hidden_proj, panel * kPanel, n0 + b, min64(kProjectBlocks, blocks - b),
                      scratch + b * block_floats);
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
