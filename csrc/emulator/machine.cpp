// The scheduler of the emulated GPU.
//
// run_grid() starts clusters in random order, a few at a time (all at once for a cooperative grid),
// and hands over to a fiber. From then on fibers hand over to each other. They do so in turns: a
// warp is drawn among those that have lanes that can run, and these run one after another, in an
// order drawn too, each until it waits. Whoever completes what a fiber waits for makes it ready
// again. When a cluster ends, a kernel is at fault or nobody can run, a fiber hands over to
// run_grid(), which starts the next cluster or ends the launch. If fibers still wait then, no one
// will ever wake them: that is a deadlock, and it is reported with the place where each waits.
#include "emulator/machine.h"

#include <signal.h>

#include <algorithm>
#include <cstdlib>
#include <map>
#include <memory>
#include <sstream>
#include <utility>

#include "emulator/fiber.h"

namespace xpress::emulator {

namespace {

#ifdef __SANITIZE_ADDRESS__
constexpr size_t kStackBytes = 256 << 10;  // AddressSanitizer's frames are larger
#else
constexpr size_t kStackBytes = 64 << 10;
#endif
constexpr int64_t kMaxSharedBytes = 227 << 10;
constexpr int kResidentClusters = 2;        // of a grid that is not cooperative
constexpr int64_t kMaxIdleSpins = 1 << 22;  // looks for a change while nobody changes anything
constexpr unsigned char kGuard = 0xa5;      // between the end of shared memory and the fence
constexpr unsigned char kPoison = 0xff;     // a NaN in every floating-point type

struct AsyncCopy {
  void* shared;
  const void* global;
  int64_t bytes;
  bool wanted;
  int64_t group;
};

struct Cta;
struct Warp;

// One GPU thread.
struct Fiber {
  Fiber(void (*entry)(), int index) : stack(kStackBytes), context(entry, stack, index) {}

  FencedMemory stack;
  Context context;
  Place place{};
  Cta* cta = nullptr;
  Warp* warp = nullptr;
  bool has_left = false;
  const char* waiting = nullptr;  // for what it waited last, in words
  std::vector<AsyncCopy> copies;  // not yet waited for
  int64_t group = 0;              // of asynchronous copies, the one that is open

  int lane() const { return place.thread % 32; }
};

struct Warp {
  Fiber* lanes[32] = {};
  uint32_t ready = 0;  // lanes that can run
  // The collective that lanes wait in.
  uint32_t mask = 0, arrived = 0;
  const char* what = nullptr;
  void* operands[32] = {};
};

struct Cluster;

struct Cta {
  int64_t index = 0;
  int rank = 0;
  Cluster* cluster = nullptr;
  std::unique_ptr<FencedMemory> shared;
  std::vector<Fiber*> fibers;
  std::vector<Warp> warps;
  int at_barrier = 0;
  int running = 0;
};

struct Cluster {
  std::vector<std::unique_ptr<Cta>> ctas;
  int at_barrier = 0;
  int running = 0;
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
  std::vector<std::unique_ptr<Cluster>> resident;
  Context launch;            // where run_grid() goes on
  Cluster* ended = nullptr;  // what it is told:
  std::string fault;
  int64_t idle_spins = 0;

  // Whose turn it is.
  Fiber* current = nullptr;
  std::vector<Warp*> ready;  // the other warps that have lanes that can run
  Warp* turn = nullptr;
  uint32_t turn_lanes = 0;  // that have not had their turn
  int turn_lane = 0, turn_step = 1;

  // Kept for later launches.
  std::vector<std::unique_ptr<Fiber>> spare_fibers;
  std::vector<std::unique_ptr<FencedMemory>> spare_memory;
  int num_fibers = 0;

