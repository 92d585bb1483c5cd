// The readout of many rows: base + W_r z for every row and id, as the best key per row
// (readout_argmax) or as the logits themselves (refined_logits).
//
// A CTA owns a tile of up to 128 rows, whose z it keeps in shared memory, and walks its share of
// the vocabulary in tiles of 128 ids. W_r comes through a ring of shared-memory stages, filled by
// asynchronous copies ahead of the products. So W_r is read once per tile of rows, and by all tiles
// at about the same time: the CTAs of one stripe of the vocabulary, one for each tile of rows, have
// neighbouring numbers and run together, so that all but the first find their piece in L2.
//
// The products are those of all other kernels (products.cuh), 16 rows by 8 ids at a time: with
// eight warps as 2 by 4, a warp has every other 16 rows and a quarter of the ids, 4 by 4 products
// of its own. A tile of rows that is not full skips the 16 rows that hold none. z of 16 bits lies
// in shared memory as the tensor cores want it, rows g and g + 8 woven together, so that a load
// fills the registers of one instruction and nothing is moved between. With fp32 weights the same
// walk is done with chains of fused multiply-adds.
//
// From a few dozen blocks on it is bound by arithmetic: N = 64 blocks of Qwen3-8B's head are 75
// GFLOP, 95 us at the 790 TFLOP/s that an H200 reaches, while the bytes (W_r once, 4.6 MB of base
// logits a block) take 86 us.
#pragma once

#include "kernels/readout.cuh"

namespace xpress::kernels {

struct ReadoutTiled {
  static constexpr int kWarps = 8;
  static constexpr int kThreads = 32 * kWarps;
  static constexpr int kRowWarps = 2;
  static constexpr int kColumnWarps = kWarps / kRowWarps;
  static constexpr int kRows = 128;                                           // of a tile, at most
  static constexpr int kIds = 128;                                            // of a tile
  static constexpr int kRowTiles = kRows / kProductRows / kRowWarps;          // of a warp
  static constexpr int kColumnTiles = kIds / kProductColumns / kColumnWarps;  // of a warp
  static_assert(kRowTiles == 4, "as many cases where the products are made");

  template <class T>
  struct Params {
    ReadoutRows rows;
    int64_t V;
    int r;
    int tile_rows;     // rows of a tile, a multiple of 16
    int chunk;         // k of a stage, a multiple of 32
    int stages;        // of the ring
    const T* readout;  // [V, r]
    uint64_t* keys;    // [N * D], or null
    float* logits;     // [N * D, V], or null
  };

  struct Shared {
    int64_t rows[kRows];
    int64_t scratch[kWarps];
    // then z (TiledLatents), then the ring [stages, kIds, padded_stride(chunk)]
  };
};

// z of a tile of rows in shared memory. fp32: rows of padded_stride(r). 16 bits: per 16 rows and 32
// k the two fragments of mma_step(), 16 bytes of each lane in the order of lanes, which is also
// free of bank conflicts.
template <class T>
struct TiledLatents {
  static constexpr bool kIsWoven = sizeof(T) == 2;

  T* data;
  int r;

  // Elements that `rows` rows, a multiple of 16, take.
  XPRESS_DEVICE int size(int rows) const { return rows * (kIsWoven ? r : padded_stride<T>(r)); }

  XPRESS_DEVICE T* at(int row, int k) const {
    if constexpr (kIsWoven) {
      const int lane = row % 8 * 4 + k % 32 / 8, word = k % 8 / 2;  // of the lane's 16 bytes at 8t
      const int element = (word % 2 * 2 + row / 8 % 2) * 2 + k % 2;
      return fragment(row / 16, k / 32, word / 2, lane) + element;
    } else {
      return data + row * padded_stride<T>(r) + k;
    }
  }

