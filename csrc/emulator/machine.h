// An emulated GPU: runs kernels of csrc/kernels on the CPU, thread by thread, so that they can be
// tested where there is no GPU. docs/kernels.md says what it can see and what it cannot.
//
// Every GPU thread is a fiber with a stack of its own. One fiber runs at a time, until it must wait
// for others (a barrier, a warp-wide operation) or reaches a point where the machine may switch;
// which warp runs next, and its lanes in which order, is drawn from a seeded generator. So code
// that lacks a barrier gives other results with other seeds, and every run can be repeated.
//
// This header is what device/*.h needs; tests use it through module.cpp.
#pragma once

#include <cstdint>
#include <cstring>
#include <functional>
#include <stdexcept>
#include <string>
#include <vector>

namespace xpress::emulator {

// What a kernel did that no kernel may do. The launch that did it is abandoned.
struct Fault : std::runtime_error {
  using std::runtime_error::runtime_error;
};

// --- for the host

struct Grid {
  int64_t ctas;
  int threads;
  int64_t shared_bytes;
  int cluster;
  bool cooperative;
};

// Bytes that kernels loaded from and stored to a declared tensor, as they asked for them.
struct Traffic {
  std::string name;
  int64_t loaded, stored;
};

// Chooses the order in which fibers run from now on.
void set_seed(uint64_t seed);

// Global memory is what has been declared: any other access is a fault, and so is a store to
// read-only memory.
void declare(const std::string& name, const void* begin, int64_t bytes, bool writable);
void forget_all();

// The traffic since the declaration, in the order of declarations.
std::vector<Traffic> traffic();

// Runs `thread` once per thread of the grid. Throws Fault.
void run_grid(const Grid& grid, const std::function<void()>& thread);

// --- for device/*.h: the running thread

struct Place {
  int thread;
  int64_t cta;
  char* shared;
};
extern const Place* here;      // of the running thread
extern const Grid* this_grid;  // the one that runs

inline int thread_index() { return here->thread; }
inline int thread_count() { return this_grid->threads; }
inline int64_t cta_index() { return here->cta; }
inline int64_t cta_count() { return this_grid->ctas; }
inline char* shared_memory() { return here->shared; }

void cta_barrier();
int cluster_size();
int cluster_rank();
void cluster_barrier();
void* cluster_map(void* shared, int rank);

void check_load(const void* address, int64_t bytes);
void check_store(const void* address, int64_t bytes);
void check_atomic(const void* address, int64_t bytes);

void copy_async(void* shared, const void* global, int64_t bytes, bool wanted);
void copy_async_commit();
void copy_async_wait(int pending);

// Lets other threads run, if the draw says so.
void maybe_switch();

// What a thread calls each time that it looks for a change that another is to make: lets others
// run. A fault if all have long stopped changing anything.
void spin();

// Waits until every lane of `mask` has called this with the same `what`; then `compute` runs once,
// with each lane's operand.
void warp_collective(uint32_t mask, const char* what, void* operand,
                     void (*compute)(void* const operands[32]));

void warp_sync(uint32_t mask);
uint32_t ballot(uint32_t mask, bool predicate);
void mma_16x8x16(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2], bool is_bfloat);

template <class T>
T shuffle(uint32_t mask, T value, int source) {
  struct Operand {
    T value, result;
    int source;
  } operand{value, value, source};
  warp_collective(mask, "shuffle", &operand, [](void* const operands[32]) {
    for (int lane = 0; lane < 32; ++lane) {
      if (operands[lane] == nullptr) continue;
      auto* to = static_cast<Operand*>(operands[lane]);
      const auto* from = static_cast<const Operand*>(operands[to->source & 31]);
      if (from != nullptr) to->result = from->value;
    }
  });
  return operand.result;
}

float half_to_float(uint16_t bits);
uint16_t float_to_half(float value);
uint16_t float_to_bfloat(float value);

}  // namespace xpress::emulator