  uint64_t draw() {  // xorshift64*
    random ^= random >> 12;
    random ^= random << 25;
    random ^= random >> 27;
    return random * 0x2545f4914f6cdd1du;
  }
  uint64_t draw_below(uint64_t limit) { return (draw() >> 32) * limit >> 32; }
};

Machine& machine = *new Machine;  // never destroyed: fibers may still be in use when a process ends

// --- turns

void make_ready(Warp* warp, uint32_t lanes) {
  if (lanes == 0) return;
  if (warp->ready == 0) machine.ready.push_back(warp);
  warp->ready |= lanes;
}

void make_ready(Cta* cta) {
  for (size_t i = 0; i < cta->warps.size(); ++i) make_ready(&cta->warps[i], 0xffffffffu);
}

// The fiber that runs next, taken from those that can; null if there is none.
Fiber* next_fiber() {
  if (machine.turn_lanes == 0) {
    if (machine.ready.empty()) return nullptr;
    const uint64_t random = machine.draw();
    std::swap(machine.ready[machine.draw_below(machine.ready.size())], machine.ready.back());
    machine.turn = machine.ready.back();
    machine.ready.pop_back();
    machine.turn_lanes = std::exchange(machine.turn->ready, 0u);
    machine.turn_lane = static_cast<int>(random & 31);
    machine.turn_step = static_cast<int>(random >> 32 & 31) | 1;  // odd, so it meets every lane
  }
  do {
    machine.turn_lane = (machine.turn_lane + machine.turn_step) % 32;
  } while ((machine.turn_lanes >> machine.turn_lane & 1) == 0);
  machine.turn_lanes &= ~(1u << machine.turn_lane);
  return machine.turn->lanes[machine.turn_lane];
}

void run(Fiber* fiber) {
  machine.current = fiber;
  here = &fiber->place;
}

// Hands over to the next fiber that can run; returns when this one is drawn again.
void hand_over() {
  Fiber* self = machine.current;
  Fiber* next = next_fiber();
  if (next == self) return;
  if (next != nullptr) run(next);
  Context::switch_to(&self->context, next != nullptr ? &next->context : &machine.launch);
}

void wait(const char* what) {
  machine.current->waiting = what;
  hand_over();
}

// Ends the launch from inside a fiber; does not return.
[[noreturn]] void fail(const std::string& what) {
  std::ostringstream text;
  text << "CTA " << here->cta << ", thread " << here->thread << ": " << what;
  machine.fault = text.str();
  Context::switch_to(&machine.current->context, &machine.launch);
  std::abort();
}

// --- memory

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

// What lies at an address that cannot be accessed.
std::string describe_inaccessible(const void* address) {
  if (machine.current->stack.is_near(address)) return "its stack is full";
  for (const auto& cluster : machine.resident) {
    for (const auto& cta : cluster->ctas) {
      if (!cta->shared->is_near(address)) continue;
      const int64_t byte = static_cast<const char*>(address) - cta->shared->begin();
      const std::string name = "byte " + std::to_string(byte) + " of the shared memory of CTA " +
                               std::to_string(cta->index);
      return cta->running == 0 ? "uses " + name + ", which has left"
                               : "uses " + name + ", which has " +
                                     std::to_string(machine.grid.shared_bytes) + " bytes";
    }
  }
  return "uses an address where there is no memory";
}

// While a launch runs, an access to an inaccessible page is a fault of the running thread.
class Signals {
 public:
  Signals() {
    static char* const stack = new char[kStackBytes];
    stack_t alternate{};
    alternate.ss_sp = stack;
    alternate.ss_size = kStackBytes;
    sigaltstack(&alternate, &stack_before_);
    struct sigaction action{};
    action.sa_sigaction = report;
    action.sa_flags = SA_SIGINFO | SA_ONSTACK | SA_NODEFER;
    sigaction(SIGSEGV, &action, &segv_before_);
    sigaction(SIGBUS, &action, &bus_before_);
  }
  ~Signals() {
    sigaction(SIGSEGV, &segv_before_, nullptr);
    sigaction(SIGBUS, &bus_before_, nullptr);
    if ((stack_before_.ss_flags & SS_DISABLE) == 0) sigaltstack(&stack_before_, nullptr);
  }

 private:
  static void report(int signal, siginfo_t* info, void*) {
    if (machine.current == nullptr) {  // not a kernel's doing
      ::signal(signal, SIG_DFL);
      return;
    }
    std::ostringstream text;
    text << "CTA " << here->cta << ", thread " << here->thread << ": "
         << describe_inaccessible(info->si_addr);
    machine.fault = text.str();
    Context::escape_to(&machine.launch);
  }

