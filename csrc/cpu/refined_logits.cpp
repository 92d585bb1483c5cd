// refined_logits: s + W_r z for the rows that a caller really needs. The one operator that writes
// [rows, V]. The panel and its accumulation are those of readout_argmax (readout.h, dots.h).
#include "parallel.h"
#include "readout.h"

namespace xpress::cpu::XPRESS_CPU_NAMESPACE {

namespace {

template <class T, class S>
void write_chunk(const RefinedLogitsParams& p, const T* readout, const S* type, int64_t begin,
                 const float* const* z, const void* const* base, int64_t rows, float* out) {
  const int64_t end = min64(begin + kChunk, p.V);
  for (int64_t id = begin; id < end; id += kPanel) {
    const int64_t count = min64(kPanel, end - id);
    logits_of_panel(readout + id * p.r, p.r, id, count, z, base, rows, type,
                    after_panel(readout, p.V, p.r, id, rows), [&](int64_t j, F16 logits) {
                      float lanes[kPanel];
                      store(lanes, logits);
                      std::memcpy(out + j * p.V + id, lanes, count * sizeof(float));
                    });
  }
}

}  // namespace

void refined_logits(const RefinedLogitsParams& p, void* scratch) {
  for_each_z_group(p.z, p.R, p.R, p.r, p.base_logits, scratch,
                   [&](int64_t row0, int64_t rows, const float* const* z, const void* const* base) {
                     with_type(p.weight_dtype, p.readout, [&](auto* readout) {
                       with_type(p.base_logits.dtype, nullptr, [&](auto* type) {
                         parallel_items(ceil_div(p.V, kChunk), [&](int64_t chunk) {
                           write_chunk(p, readout, type, chunk * kChunk, z, base, rows,
                                       p.out + row0 * p.V);
                         });
                       });
                     });
                   });
}

}  // namespace xpress::cpu::XPRESS_CPU_NAMESPACE
