// The scheduler of the emulated GPU.
//
// run_grid() starts clusters in random order, a few at a time (all at once for a cooperative grid),
// and then repeats: draw a fiber that can run, switch to it, until none is left. A fiber that waits
// is not in the list `ready`; whoever completes what it waits for puts it back. If the list is
// empty while fibers still wait, no one will ever wake them: that is a deadlock, and it is reported
// with the place where each of them waits.
#include "emulator/machine.h"

#include <setjmp.h>
#include <sys/mman.h>
#include <ucontext.h>

#include <algorithm>
#include <cstdlib>
#include <deque>
#include <map>
#include <memory>
#include <sstream>

namespace xpress::emulator {

namespace {

constexpr int64_t kStackBytes = 64 << 10;
constexpr int64_t kMaxSharedBytes = 227 << 10;
constexpr int64_t kGuardBytes = 256;  // before and after shared memory
constexpr int kResidentClusters = 2;  // of a grid that is not cooperative
constexpr unsigned char kGuard = 0xa5;
constexpr unsigned char kPoison = 0xff;  // a NaN in every floating-point type

struct Cta;

struct AsyncCopy {
  void* shared;
  const void* global;
  int64_t bytes;
  bool wanted;
};

// Where a thread of execution goes on. ucontext makes the first entry into a new stack; later
// switches are plain jumps, since swapcontext calls the kernel each time.
struct Context {
  ucontext_t entry;
  jmp_buf place;
  bool started = true;
};

void switch_context(Context* from, Context* to) {
  if (_setjmp(from->place) != 0) return;
  if (to->started) _longjmp(to->place, 1);
  to->started = true;
  setcontext(&to->entry);
}

struct Fiber {
  Context context;
  void* stack = nullptr;
  Cta* cta = nullptr;
  int thread = 0;
  bool finished = false;
  const char* waiting = nullptr;  // for what, in words
  std::vector<AsyncCopy> open_group;
  std::deque<std::vector<AsyncCopy>> groups;
};

struct Warp {
  uint32_t mask = 0, arrived = 0;
  const char* what = nullptr;
  void* operands[32] = {};
  Fiber* lanes[32] = {};
};

struct Cluster;

struct Cta {
  int64_t index = 0;
  int rank = 0;
  Cluster* cluster = nullptr;
  std::vector<char> memory;  // guard, shared memory, guard
  char* shared = nullptr;
  std::vector<Fiber*> fibers;
  std::vector<Warp> warps;
  std::vector<Fiber*> at_barrier;
};

struct Cluster {
  std::vector<std::unique_ptr<Cta>> ctas;
  std::vector<Fiber*> at_barrier;
  int64_t running = 0;
};

struct Region {
  std::string name;
  const char* begin;
  const char* end;
  bool writable;
  int64_t loaded = 0, stored = 0;
};

struct Machine {
  uint64_t random = 0x9e3779b97f4a7c15u;
  std::vector<Region> regions;
  size_t last_region = 0;

  // The launch that runs.
  Grid grid{};
  const std::function<void()>* thread = nullptr;
  Context scheduler;
  Fiber* current = nullptr;
  std::vector<Fiber*> ready;
  std::vector<std::unique_ptr<Cluster>> resident;
  std::string fault;

  std::vector<Fiber*> spare;  // finished fibers, kept for their stacks

