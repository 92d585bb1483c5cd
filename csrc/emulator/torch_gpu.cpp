// A GPU for the torch layer, so that csrc/ops/cuda_operators.cpp can be tested where there is none.
//
// This file is linked into a library of its own (libxpress_ops_emulated.so, for
// python_tests/test_cuda_layer.py) in place of csrc/cuda/device.cu, beside the emulated launchers.
// It stands before those functions of torch through which the layer learns where a tensor is,
// allocates, and finds its stream: while the GPU is switched on, tensors in the CPU's memory pass
// for tensors on cuda:0, or wherever the test puts them.
#include <dlfcn.h>

#include <cstdint>
#include <cstring>
#include <map>

#include "emulator/machine.h"
#include "xpress/device.h"
#include "xpress/device_limits.h"

namespace {

constexpr int32_t kCpu = 0, kCuda = 1;  // torch's numbers of these types of device

struct Gpu {
  bool on = false;
  std::map<const void*, int32_t> places;  // data -> index of its GPU; -1: the CPU
  int32_t guarded = -1;                   // the device that the last call made current
  int selected = -1;                      // the same, of the library's own runtime
  int64_t num_waits = 0;
  xpress::Status status = xpress::Status::kOk;  // what waiting reports
} gpu;

// torch's own function behind one that is defined here.
template <class Function>
Function* torch_function(const char* name) {
  static void* const library = dlopen("libtorch_cpu.so", RTLD_NOLOAD | RTLD_LAZY);
  return reinterpret_cast<Function*>(dlsym(library, name));
}

}  // namespace

// --- what the test calls

#define FOR_TESTS extern "C" __attribute__((visibility("default")))

FOR_TESTS void gpu_switch(bool on) {
  gpu = Gpu{};
  gpu.on = on;
  xpress::emulator::forget_all();
  // The launchers' own tests check bounds; here all memory may be touched.
  if (on) xpress::emulator::declare("memory", reinterpret_cast<void*>(4096), INT64_MAX / 2, true);
}
FOR_TESTS void gpu_place(const void* data, int32_t index) { gpu.places[data] = index; }
FOR_TESTS void gpu_report(int status) { gpu.status = static_cast<xpress::Status>(status); }
FOR_TESTS int32_t gpu_guarded() { return gpu.guarded == gpu.selected ? gpu.guarded : -1; }
FOR_TESTS int64_t gpu_num_waits() { return gpu.num_waits; }

// --- in place of torch's

using Error = int32_t;
using Handle = void*;

extern "C" {

static int32_t place_of(Handle tensor) {
  using Function = Error(Handle, void**);
  void* data = nullptr;
  torch_function<Function>("aoti_torch_get_data_ptr")(tensor, &data);
  const auto found = gpu.places.find(data);
  return found == gpu.places.end() ? 0 : found->second;
}

Error aoti_torch_get_device_type(Handle tensor, int32_t* type) {
  using Function = Error(Handle, int32_t*);
  if (!gpu.on) return torch_function<Function>("aoti_torch_get_device_type")(tensor, type);
  *type = place_of(tensor) < 0 ? kCpu : kCuda;
  return 0;
}

Error aoti_torch_get_device_index(Handle tensor, int32_t* index) {
  using Function = Error(Handle, int32_t*);
  if (!gpu.on) return torch_function<Function>("aoti_torch_get_device_index")(tensor, index);
  *index = place_of(tensor);
  return 0;
}

Error aoti_torch_create_device_guard(int32_t index, Handle* guard) {
  gpu.guarded = index;
  *guard = nullptr;
  return 0;
}

Error aoti_torch_get_current_cuda_stream(int32_t index, void** stream) {
  *stream = reinterpret_cast<void*>(intptr_t{index} + 1);
  return 0;
}

// Allocations for the GPU come from the CPU's memory, copies to the CPU from there too.
Error torch_call_dispatcher(const char* name, const char* overload, uint64_t* stack,
                            uint64_t version) {
  using Function = Error(const char*, const char*, uint64_t*, uint64_t);
  constexpr int kDeviceOfEmpty = 3;
  if (gpu.on && std::strcmp(name, "aten::empty") == 0) stack[kDeviceOfEmpty] = 0;  // no device
  return torch_function<Function>("torch_call_dispatcher")(name, overload, stack, version);
}

}  // extern "C"

// --- in place of csrc/cuda/device.cu

namespace xpress {

Status device_limits(DeviceLimits* limits) {
  *limits = {3, 227 << 10, true};
  return Status::kOk;
}
Status select_device(int device) {
  gpu.selected = device;
  return Status::kOk;
}
Status synchronize(void*) {
  ++gpu.num_waits;
  return gpu.status;
}
const char* last_cuda_error() { return "an illegal memory access was encountered"; }
int compute_capability() { return 120; }
Status launch_device_probe(int* arch, void*) {
  *arch = 0;
  return Status::kOk;
}

}  // namespace xpress
