// Tests of the emulated GPU itself: kernels with planted bugs, each of which it must catch, beside
// the same kernels without the bug. Runs as a program, under AddressSanitizer and
// UndefinedBehaviorSanitizer too (python_tests/test_emulator_machine.py).
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <string>
#include <vector>

#include "device/barrier.h"
#include "device/launch.h"
#include "device/memory.h"
#include "device/warp.h"
#include "kernels/products.cuh"

namespace xpress {
namespace {

using namespace device;

constexpr int kThreads = 128;
constexpr uint64_t kSeeds = 20;

int failures = 0;

void expect(bool holds, const std::string& promise) {
  std::printf("%s %s\n", holds ? "ok    " : "FAILED", promise.c_str());
  if (!holds) ++failures;
}

struct Params {
  const float* in;
  float* out;
  int64_t count;
};

// Runs a kernel on in = 0, 1, 2, ..., and gives what it wrote. `in` and `out` are declared with
// `declared` elements each.
std::vector<float> run(void (*kernel)(Params), const LaunchShape& shape, uint64_t seed,
                       int64_t count = 512, int64_t declared = 512) {
  std::vector<float> in(static_cast<size_t>(count)), out(static_cast<size_t>(count), -1.0f);
  for (size_t i = 0; i < in.size(); ++i) in[i] = static_cast<float>(i);
  emulator::forget_all();
  emulator::set_seed(seed);
  emulator::declare("in", in.data(), declared * 4, /*writable=*/false);
  emulator::declare("out", out.data(), declared * 4, /*writable=*/true);
  launch(kernel, shape, nullptr, Params{in.data(), out.data(), count});
  return out;
}

// Whether some seeds give another result than the first.
bool depends_on_the_order(void (*kernel)(Params), const LaunchShape& shape) {
  const auto bits = [](float value) { return float_to_bits(value); };
  const std::vector<float> first = run(kernel, shape, 0);
  for (uint64_t seed = 1; seed < kSeeds; ++seed) {
    const std::vector<float> other = run(kernel, shape, seed);
    for (size_t i = 0; i < first.size(); ++i) {
      if (bits(first[i]) != bits(other[i])) return true;
    }
  }
  return false;
}

// The message of the fault that a kernel ends with, or "".
std::string fault_of(void (*kernel)(Params), const LaunchShape& shape, uint64_t seed = 0) {
  try {
    run(kernel, shape, seed);
  } catch (const emulator::Fault& fault) {
    return fault.what();
  }
  return "";
}

void expect_fault(void (*kernel)(Params), const LaunchShape& shape, const std::string& words,
                  const std::string& promise) {
  const std::string fault = fault_of(kernel, shape);
  expect(fault.find(words) != std::string::npos, promise + ": " + fault);
}

float* floats() { return reinterpret_cast<float*>(shared_memory()); }

// --- barriers: every thread reads what another one wrote

template <bool kHasBarrier>
XPRESS_KERNEL(kThreads)
reverse_in_cta(Params p) {
  float* shared = floats();
  const int i = thread_index();
  shared[i] = load_global(p.in + i);
  if (kHasBarrier) cta_sync();
  store_global(p.out + i, shared[kThreads - 1 - i]);
}

template <bool kHasBarrier>
XPRESS_KERNEL(kThreads)
reverse_in_warp(Params p) {
  float* shared = floats();
  const int i = thread_index();
  shared[i] = load_global(p.in + i);
  if (kHasBarrier) warp_sync();
  store_global(p.out + i, shared[i ^ 31]);
}

// The second barrier, which keeps the buffer from being written while it is read.
template <bool kHasBarrier>
XPRESS_KERNEL(kThreads)
reuse_a_buffer(Params p) {
  float* shared = floats();
  const int i = thread_index();
  float sum = 0.0f;
  for (int step = 0; step < 3; ++step) {
    shared[i] = load_global(p.in + kThreads * step + i);
    cta_sync();
    sum += shared[kThreads - 1 - i];
    if (kHasBarrier) cta_sync();
  }
  store_global(p.out + i, sum);
}

XPRESS_KERNEL(kThreads) diverge_at_a_barrier(Params) {
  if (thread_index() < 40) cta_sync();
}

XPRESS_KERNEL(kThreads) diverge_in_a_warp(Params p) {
  const bool vote = lane_index() < 7 ? ballot(true) != 0 : shuffle(true, 0);
  store_global(p.out, vote ? 1.0f : 0.0f);
}

XPRESS_KERNEL(kThreads) leave_a_warp(Params p) {
  if (lane_index() == 31) return;
  store_global(p.out, static_cast<float>(ballot(true)));
}

XPRESS_KERNEL(kThreads) leave_a_cluster(Params) {
  if (cluster_rank() == 0) cluster_sync();
}

// --- asynchronous copies

template <bool kWaits>
XPRESS_KERNEL(kThreads)
copy_asynchronously(Params p) {
  float* shared = floats();
  const int i = thread_index();
  copy_async_16(shared + 4 * i, p.in + 4 * i);
  copy_async_commit();
  if (kWaits) copy_async_wait<0>();
  cta_sync();
  store_global(p.out + i, shared[kThreads - 1 - i]);
  copy_async_wait<0>();
}

// Waits for all groups but the newest, and so not for what it reads if it reads that.
template <int kPending>
XPRESS_KERNEL(kThreads)
copy_in_groups(Params p) {
  float* shared = floats();
  const int i = thread_index();
  for (int group = 0; group < 3; ++group) {
    copy_async_16(shared + 4 * (kThreads * group + i), p.in + 4 * i);
    copy_async_commit();
  }
  copy_async_wait<kPending>();
  cta_sync();
  store_global(p.out + i, shared[4 * (kThreads + i)]);
  copy_async_wait<0>();
}

XPRESS_KERNEL(kThreads) never_wait_for_copies(Params p) {
  copy_async_16(floats() + 4 * thread_index(), p.in);
}

XPRESS_KERNEL(kThreads) copy_nothing(Params p) {
  float* shared = floats();
  copy_async_16(shared + 4 * thread_index(), p.in + 4 * p.count, /*wanted=*/false);
  copy_async_commit();
  copy_async_wait<0>();
  store_global(p.out + thread_index(), shared[4 * thread_index()]);
}

// --- memory

XPRESS_KERNEL(kThreads) read_too_far(Params p) {
  store_global(p.out, load_global(p.in + p.count - kThreads + 1 + thread_index()));
}

XPRESS_KERNEL(kThreads) write_too_far(Params p) {
  store_global(p.out + p.count - kThreads + 1 + thread_index(), 1.0f);
}

XPRESS_KERNEL(kThreads) write_to_an_input(Params p) {
  store_global(const_cast<float*>(p.in) + thread_index(), 1.0f);
}

XPRESS_KERNEL(kThreads) read_misaligned(Params p) {
  const auto* at = reinterpret_cast<const Bytes16*>(p.in + thread_index());
  store_global(p.out, bits_to_float(load_global(at).word[0]));
}

XPRESS_KERNEL(kThreads) write_just_past_shared_memory(Params) { floats()[kThreads] = 1.0f; }

XPRESS_KERNEL(kThreads) write_before_shared_memory(Params) { floats()[-1 - thread_index()] = 1.0f; }

XPRESS_KERNEL(kThreads) write_far_past_shared_memory(Params) {
  floats()[1500 + thread_index()] = 1.0f;
}

XPRESS_KERNEL(kThreads) use_a_null_pointer(Params p) {
  volatile float* volatile null = nullptr;
  null[thread_index()] = static_cast<float>(p.count);
}

XPRESS_KERNEL(kThreads) read_what_nobody_wrote(Params p) {
  store_global(p.out + thread_index(), floats()[thread_index()]);
}

// --- clusters

template <bool kMaps>
XPRESS_KERNEL(kThreads)
read_the_neighbour(Params p) {
  float* shared = floats();
  const int i = thread_index(), rank = cluster_rank(), other = rank ^ 1;
  shared[i] = static_cast<float>(1000 * rank + i);
  cluster_sync();
  const float* theirs = kMaps ? cluster_map(shared, other) : shared;
  const float value = theirs[i];
  cluster_sync();
  store_global(p.out + kThreads * rank + i, value);
}

XPRESS_KERNEL(kThreads) read_a_neighbour_that_has_left(Params p) {
  float* shared = floats();
  shared[thread_index()] = 1.0f;
  cluster_sync();
  if (cluster_rank() == 1) return;
  for (int i = 0; i < 64; ++i) {
    cta_sync();
    store_global(p.out, *cluster_map(shared, 1));
  }
}

XPRESS_KERNEL(kThreads) map_beyond_the_cluster(Params) { *cluster_map(floats(), 2) = 1.0f; }

// --- the grid barrier

struct GridParams {
  GridBarrier* barrier;
  uint32_t* cells;  // one per CTA
  uint32_t* sums;   // one per CTA
  int rounds;
};

XPRESS_KERNEL(kThreads) add_up_in_rounds(GridParams p) {
  uint32_t sum = 0;
  for (int round = 0; round < p.rounds; ++round) {
    if (thread_index() == 0) store_global(p.cells + cta_index(), static_cast<uint32_t>(round));
    grid_sync(p.barrier);
    for (int64_t cta = 0; cta < cta_count(); ++cta) sum += load_global(p.cells + cta);
    grid_sync(p.barrier);
  }
  if (thread_index() == 0) store_global(p.sums + cta_index(), sum);
}

XPRESS_KERNEL(kThreads) skip_the_grid_barrier(GridParams p) {
  if (cta_index() == 0) grid_sync(p.barrier);
}

template <class Kernel>
std::vector<uint32_t> run_with_barrier(Kernel kernel, uint32_t generation, int64_t ctas) {
  GridBarrier barrier{0, generation};
  std::vector<uint32_t> cells(8, 77), sums(8, 77);
  emulator::forget_all();
  emulator::declare("barrier", &barrier, sizeof(barrier), true);
  emulator::declare("cells", cells.data(), 32, true);
  emulator::declare("sums", sums.data(), 32, true);
  LaunchShape shape{ctas, kThreads};
  shape.cooperative = true;
  launch(kernel, shape, nullptr, GridParams{&barrier, cells.data(), sums.data(), 5});
  sums.resize(static_cast<size_t>(ctas));
  return sums;
}

// --- the map of fragments

struct ProductParams {
  const bf16* a;  // [16, 32]
  const bf16* b;  // [8, 32]
  float* out;     // [16, 8]
};

template <bool kMapsAgree>
XPRESS_KERNEL(32)
multiply(ProductParams p) {
  using namespace kernels;
  const int g = lane_index() / 4, t = lane_index() % 4;
  const GlobalRows<bf16> a{p.a, 32}, b{p.b, 32};
  const int t_of_b = kMapsAgree ? t : 3 - t;
  float acc[4] = {};
  mma_step<bf16>(acc, a(g, 8 * t), a(g + 8, 8 * t), b(g, 8 * t_of_b));
  for_each_element(acc, [&](int row, int column, float value) {
    store_global(p.out + row * kProductColumns + column, value);
  });
}

// Whether a product of whole numbers is right.
template <bool kMapsAgree>
bool product_is_right() {
  std::vector<bf16> a(16 * 32), b(8 * 32);
  for (size_t i = 0; i < a.size(); ++i) a[i] = round_to<bf16>(static_cast<float>(i * 7 % 13));
  for (size_t i = 0; i < b.size(); ++i) b[i] = round_to<bf16>(static_cast<float>(i * 5 % 11));
  std::vector<float> out(16 * 8, -1.0f);
  emulator::forget_all();
  emulator::declare("a", a.data(), 16 * 32 * 2, false);
  emulator::declare("b", b.data(), 8 * 32 * 2, false);
  emulator::declare("out", out.data(), 16 * 8 * 4, true);
  launch(multiply<kMapsAgree>, {1, 32}, nullptr, ProductParams{a.data(), b.data(), out.data()});
  for (size_t row = 0; row < 16; ++row) {
    for (size_t column = 0; column < 8; ++column) {
      float sum = 0.0f;
      for (size_t k = 0; k < 32; ++k)
        sum += to_float(a[row * 32 + k]) * to_float(b[column * 32 + k]);
      if (out[row * 8 + column] != sum) return false;
    }
  }
  return true;
}

// --- numbers

bool halves_survive_a_round_trip() {
  for (uint32_t bits = 0; bits < 65536; ++bits) {
    const auto half = static_cast<uint16_t>(bits);
    const float value = emulator::half_to_float(half);
    if (value != value) continue;
    if (emulator::float_to_half(value) != half) return false;
  }
  return true;
}

bool bfloats_survive_a_round_trip() {
  for (uint32_t bits = 0; bits < 65536; ++bits) {
    const float value = bits_to_float(bits << 16);
    if (value == value && emulator::float_to_bfloat(value) != bits) return false;
  }
  return true;
}

void test_barriers() {
  const LaunchShape one{1, kThreads, 4 * kThreads};
  expect(!depends_on_the_order(reverse_in_cta<true>, one), "a CTA barrier makes an order");
  expect(depends_on_the_order(reverse_in_cta<false>, one), "a missing CTA barrier shows");
  expect(!depends_on_the_order(reverse_in_warp<true>, one), "a warp barrier makes an order");
  expect(depends_on_the_order(reverse_in_warp<false>, one), "a missing warp barrier shows");
  expect(!depends_on_the_order(reuse_a_buffer<true>, one), "a buffer may be used again");
  expect(depends_on_the_order(reuse_a_buffer<false>, one), "a buffer overwritten early shows");
  expect_fault(diverge_at_a_barrier, one, "deadlock", "a divergent barrier is reported");
  expect_fault(diverge_in_a_warp, one, "diverged", "a diverged warp is reported");
  expect_fault(leave_a_warp, one, "waits at ballot", "a missing lane is reported");
  expect_fault(leave_a_cluster, {2, kThreads, 0, 2}, "a cluster barrier",
               "a missing CTA of a cluster is reported");
}

void test_copies() {
  const LaunchShape one{1, kThreads, 16 * 3 * kThreads};
  const auto right = run(copy_asynchronously<true>, one, 0);
  expect(right[0] == 127.0f && right[127] == 0.0f, "an asynchronous copy arrives");
  const auto early = run(copy_asynchronously<false>, one, 0);
  expect(early[0] != early[0], "before its wait a copy has not arrived");
  expect(run(copy_in_groups<1>, one, 0)[5] == 20.0f, "the older groups have arrived");
  const float pending = run(copy_in_groups<2>, one, 0)[5];
  expect(pending != pending, "a pending group has not");
  expect_fault(never_wait_for_copies, one, "never waited", "copies in flight at the end show");
  expect(run(copy_nothing, one, 0)[5] == 0.0f, "a copy that is not wanted gives zeros");
}

void test_memory() {
  const LaunchShape one{1, kThreads, 4 * kThreads};
  expect_fault(read_too_far, one, "a load of 4 bytes out of bounds: byte 2048 of in",
               "a read out of bounds is a fault");
  expect_fault(write_too_far, one, "a store of 4 bytes out of bounds: byte 2048 of out",
               "a write out of bounds is a fault");
  expect_fault(write_to_an_input, one, "read-only", "a write to an input is a fault");
  expect_fault(read_misaligned, one, "misaligned", "a misaligned read is a fault");
  expect_fault(write_just_past_shared_memory, one, "wrote to byte 512",
               "a write past shared memory is a fault");
  const float nothing = run(read_what_nobody_wrote, one, 0)[0];
  expect(nothing != nothing, "shared memory starts as NaN");
  run(reverse_in_cta<true>, one, 0);
  int64_t loaded = 0, stored = 0;
  for (const auto& tensor : emulator::traffic()) {
    loaded += tensor.loaded;
    stored += tensor.stored;
  }
  expect(loaded == 512 && stored == 512, "bytes are counted");
}

void test_wild_pointers() {
  const LaunchShape one{1, kThreads, 4 * kThreads};
  expect_fault(write_before_shared_memory, one, "of the shared memory of CTA 0",
               "a write before shared memory is a fault");
  expect_fault(write_far_past_shared_memory, one, "of the shared memory of CTA 0",
               "a write far past shared memory is a fault");
  expect_fault(use_a_null_pointer, one, "no memory", "a null pointer is a fault");
  expect_fault(read_a_neighbour_that_has_left, {2, kThreads, 4 * kThreads, 2}, "has left",
               "shared memory of a CTA that has left is closed");
  expect(run(reverse_in_cta<true>, one, 0)[0] == 127.0f, "after a fault kernels run again");
}

void test_clusters() {
  const LaunchShape pair{2, kThreads, 4 * kThreads, 2};
  const auto mapped = run(read_the_neighbour<true>, pair, 0);
  expect(mapped[3] == 1003.0f && mapped[kThreads + 3] == 3.0f,
         "a mapped address is the neighbour's");
  expect(run(read_the_neighbour<false>, pair, 0)[3] == 3.0f, "an unmapped one is one's own");
  expect_fault(map_beyond_the_cluster, pair, "cluster of 2", "a map beyond the cluster is a fault");
}

void test_grid_barrier() {
  for (int64_t ctas : {1, 3, 8}) {
    for (uint32_t generation : {0u, 0xfffffffcu}) {
      const auto sums = run_with_barrier(add_up_in_rounds, generation, ctas);
      bool right = true;
      for (uint32_t sum : sums) right &= sum == 10 * ctas;
      expect(right, "a grid barrier holds, generation " + std::to_string(generation) + ", CTAs " +
                        std::to_string(ctas));
    }
  }
  std::string fault;
  try {
    run_with_barrier(skip_the_grid_barrier, 0, 3);
  } catch (const emulator::Fault& error) {
    fault = error.what();
  }
  expect(fault.find("a change that nobody makes") != std::string::npos,
         "waiting for ever is reported: " + fault);
}

void test_numbers() {
  expect(product_is_right<true>(), "a product with one map of k is right");
  expect(!product_is_right<false>(), "a wrong map of k shows");
  expect(halves_survive_a_round_trip(), "fp16 survives a round trip");
  expect(bfloats_survive_a_round_trip(), "bf16 survives a round trip");
}

int run_all() {
  test_barriers();
  test_copies();
  test_memory();
  test_wild_pointers();
  test_clusters();
  test_grid_barrier();
  test_numbers();
  std::printf("%d failed\n", failures);
  return failures == 0 ? 0 : 1;
}

}  // namespace
}  // namespace xpress

int main() { return xpress::run_all(); }