  uint64_t draw() {  // xorshift64*
    random ^= random >> 12;
    random ^= random << 25;
    random ^= random >> 27;
    return random * 0x2545f4914f6cdd1du;
  }
  uint64_t draw_below(uint64_t limit) { return (draw() >> 32) * limit >> 32; }
};

thread_local Machine machine;

// Ends the launch from inside a fiber; does not return.
[[noreturn]] void fail(const std::string& what) {
  std::ostringstream text;
  text << "CTA " << machine.current->cta->index << ", thread " << machine.current->thread << ": "
       << what;
  machine.fault = text.str();
  switch_context(&machine.current->context, &machine.scheduler);
  std::abort();
}

void wait(const char* what) {
  Fiber* fiber = machine.current;
  fiber->waiting = what;
  switch_context(&fiber->context, &machine.scheduler);
}

void wake(Fiber* fiber) {
  fiber->waiting = nullptr;
  machine.ready.push_back(fiber);
}

// Waits until `expected` fibers are in `list`; the last one wakes the others.
void meet(std::vector<Fiber*>* list, size_t expected, const char* what) {
  list->push_back(machine.current);
  if (list->size() < expected) return wait(what);
  std::vector<Fiber*> all;
  all.swap(*list);
  for (Fiber* fiber : all) wake(fiber);
  switch_context(&machine.current->context, &machine.scheduler);
}

Region* find_region(const void* address, int64_t bytes) {
  const char* begin = static_cast<const char*>(address);
  const auto holds = [&](const Region& r) { return begin >= r.begin && begin + bytes <= r.end; };
  if (machine.last_region < machine.regions.size() && holds(machine.regions[machine.last_region])) {
    return &machine.regions[machine.last_region];
  }
  for (size_t i = 0; i < machine.regions.size(); ++i) {
    if (holds(machine.regions[i])) {
      machine.last_region = i;
      return &machine.regions[i];
    }
  }
  return nullptr;
}

// The declared tensor nearest to a bad address, for the report.
std::string describe(const void* address) {
  const char* at = static_cast<const char*>(address);
  std::ostringstream text;
  int64_t nearest = INT64_MAX;
  for (const Region& r : machine.regions) {
    const int64_t distance = at < r.begin ? r.begin - at : (at >= r.end ? at - r.end + 1 : 0);
    if (distance >= nearest) continue;
    nearest = distance;
    text.str("");
    text << "byte " << at - r.begin << " of " << r.name << ", which has " << r.end - r.begin;
  }
  return nearest == INT64_MAX ? "an address outside every tensor" : text.str();
}

Region* checked_region(const void* address, int64_t bytes, const char* what) {
  if (reinterpret_cast<uintptr_t>(address) % static_cast<uintptr_t>(bytes) != 0) {
    fail(std::string(what) + " of " + std::to_string(bytes) +
         " bytes is misaligned: " + describe(address));
  }
  Region* region = find_region(address, bytes);
  if (region == nullptr) {
    fail(std::string(what) + " of " + std::to_string(bytes) +
         " bytes out of bounds: " + describe(address));
  }
  return region;
}

void complete(const std::vector<AsyncCopy>& group) {
  for (const AsyncCopy& copy : group) {
    if (copy.wanted) {
      std::memcpy(copy.shared, copy.global, static_cast<size_t>(copy.bytes));
    } else {
      std::memset(copy.shared, 0, static_cast<size_t>(copy.bytes));
    }
  }
}

void enter_fiber() {
  for (;;) {
    (*machine.thread)();
    Fiber* fiber = machine.current;
    fiber->finished = true;
    switch_context(&fiber->context, &machine.scheduler);
  }
}

Fiber* take_fiber() {
  if (!machine.spare.empty()) {
    Fiber* fiber = machine.spare.back();
    machine.spare.pop_back();
    return fiber;
  }
  auto* fiber = new Fiber;
  fiber->stack =
      mmap(nullptr, kStackBytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (fiber->stack == MAP_FAILED) throw std::bad_alloc();
  ucontext_t* entry = &fiber->context.entry;
  getcontext(entry);
  entry->uc_stack.ss_sp = fiber->stack;
  entry->uc_stack.ss_size = kStackBytes;
  entry->uc_link = nullptr;
  makecontext(entry, enter_fiber, 0);
  fiber->context.started = false;
  return fiber;
}

void discard(Fiber* fiber) {
  munmap(fiber->stack, kStackBytes);
  delete fiber;
}

void start_cluster(int64_t index) {
  const Grid& grid = machine.grid;
  auto cluster = std::make_unique<Cluster>();
  for (int rank = 0; rank < grid.cluster; ++rank) {
    auto cta = std::make_unique<Cta>();
    cta->index = index * grid.cluster + rank;
    cta->rank = rank;
    cta->cluster = cluster.get();
    cta->memory.resize(static_cast<size_t>(grid.shared_bytes + 2 * kGuardBytes + 1024));
    std::memset(cta->memory.data(), kGuard, cta->memory.size());
    const auto base = reinterpret_cast<uintptr_t>(cta->memory.data()) + kGuardBytes;
    cta->shared = reinterpret_cast<char*>((base + 1023) / 1024 * 1024);
    std::memset(cta->shared, kPoison, static_cast<size_t>(grid.shared_bytes));
    cta->warps.resize(static_cast<size_t>(grid.threads + 31) / 32);
    for (int thread = 0; thread < grid.threads; ++thread) {
      Fiber* fiber = take_fiber();
      fiber->cta = cta.get();
      fiber->thread = thread;
      fiber->finished = false;
      fiber->waiting = nullptr;
      cta->fibers.push_back(fiber);
      cta->warps[static_cast<size_t>(thread / 32)].lanes[thread % 32] = fiber;
      machine.ready.push_back(fiber);
    }
    cluster->running += grid.threads;
    cluster->ctas.push_back(std::move(cta));
  }
  machine.resident.push_back(std::move(cluster));
}

void check_guards(const Cta& cta) {
  const char* end = cta.shared + machine.grid.shared_bytes;
  for (int64_t i = 1; i <= kGuardBytes; ++i) {
    if (static_cast<unsigned char>(cta.shared[-i]) != kGuard ||
        static_cast<unsigned char>(end[i - 1]) != kGuard) {
      throw Fault("CTA " + std::to_string(cta.index) + " wrote outside its shared memory");
    }
  }
}

void finish_cluster(Cluster* cluster) {
  for (const auto& cta : cluster->ctas) {
    for (Fiber* fiber : cta->fibers) {
      fiber->open_group.clear();
      fiber->groups.clear();
      machine.spare.push_back(fiber);
    }
    check_guards(*cta);
  }
  auto at = std::find_if(machine.resident.begin(), machine.resident.end(),
                         [&](const auto& c) { return c.get() == cluster; });
  machine.resident.erase(at);
}

// After a fault fibers are in the middle of things: none can be used again.
void abandon() {
  for (const auto& cluster : machine.resident) {
    for (const auto& cta : cluster->ctas) {
      for (Fiber* fiber : cta->fibers) discard(fiber);
    }
  }
  machine.resident.clear();
  machine.ready.clear();
}

std::string deadlock_report() {
  std::ostringstream text;
  text << "deadlock:";
  for (const auto& cluster : machine.resident) {
    for (const auto& cta : cluster->ctas) {
      std::map<std::string, std::vector<int>> places;
      for (Fiber* fiber : cta->fibers) {
        places[fiber->finished ? "has left" : std::string("waits at ") + fiber->waiting].push_back(
            fiber->thread);
      }
      for (const auto& [place, threads] : places) {
        text << " CTA " << cta->index << ": " << threads.size() << " threads (first "
             << threads.front() << ") " << place << ";";
      }
    }
  }
  return text.str();
}

}  // namespace

void set_seed(uint64_t seed) {
  machine.random = (seed + 1) * 0x9e3779b97f4a7c15u;
  for (int i = 0; i < 4; ++i) machine.draw();
}

void declare(const std::string& name, const void* begin, int64_t bytes, bool writable) {
  const char* first = static_cast<const char*>(begin);
  machine.regions.push_back({name, first, first + bytes, writable});
}

void forget_all() {
  machine.regions.clear();
  machine.last_region = 0;
}

std::vector<Traffic> traffic() {
  std::vector<Traffic> all;
  for (const Region& r : machine.regions) all.push_back({r.name, r.loaded, r.stored});
  return all;
}

void run_grid(const Grid& grid, const std::function<void()>& thread) {
  if (grid.ctas < 1 || grid.threads < 1 || grid.threads > 1024 || grid.threads % 32 != 0) {
    throw Fault("a launch of " + std::to_string(grid.ctas) + " CTAs of " +
                std::to_string(grid.threads) + " threads");
  }
  if (grid.shared_bytes < 0 || grid.shared_bytes > kMaxSharedBytes) {
    throw Fault("a launch with " + std::to_string(grid.shared_bytes) +
                " bytes of shared memory; a CTA has at most " + std::to_string(kMaxSharedBytes));
  }
  if (grid.cluster < 1 || grid.cluster > 8 || grid.ctas % grid.cluster != 0) {
    throw Fault("a launch of " + std::to_string(grid.ctas) + " CTAs in clusters of " +
                std::to_string(grid.cluster));
  }
  machine.grid = grid;
  machine.thread = &thread;
  machine.fault.clear();
  std::vector<int64_t> waiting(static_cast<size_t>(grid.ctas / grid.cluster));
  for (size_t i = 0; i < waiting.size(); ++i) waiting[i] = static_cast<int64_t>(i);
  const size_t limit = grid.cooperative ? waiting.size() : kResidentClusters;
  try {
    for (;;) {
      while (!waiting.empty() && machine.resident.size() < limit) {
        std::swap(waiting[machine.draw_below(waiting.size())], waiting.back());
        start_cluster(waiting.back());
        waiting.pop_back();
      }
      if (machine.ready.empty()) {
        if (machine.resident.empty()) return;
        throw Fault(deadlock_report());
      }
      std::swap(machine.ready[machine.draw_below(machine.ready.size())], machine.ready.back());
      Fiber* fiber = machine.ready.back();
      machine.ready.pop_back();
      machine.current = fiber;
      switch_context(&machine.scheduler, &fiber->context);
      if (!machine.fault.empty()) throw Fault(machine.fault);
      if (fiber->finished && --fiber->cta->cluster->running == 0) {
        finish_cluster(fiber->cta->cluster);
      }
    }
  } catch (...) {
    abandon();
    throw;
  }
}

int thread_index() { return machine.current->thread; }
int thread_count() { return machine.grid.threads; }
int64_t cta_index() { return machine.current->cta->index; }
int64_t cta_count() { return machine.grid.ctas; }
char* shared_memory() { return machine.current->cta->shared; }
int cluster_size() { return machine.grid.cluster; }
int cluster_rank() { return machine.current->cta->rank; }

void cta_barrier() {
  Cta* cta = machine.current->cta;
  meet(&cta->at_barrier, static_cast<size_t>(machine.grid.threads), "a CTA barrier");
}

void cluster_barrier() {
  Cluster* cluster = machine.current->cta->cluster;
  meet(&cluster->at_barrier, static_cast<size_t>(machine.grid.threads * machine.grid.cluster),
       "a cluster barrier");
}

void* cluster_map(void* shared, int rank) {
  Cta* cta = machine.current->cta;
  const int64_t offset = static_cast<char*>(shared) - cta->shared;
  if (offset < 0 || offset >= machine.grid.shared_bytes) {
    fail("cluster_map of an address that is not in this CTA's shared memory");
  }
  if (rank < 0 || rank >= machine.grid.cluster) {
    fail("cluster_map to CTA " + std::to_string(rank) + " of a cluster of " +
         std::to_string(machine.grid.cluster));
  }
  return cta->cluster->ctas[static_cast<size_t>(rank)]->shared + offset;
}

void check_load(const void* address, int64_t bytes) {
  checked_region(address, bytes, "a load")->loaded += bytes;
}

void check_store(const void* address, int64_t bytes) {
  Region* region = checked_region(address, bytes, "a store");
  if (!region->writable) fail("a store to " + region->name + ", which is read-only");
  region->stored += bytes;
}

void check_atomic(const void* address, int64_t bytes) {
  check_store(address, bytes);
  maybe_switch();
}

void copy_async(void* shared, const void* global, int64_t bytes, bool wanted) {
  Fiber* fiber = machine.current;
  if (wanted) check_load(global, bytes);
  if (reinterpret_cast<uintptr_t>(shared) % static_cast<uintptr_t>(bytes) != 0) {
    fail("an asynchronous copy to a misaligned address");
  }
  std::memset(shared, kPoison, static_cast<size_t>(bytes));
  fiber->open_group.push_back({shared, global, bytes, wanted});
}

void copy_async_commit() {
  Fiber* fiber = machine.current;
  fiber->groups.push_back(std::move(fiber->open_group));
  fiber->open_group.clear();
}

void copy_async_wait(int pending) {
  Fiber* fiber = machine.current;
  while (fiber->groups.size() > static_cast<size_t>(pending)) {
    complete(fiber->groups.front());
    fiber->groups.pop_front();
  }
}

void maybe_switch() {
  if (machine.draw() >> 62 != 0) return;
  wake(machine.current);
  switch_context(&machine.current->context, &machine.scheduler);
}

void warp_collective(uint32_t mask, const char* what, void* operand,
                     void (*compute)(void* const operands[32])) {
  Fiber* fiber = machine.current;
  Warp& warp = fiber->cta->warps[static_cast<size_t>(fiber->thread / 32)];
  const uint32_t bit = 1u << (fiber->thread % 32);
  if ((mask & bit) == 0) fail(std::string(what) + ": the lane is not in its own mask");
  if (warp.arrived == 0) {
    warp.mask = mask;
    warp.what = what;
  } else if (warp.mask != mask || std::strcmp(warp.what, what) != 0) {
    fail(std::string("the warp diverged: this lane calls ") + what + ", others wait at " +
         warp.what);
  }
  warp.arrived |= bit;
  warp.operands[fiber->thread % 32] = operand;
  if (warp.arrived != mask) return wait(what);
  compute(warp.operands);
  for (int lane = 0; lane < 32; ++lane) {
    if ((mask >> lane & 1) != 0 && warp.lanes[lane] != fiber) wake(warp.lanes[lane]);
    warp.operands[lane] = nullptr;
  }
  warp.arrived = 0;
}

void warp_sync(uint32_t mask) {
  int nothing = 0;
  warp_collective(mask, "warp_sync", &nothing, [](void* const*) {});
}

uint32_t ballot(uint32_t mask, bool predicate) {
  struct Operand {
    bool predicate;
    uint32_t result;
  } operand{predicate, 0};
  warp_collective(mask, "ballot", &operand, [](void* const operands[32]) {
    uint32_t votes = 0;
    for (int lane = 0; lane < 32; ++lane) {
      const auto* o = static_cast<const Operand*>(operands[lane]);
      if (o != nullptr && o->predicate) votes |= 1u << lane;
    }
    for (int lane = 0; lane < 32; ++lane) {
      if (operands[lane] != nullptr) static_cast<Operand*>(operands[lane])->result = votes;
    }
  });
  return operand.result;
}

}  // namespace xpress::emulator
