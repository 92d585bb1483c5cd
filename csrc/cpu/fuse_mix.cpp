// fuse_mix: c_k = context_k + sum_{j<=k} M[k,j] * E[prev_j], the folded fuse and mix of one pass:
// a gather of token rows and a triangular sum.
#include "operators.h"
#include "parallel.h"

namespace xpress::cpu::XPRESS_CPU_NAMESPACE {

template <class T>
void fuse_mix_block(const float* context, const int64_t* prev, const T* token_table,
                    const float* mixer, int64_t B, int64_t r, int64_t first, float* out) {
  alignas(64) float tokens[kMaxBlock * kMaxRank];  // [B, r], widened
  for (int64_t j = 0; j < B; ++j) widen_row(token_table + prev[j] * r, r, tokens + j * r);
  for (int64_t k = first; k < B; ++k) {
    const float* m = mixer + k * B * r;
    for (int64_t c = 0; c < r; c += kLanes) {
      F16 sum = mul(load(m + c), load(tokens + c));
      for (int64_t j = 1; j <= k; ++j) {
        sum = fma(load(m + j * r + c), load(tokens + j * r + c), sum);
      }
      store(out + k * r + c, add(load(context + k * r + c), sum));
    }
  }
}

template void fuse_mix_block(const float*, const int64_t*, const float*, const float*, int64_t,
                             int64_t, int64_t, float*);
template void fuse_mix_block(const float*, const int64_t*, const bf16*, const float*, int64_t,
                             int64_t, int64_t, float*);
template void fuse_mix_block(const float*, const int64_t*, const fp16*, const float*, int64_t,
                             int64_t, int64_t, float*);

void fuse_mix(const FuseMixParams& p) {
  with_type(p.weight_dtype, p.token_table, [&](auto* token_table) {
    parallel_items(p.N, [&](int64_t n) {
      int64_t prev[kMaxBlock];
      for (int64_t k = 0; k < p.B; ++k) prev[k] = p.prev.at(n, k);
      fuse_mix_block(p.context + n * p.B * p.r, prev, token_table, p.mixer, p.B, p.r, 0,
                     p.out + n * p.B * p.r);
    });
  });
}

}  // namespace xpress::cpu::XPRESS_CPU_NAMESPACE
