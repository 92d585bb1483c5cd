// refined_logits: s + W_r z for the rows that a caller really needs. The one operator that writes
// [rows, V]. The walk and the accumulation are those of readout_argmax (readout.h, dots.h).
#include "parallel.h"
#include "readout.h"

namespace xpress::cpu::XPRESS_CPU_NAMESPACE {

void refined_logits(const RefinedLogitsParams& p, void* scratch) {
  for_each_z_group(
      p.z, p.R, p.R, p.r, p.base_logits, scratch,
      [&](int64_t row0, int64_t count, const float* const* z, const void* const* base) {
        const ReadoutRows rows{count,     p.V,           p.r, z, base, p.base_logits.dtype,
                               p.readout, p.weight_dtype};
        with_type(p.weight_dtype, p.readout, [&](auto* readout) {
          with_type(p.base_logits.dtype, nullptr, [&](auto* type) {
            parallel_items(ceil_div(p.V, kChunk), [&](int64_t chunk) {
              const int64_t begin = chunk * kChunk;
              for_each_panel(rows, readout, type, 0, count, begin, min64(begin + kChunk, p.V),
                             [&](int64_t row, F16 logits, int64_t id, int64_t width) {
                               float lanes[kPanel];
                               store(lanes, logits);
                               float* out = p.out + (row0 + row) * p.V + id;
                               std::memcpy(out, lanes, width * sizeof(float));
                             });
            });
          });
        });
      });
}

}  // namespace xpress::cpu::XPRESS_CPU_NAMESPACE