  stack_t stack_before_{};
  struct sigaction segv_before_{}, bus_before_{};
};

void complete(const AsyncCopy& copy) {
  if (copy.wanted) {
    std::memcpy(copy.shared, copy.global, static_cast<size_t>(copy.bytes));
  } else {
    std::memset(copy.shared, 0, static_cast<size_t>(copy.bytes));
  }
}

void check_guard(const Cta& cta) {
  const char* byte = cta.shared->begin() + machine.grid.shared_bytes;
  for (; byte < cta.shared->end(); ++byte) {
    if (static_cast<unsigned char>(*byte) != kGuard) {
      fail("the CTA wrote to byte " + std::to_string(byte - cta.shared->begin()) +
           " of its shared memory, which has " + std::to_string(machine.grid.shared_bytes));
    }
  }
}

// --- the life of fibers, CTAs and clusters

// The running thread has returned from the kernel.
void leave() {
  Fiber* fiber = machine.current;
  Cta* cta = fiber->cta;
  if (!fiber->copies.empty()) {
    fail("left with " + std::to_string(fiber->copies.size()) +
         " asynchronous copies that it never waited for");
  }
  fiber->has_left = true;
  if (--cta->running == 0) {
    check_guard(*cta);
    // Others of the cluster may no longer look into its shared memory.
    cta->shared->set_closed(true);
  }
  if (--cta->cluster->running > 0) return hand_over();
  machine.ended = cta->cluster;
  Context::switch_to(&fiber->context, &machine.launch);
}

void live() {
  Context::enter();
  for (;;) {
    (*machine.thread)();
    leave();  // returns when the fiber has become a thread of another CTA
  }
}

Fiber* take_fiber() {
  if (machine.spare_fibers.empty()) return new Fiber(live, machine.num_fibers++);
  Fiber* fiber = machine.spare_fibers.back().release();
  machine.spare_fibers.pop_back();
  return fiber;
}

std::unique_ptr<FencedMemory> take_shared_memory() {
  const auto bytes = static_cast<size_t>(machine.grid.shared_bytes);
  std::unique_ptr<FencedMemory> memory;
  if (machine.spare_memory.empty()) {
    memory = std::make_unique<FencedMemory>(bytes);
  } else {
    memory = std::move(machine.spare_memory.back());
    machine.spare_memory.pop_back();
    memory->set_closed(false);
  }
  std::memset(memory->begin(), kPoison, bytes);
  std::memset(memory->begin() + bytes, kGuard,
              static_cast<size_t>(memory->end() - memory->begin()) - bytes);
  return memory;
}

void start_cluster(int64_t index) {
  const Grid& grid = machine.grid;
  auto cluster = std::make_unique<Cluster>();
  for (int rank = 0; rank < grid.cluster; ++rank) {
    auto cta = std::make_unique<Cta>();
    cta->index = index * grid.cluster + rank;
    cta->rank = rank;
    cta->cluster = cluster.get();
    cta->shared = take_shared_memory();
    cta->warps.resize(static_cast<size_t>(grid.threads / 32));
    cta->running = grid.threads;
    for (int thread = 0; thread < grid.threads; ++thread) {
      Fiber* fiber = take_fiber();
      fiber->place = {thread, cta->index, cta->shared->begin()};
      fiber->cta = cta.get();
      fiber->warp = &cta->warps[static_cast<size_t>(thread / 32)];
      fiber->warp->lanes[thread % 32] = fiber;
      fiber->has_left = false;
      fiber->group = 0;
      cta->fibers.push_back(fiber);
    }
    make_ready(cta.get());
    cluster->running += grid.threads;
    cluster->ctas.push_back(std::move(cta));
  }
  machine.resident.push_back(std::move(cluster));
}

void finish_cluster(Cluster* cluster) {
  for (const auto& cta : cluster->ctas) {
    for (Fiber* fiber : cta->fibers) machine.spare_fibers.emplace_back(fiber);
    machine.spare_memory.push_back(std::move(cta->shared));
  }
  auto at = std::find_if(machine.resident.begin(), machine.resident.end(),
                         [&](const auto& c) { return c.get() == cluster; });
  machine.resident.erase(at);
}

// After a fault fibers are in the middle of things: none can be used again.
void abandon() {
  for (const auto& cluster : machine.resident) {
    for (const auto& cta : cluster->ctas) {
      for (Fiber* fiber : cta->fibers) delete fiber;
    }
  }
  machine.resident.clear();
  machine.ready.clear();
  machine.turn_lanes = 0;
}

std::string deadlock_report() {
  std::ostringstream text;
  text << "deadlock:";
  for (const auto& cluster : machine.resident) {
    for (const auto& cta : cluster->ctas) {
      std::map<std::string, std::vector<int>> places;
      for (Fiber* fiber : cta->fibers) {
        places[fiber->has_left ? "has left" : std::string("waits at ") + fiber->waiting].push_back(
            fiber->place.thread);
      }
      for (const auto& [place, threads] : places) {
        text << " CTA " << cta->index << ": " << threads.size() << " threads (first "
             << threads.front() << ") " << place << ";";
      }
    }
  }
  return text.str();
}

void check_grid(const Grid& grid) {
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
}

// Starts clusters and lets fibers run until all have left.
void run_clusters() {
  const Grid& grid = machine.grid;
  std::vector<int64_t> waiting(static_cast<size_t>(grid.ctas / grid.cluster));
  for (size_t i = 0; i < waiting.size(); ++i) waiting[i] = static_cast<int64_t>(i);
  const size_t limit = grid.cooperative ? waiting.size() : kResidentClusters;
  for (;;) {
    while (!waiting.empty() && machine.resident.size() < limit) {
      std::swap(waiting[machine.draw_below(waiting.size())], waiting.back());
      start_cluster(waiting.back());
      waiting.pop_back();
    }
    Fiber* first = next_fiber();
    if (first == nullptr) {
      if (machine.resident.empty()) return;
      throw Fault(deadlock_report());
    }
    machine.ended = nullptr;
    run(first);
    Context::switch_to(&machine.launch, &first->context);
    machine.current = nullptr;
    if (!machine.fault.empty()) throw Fault(machine.fault);
    if (machine.ended != nullptr) finish_cluster(machine.ended);
  }
}

}  // namespace

const Place* here = nullptr;
const Grid* this_grid = &machine.grid;

// --- for the host

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
  check_grid(grid);
  if (grid.shared_bytes != machine.grid.shared_bytes) machine.spare_memory.clear();
  machine.grid = grid;
  machine.thread = &thread;
  machine.launch = Context();
  machine.fault.clear();
  machine.idle_spins = 0;
  const Signals signals;
  try {
    run_clusters();
  } catch (...) {
    abandon();
    throw;
  }
}