  // Of 16 rows, 32 k and product i of these: the 16 bytes of a lane.
  XPRESS_DEVICE T* fragment(int rows_of_16, int step, int i, int lane) const {
    return data + (((rows_of_16 * (r / 32) + step) * 2 + i) * 32 + lane) * 8;
  }
};

// acc += the products of a warp's first kActive groups of 16 rows, which are kRowWarps groups apart
// from `group` on, and its ids, whose k = k0 ... k0+width-1 are in a stage of the ring.
template <class T, int kActive>
XPRESS_DEVICE void multiply_stage(
    float (&acc)[ReadoutTiled::kRowTiles][ReadoutTiled::kColumnTiles][4], const TiledLatents<T>& z,
    int group, int k0, int width, const T* stage, int stride) {
  using namespace device;
  constexpr int kRowWarps = ReadoutTiled::kRowWarps, kColumnTiles = ReadoutTiled::kColumnTiles;
  if constexpr (TiledLatents<T>::kIsWoven) {
    const int g = lane_index() / 4, t = lane_index() % 4;
    XPRESS_UNROLL_BY(2)
    for (int k = 0; k < width; k += kProductStep) {
      Bytes16 columns[kColumnTiles];
      XPRESS_UNROLL
      for (int j = 0; j < kColumnTiles; ++j) {
        columns[j] = SharedRows<T>{stage, stride}(j * kProductColumns + g, k + 8 * t);
      }
      XPRESS_UNROLL
      for (int i = 0; i < 2 * kActive; ++i) {
        const Bytes16 rows = *reinterpret_cast<const Bytes16*>(
            z.fragment(group + i / 2 * kRowWarps, (k0 + k) / kProductStep, i % 2, lane_index()));
        XPRESS_UNROLL
        for (int j = 0; j < kColumnTiles; ++j) {
          const uint32_t pair[2] = {columns[j].word[i % 2 * 2], columns[j].word[i % 2 * 2 + 1]};
          mma_16x8x16<T>(acc[i / 2][j], rows.word, pair);
        }
      }
    }
  } else {
    for (int k = 0; k < width; k += kProductStep) {
      XPRESS_UNROLL
      for (int i = 0; i < kActive; ++i) {
        const SharedRows<T> rows{z.at((group + i * kRowWarps) * kProductRows, k0),
                                 padded_stride<T>(z.r)};
        XPRESS_UNROLL
        for (int j = 0; j < kColumnTiles; ++j) {
          product_step<T>(acc[i][j], rows,
                          SharedRows<T>{stage + j * kProductColumns * stride, stride}, k);
        }
      }
    }
  }
}

// Starts to copy ids id0 ... id0+127, k of the given chunk, into one stage of the ring.
template <class T>
XPRESS_DEVICE void fill_stage(const ReadoutTiled::Params<T>& p, int64_t id0, int chunk, T* stage) {
  constexpr int kElements = 16 / sizeof(T);
  const int stride = padded_stride<T>(p.chunk), k0 = chunk * p.chunk;
  const int width = p.r - k0 < p.chunk ? p.r - k0 : p.chunk, pieces = width / kElements;
  for (int i = device::thread_index(); i < ReadoutTiled::kIds * pieces;
       i += ReadoutTiled::kThreads) {
    const int row = i / pieces, k = i % pieces * kElements;
    const bool wanted = id0 + row < p.V;
    device::copy_async_16(stage + row * stride + k,
                          p.readout + (wanted ? id0 + row : 0) * p.r + k0 + k, wanted);
  }
}

template <class T>
XPRESS_LARGE_KERNEL(ReadoutTiled::kThreads)
readout_tiled_kernel(ReadoutTiled::Params<T> p) {
  using namespace device;
  using Kernel = ReadoutTiled;
  auto& shared = *reinterpret_cast<Kernel::Shared*>(shared_memory());
  const TiledLatents<T> z{reinterpret_cast<T*>(shared_memory() + sizeof(Kernel::Shared)), p.r};
  const int ring_stride = padded_stride<T>(p.chunk);
  T* ring = z.data + z.size(p.tile_rows);

  // Which rows, and which stripe of the vocabulary.
  const int64_t total = find_rows(p.rows, 0, 0, shared.rows, shared.scratch);
  if (total == 0) return;
  const int64_t row_tiles = (total + p.tile_rows - 1) / p.tile_rows;
  // A grid smaller than the number of tiles takes several, one after another.
  for (int64_t tile = cta_index() % row_tiles; tile < row_tiles; tile += cta_count()) {
    const int64_t first = tile * p.tile_rows;
    const int count = static_cast<int>(total - first < p.tile_rows ? total - first : p.tile_rows);
    cta_sync();  // the rows and the ring of the tile before are no longer read
    find_rows(p.rows, first, count, shared.rows, shared.scratch);
    copy_latents<T>(p.rows.z, p.rows.D, shared.rows, count, p.tile_rows, p.r,
                    [&](int row, int k) { return z.at(row, k); });

    const int64_t stripe = cta_index() / row_tiles;
    const int64_t stripes =
        cta_count() < row_tiles ? 1 : (cta_count() - tile + row_tiles - 1) / row_tiles;
    const int64_t id_tiles = (p.V + Kernel::kIds - 1) / Kernel::kIds;
    const int chunks = (p.r + p.chunk - 1) / p.chunk;
    const int64_t own_tiles = stripe < id_tiles ? (id_tiles - stripe + stripes - 1) / stripes : 0;
    const int64_t steps = own_tiles * chunks;
    const auto first_id = [&](int64_t step) {
      return (stripe + step / chunks * stripes) * Kernel::kIds;
    };
    const auto fill = [&](int64_t step) {
      if (step < steps) {
        fill_stage(p, first_id(step), static_cast<int>(step % chunks),
                   ring + step % p.stages * Kernel::kIds * ring_stride);
      }
      copy_async_commit();
    };
    for (int step = 0; step < p.stages - 1; ++step) fill(step);

    const int row_warp = warp_index() % Kernel::kRowWarps;
    const int column0 = warp_index() / Kernel::kRowWarps * Kernel::kColumnTiles * kProductColumns;
    const int g = lane_index() / 4, t = lane_index() % 4;
    // The rows of the warp's i-th product.
    const auto tile_row = [&](int i) { return (i * Kernel::kRowWarps + row_warp) * kProductRows; };
    // How many of them hold rows. The count is a constant where products are made: a test before
    // each would keep loads from being ahead of products.
    int active = 0;
    while (active < Kernel::kRowTiles && tile_row(active) < count) ++active;
    uint64_t best[Kernel::kRowTiles][2] = {};
    float acc[Kernel::kRowTiles][Kernel::kColumnTiles][4];
    for (int64_t step = 0; step < steps; ++step) {
      const int chunk = static_cast<int>(step % chunks);
      if (p.stages == 3) {
        copy_async_wait<1>();
      } else {
        copy_async_wait<0>();
      }
      cta_sync();  // the stage has arrived, and the one before is no longer read
      fill(step + p.stages - 1);
      if (chunk == 0) {
        XPRESS_UNROLL
        for (int i = 0; i < Kernel::kRowTiles; ++i) {
          XPRESS_UNROLL
          for (int j = 0; j < 4 * Kernel::kColumnTiles; ++j) acc[i][j / 4][j % 4] = 0.0f;
        }
      }
      const T* stage = ring + step % p.stages * Kernel::kIds * ring_stride + column0 * ring_stride;
      const int k0 = chunk * p.chunk, width = p.r - k0 < p.chunk ? p.r - k0 : p.chunk;
      const auto multiply = [&](auto tiles) {
        multiply_stage<T, decltype(tiles)::value>(acc, z, row_warp, k0, width, stage, ring_stride);
      };
      switch (active) {
        case 4:
          multiply(std::integral_constant<int, 4>{});
          break;
        case 3:
          multiply(std::integral_constant<int, 3>{});
          break;
        case 2:
          multiply(std::integral_constant<int, 2>{});
          break;
        case 1:
          multiply(std::integral_constant<int, 1>{});
          break;
        default:
          break;
      }
      if (chunk + 1 < chunks) continue;

      const int64_t id0 = first_id(step) + column0 + 2 * t;
      with_type(p.rows.base_logits.dtype, [&](auto* type) {
        using Base = std::remove_pointer_t<decltype(type)>;
        XPRESS_UNROLL
        for (int i = 0; i < 2 * Kernel::kRowTiles; ++i) {  // rows g and g + 8 of each product
          const int row = tile_row(i / 2) + g + i % 2 * 8;
          if (row >= count) continue;
          const Base* base = row_of<Base>(p.rows.base_logits, shared.rows[row], p.rows.D);
          XPRESS_UNROLL
          for (int j = 0; j < 2 * Kernel::kColumnTiles; ++j) {
            const int64_t id = id0 + j / 2 * kProductColumns + j % 2;
            if (id >= p.V) continue;
            const float logit =
                to_float(load_global(base + id)) + acc[i / 2][j / 2][i % 2 * 2 + j % 2];
            if (p.logits != nullptr) {
              store_global(p.logits + shared.rows[row] * p.V + id, logit);
            } else {
              best[i / 2][i % 2] = max(best[i / 2][i % 2], argmax_key(logit, id));
            }
          }
        }
      });
    }
    copy_async_wait<0>();
    if (p.logits != nullptr) continue;
    XPRESS_UNROLL
    for (int i = 0; i < 2 * Kernel::kRowTiles; ++i) {
      const uint64_t key = row_max(best[i / 2][i % 2]);
      const int row = tile_row(i / 2) + g + i % 2 * 8;
      if (t == 0 && row < count && key != 0) atomic_max(p.keys + shared.rows[row], key);
    }
  }
}

}  // namespace xpress::kernels
