// Tests of the launchers' choice of tiles and grids, which needs no GPU: that every element is
// computed by some CTA, that a CTA fits, and what the choice is at the sizes that matter. Runs as a
// program (python_tests/test_plans.py).
#include <cstdio>
#include <iterator>
#include <string>

#include "cuda/causal_mix_backward_plan.h"
#include "cuda/causal_mix_plan.h"
#include "cuda/fuse_mix_plan.h"
#include "cuda/jacobi_refine_plan.h"
#include "cuda/project_hidden_plan.h"
#include "cuda/readout_argmax_plan.h"
#include "cuda/refiner_mlp_plan.h"

namespace xpress::cuda {
namespace {

constexpr DeviceLimits kH200{132, 227 << 10, true};
constexpr DeviceLimits kSmall{24, 99 << 10, false};
constexpr DeviceLimits kTiny{2, 99 << 10, false};

int failures = 0;

void expect(bool holds, const std::string& promise) {
  if (holds) return;
  std::printf("FAILED %s\n", promise.c_str());
  ++failures;
}

void test_mixes() {
  for (int64_t B = 2; B <= 32; ++B) {
    for (int64_t r = 32; r <= 512; r += 32) {
      const CausalMixPlan mix = plan_causal_mix(3, B, r, kH200);
      const FuseMixPlan fuse = plan_fuse_mix(3, B, r, kH200);
      expect(mix.ctas * 32 == 3 * r && fuse.ctas * 32 == 3 * r, "a CTA per 32 channels of a block");
      expect(mix.threads <= 512 && fuse.threads <= 512, "mixes: at most 512 threads");
      const CausalMixBackwardPlan one = plan_causal_mix_backward(1, B, r, kH200);
      const CausalMixBackwardPlan many = plan_causal_mix_backward(9, B, r, kH200);
      expect(one.mixer.ctas == many.mixer.ctas, "grad_mixer: the grid does not depend on N");
      expect(one.mixer.ctas * 16 * 32 >= B * B * r, "grad_mixer: all pairs of slots have a CTA");
    }
  }
}

void test_project_hidden() {
  for (const DeviceLimits& limits : {kH200, kSmall, kTiny}) {
    for (const int64_t element_size : {2, 4}) {
      for (int64_t B = 2; B <= 32; ++B) {
        for (const int64_t N : {1, 2, 3, 9, 63, 64, 65, 1000}) {
          for (int64_t r = 32; r <= 512; r += 32) {
            const ProjectHiddenPlan plan = plan_project_hidden(N, B, r, element_size, limits);
            const std::string what = "project_hidden, N = " + std::to_string(N) +
                                     ", B = " + std::to_string(B) + ", r = " + std::to_string(r);
            expect(plan.group >= 1 && plan.group * B <= 16 * plan.row_tiles && plan.group <= 16,
                   what + ": a group is whole blocks that fit the tile");
            expect(plan.round >= 1 && plan.round <= kProjectRound, what + ": a round is bounded");
            const int64_t ctas = project_ctas(plan.round, r, plan);
            expect(ctas * plan.group * 8 * plan.column_tiles >= plan.round * r,
                   what + ": all columns of all blocks have a CTA");
            expect(element_size == 2 || plan.row_tiles <= 2, what + ": no large tile for fp32");
          }
        }
      }
    }
  }
  const ProjectHiddenPlan one = plan_project_hidden(1, 16, 256, 2, kH200);
  expect(one.row_tiles == 1 && project_ctas(1, 256, one) == 32, "project_hidden: N = 1 on 32 SMs");
  const ProjectHiddenPlan batch = plan_project_hidden(64, 16, 256, 2, kH200);
  expect(batch.row_tiles == 4 && batch.group == 4 && project_ctas(64, 256, batch) == 128,
         "project_hidden: N = 64 in large tiles on 128 SMs");
}

void test_refiner_mlp_product(const MlpProductPlan& plan, int64_t rows, int64_t columns,
                              int64_t width, const DeviceLimits& limits, const std::string& what) {
  expect(plan.row_tiles >= 1 && plan.row_tiles * plan.column_tiles <= 16,
         what + ": a CTA's warps hold its tiles");
  expect(columns % (8 * plan.column_tiles) == 0, what + ": column tiles come out even");
  const int64_t row_groups = (rows + 16 * plan.row_tiles - 1) / (16 * plan.row_tiles);
  expect(plan.ctas == row_groups * (columns / (8 * plan.column_tiles)),
         what + ": every tile has a CTA");
  expect(plan.chunk % 32 == 0 && plan.chunk >= 32 && plan.chunk <= width,
         what + ": a chunk is whole steps of k");
  expect(plan.shared_bytes <= limits.shared_bytes_per_cta, what + ": the tile fits");
}

void test_refiner_mlp() {
  for (const DeviceLimits& limits : {kH200, kSmall, kTiny}) {
    for (const int64_t element_size : {2, 4}) {
      for (const int64_t rows : {1, 15, 16, 17, 63, 64, 65, 144, 1024, 8192}) {
        for (int64_t r = 32; r <= 512; r += 32) {
          for (const int64_t m : {32, 96, 512, 1024, 4096}) {
            const std::string what = "refiner_mlp, rows = " + std::to_string(rows) +
                                     ", r = " + std::to_string(r) + ", m = " + std::to_string(m);
            const RefinerMlpPlan plan = plan_refiner_mlp(rows, r, m, element_size, limits);
            test_refiner_mlp_product(plan.hidden, rows, m, r, limits, what);
            test_refiner_mlp_product(plan.down, rows, r, m, limits, what);
            expect(plan.hidden.chunk == r, what + ": the rank is one chunk");
          }
        }
      }
    }
  }
  const RefinerMlpPlan one = plan_refiner_mlp(16, 256, 512, 2, kH200);
  expect(one.hidden.ctas == 64 && one.down.ctas == 32 && one.down.chunk == 512,
         "refiner_mlp: N = 1 on 64 and 32 SMs");
}

void test_readout() {
  constexpr int64_t kStructBytes = 2 << 10;
  for (const DeviceLimits& limits : {kH200, kSmall, kTiny}) {
    for (const int64_t V : {1, 7, 8191, 50257, 151936}) {
      for (int64_t r = 32; r <= 512; r += 32) {
        const ReadoutPlan stream = plan_readout_stream(V, r, kStructBytes, limits);
        const std::string size = "V = " + std::to_string(V) + ", r = " + std::to_string(r);
        expect(stream.ctas >= 1 && stream.ctas <= 2 * limits.num_sms,
               "streaming readout, " + size + ": two CTAs an SM");
        expect(2 * stream.shared_bytes <= limits.shared_bytes_per_cta,
               "streaming readout, " + size + ": two CTAs fit");
        for (const int64_t element_size : {2, 4}) {
          for (const int64_t rows : {1, 16, 17, 31, 120, 128, 129, 135, 240, 960, 7936}) {
            const ReadoutPlan plan =
                plan_readout_tiled(rows, V, r, element_size, kStructBytes, limits);
            const std::string what = "tiled readout, rows = " + std::to_string(rows) + ", " + size;
            expect(plan.stages == 2 || plan.stages == 3, what + ": a ring fits");
            expect(plan.chunk >= 32 && plan.chunk <= r && plan.chunk % 32 == 0,
                   what + ": a stage is whole steps of k");
            expect(plan.tile_rows >= 16 && plan.tile_rows <= 128 && plan.tile_rows % 16 == 0,
                   what + ": a tile is whole products");
            expect(plan.shared_bytes <= limits.shared_bytes_per_cta, what + ": a CTA fits");
            const int64_t tiles = (rows + plan.tile_rows - 1) / plan.tile_rows;
            expect(plan.ctas >= 1 && plan.ctas <= limits.num_sms, what + ": a CTA an SM");
            expect(plan.ctas <= tiles * ((V + 127) / 128), what + ": no CTA without a tile");
            expect(tiles * plan.tile_rows - rows < 16 * tiles, what + ": tiles of one height");
          }
        }
      }
    }
  }
  const ReadoutPlan one = plan_readout_stream(151936, 256, kStructBytes, kH200);
  expect(one.ctas == 264, "streaming readout: Qwen3-8B's head on all SMs");
  const ReadoutPlan batch = plan_readout_tiled(135, 151936, 256, 2, kStructBytes, kH200);
  expect(batch.tile_rows == 80 && batch.ctas == 132, "tiled readout: N = 9 in two equal tiles");
  const ReadoutPlan none =
      plan_readout_tiled(120, 151936, 512, 4, kStructBytes, {2, 16 << 10, false});
  expect(none.stages == 0, "tiled readout: what does not fit is said");
}

void test_jacobi_plan() {
  constexpr int64_t kFixedBytes = 8 << 10;
  for (const DeviceLimits& limits : {kH200, kSmall, kTiny}) {
    for (const int64_t element_size : {2, 4}) {
      for (int64_t B = 2; B <= 32; ++B) {
        for (int64_t r = 32; r <= 512; r += 32) {
          for (const int64_t m : {32, 96, 512, 1024, 4096}) {
            const JacobiPlan plan = plan_jacobi(B, r, m, element_size, kFixedBytes, limits);
            const std::string what = "jacobi_refine, B = " + std::to_string(B) +
                                     ", r = " + std::to_string(r) + ", m = " + std::to_string(m);
            expect(plan.cluster == (limits.has_clusters ? 8 : 1), what + ": CTAs of a block");
            expect(plan.chunk >= 32 && plan.chunk <= m && plan.chunk % 32 == 0,
                   what + ": a chunk of the hidden layer is whole steps");
            expect(plan.shared_bytes <= limits.shared_bytes_per_cta, what + ": a CTA fits");
          }
        }
      }
    }
  }
  expect(plan_jacobi(16, 256, 512, 2, kFixedBytes, kH200).chunk == 512,
         "jacobi_refine: the hidden layer of Qwen3-8B's head is one chunk");
  expect(plan_jacobi(16, 512, 512, 4, kFixedBytes, {2, 16 << 10, false}).chunk == 0,
         "jacobi_refine: what does not fit is said");
}

void test_jacobi_workspace() {
  for (const bool exact : {false, true}) {
    for (const int64_t top_c : {0, 1, 32, 1024}) {
      for (const int64_t N : {1, 3, 256}) {
        const JacobiShape shape{N, 16, 4096, 256, 512, top_c, exact};
        constexpr int64_t kScratch = 1000;
        alignas(128) static char base[128];
        const JacobiWorkspace w(base, shape, kScratch);
        const void* arrays[] = {w.context,
                                w.c,
                                w.z,
                                w.ids,
                                w.settled,
                                w.keys,
                                w.candidate_ids,
                                w.candidate_logits,
                                w.candidate_count,
                                w.project_scratch};
        const std::string what =
            "jacobi_workspace, N = " + std::to_string(N) + ", C = " + std::to_string(top_c);
        for (const void* array : arrays) {
          expect(reinterpret_cast<uintptr_t>(array) % 128 == 0, what + ": aligned arrays");
        }
        expect(w.capacity == std::max<int64_t>(top_c, 1) + (exact ? 15 : 0),
               what + ": room for the candidates that exact mode adds");
        const int64_t most = N * 16 * 256 * 12 + N * 15 * w.capacity * 12 + N * 16 * 24 + kScratch +
                             128 * static_cast<int64_t>(std::size(arrays));
        expect(w.bytes <= most, what + ": no more than its header says");
      }
    }
  }
}

}  // namespace
}  // namespace xpress::cuda

int main() {
  xpress::cuda::test_mixes();
  xpress::cuda::test_project_hidden();
  xpress::cuda::test_refiner_mlp();
  xpress::cuda::test_readout();
  xpress::cuda::test_jacobi_plan();
  xpress::cuda::test_jacobi_workspace();
  return xpress::cuda::failures == 0 ? 0 : 1;
}