// --- for the running thread

int cluster_size() { return machine.grid.cluster; }
int cluster_rank() { return machine.current->cta->rank; }

void cta_barrier() {
  Cta* cta = machine.current->cta;
  if (++cta->at_barrier < machine.grid.threads) return wait("a CTA barrier");
  cta->at_barrier = 0;
  machine.idle_spins = 0;
  make_ready(cta);
  hand_over();
}

void cluster_barrier() {
  Cluster* cluster = machine.current->cta->cluster;
  if (++cluster->at_barrier < machine.grid.threads * machine.grid.cluster) {
    return wait("a cluster barrier");
  }
  cluster->at_barrier = 0;
  machine.idle_spins = 0;
  for (const auto& cta : cluster->ctas) make_ready(cta.get());
  hand_over();
}

void* cluster_map(void* shared, int rank) {
  Cta* cta = machine.current->cta;
  const int64_t offset = static_cast<char*>(shared) - cta->shared->begin();
  if (offset < 0 || offset >= machine.grid.shared_bytes) {
    fail("cluster_map of an address that is not in this CTA's shared memory");
  }
  if (rank < 0 || rank >= machine.grid.cluster) {
    fail("cluster_map to CTA " + std::to_string(rank) + " of a cluster of " +
         std::to_string(machine.grid.cluster));
  }
  return cta->cluster->ctas[static_cast<size_t>(rank)]->shared->begin() + offset;
}

void check_load(const void* address, int64_t bytes) {
  checked_region(address, bytes, "a load")->loaded += bytes;
}

void check_store(const void* address, int64_t bytes) {
  Region* region = checked_region(address, bytes, "a store");
  if (!region->writable) fail("a store to " + region->name + ", which is read-only");
  region->stored += bytes;
  machine.idle_spins = 0;
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
  fiber->copies.push_back({shared, global, bytes, wanted, fiber->group});
}

void copy_async_commit() { ++machine.current->group; }

void copy_async_wait(int pending) {
  Fiber* fiber = machine.current;
  auto& copies = fiber->copies;
  auto unfinished = copies.begin();
  while (unfinished != copies.end() && unfinished->group < fiber->group - pending) {
    complete(*unfinished++);
  }
  copies.erase(copies.begin(), unfinished);
}

void maybe_switch() {
  if (machine.draw() >> 62 != 0) return;
  Fiber* self = machine.current;
  make_ready(self->warp, 1u << self->lane());
  hand_over();
}

void spin() {
  if (++machine.idle_spins > kMaxIdleSpins) {
    fail("waits for a change that nobody makes; the others " + deadlock_report());
  }
  Fiber* self = machine.current;
  self->waiting = "a change in global memory";
  make_ready(self->warp, 1u << self->lane());
  hand_over();
}

void warp_collective(uint32_t mask, const char* what, void* operand,
                     void (*compute)(void* const operands[32])) {
  Fiber* fiber = machine.current;
  Warp& warp = *fiber->warp;
  const uint32_t bit = 1u << fiber->lane();
  if ((mask & bit) == 0) fail(std::string(what) + ": the lane is not in its own mask");
  if (warp.arrived == 0) {
    warp.mask = mask;
    warp.what = what;
  } else if (warp.mask != mask || (warp.what != what && std::strcmp(warp.what, what) != 0)) {
    fail(std::string("the warp diverged: this lane calls ") + what + ", others wait at " +
         warp.what);
  }
  warp.arrived |= bit;
  warp.operands[fiber->lane()] = operand;
  if (warp.arrived != mask) return wait(what);
  compute(warp.operands);
  for (void*& other : warp.operands) other = nullptr;
  warp.arrived = 0;
  machine.idle_spins = 0;
  make_ready(&warp, mask & ~bit);
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
