// Measures what the kernels' designs depend on, and prints it as JSON:
//
//   nvcc -std=c++17 -O3 -arch=sm_90a -I csrc -I csrc/include benchmarks/device/micro.cu -o micro
//
// copy bandwidth, read bandwidth over the size of the working set (where L2 ends), the latency of a
// grid barrier and of a cluster barrier, and the cost of a launch in a stream and in a graph.
// Medians of several runs with the 20th and 80th percentiles, timed by events.
#include <cuda_runtime.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <string>
#include <vector>

#include "device/barrier.h"
#include "device/launch.h"
#include "device/memory.h"

namespace {

namespace device = xpress::device;

void check(cudaError_t error, const char* what) {
  if (error == cudaSuccess) return;
  std::fprintf(stderr, "%s: %s\n", what, cudaGetErrorString(error));
  std::exit(1);
}

void check(xpress::Status status, const char* what) {
  if (status == xpress::Status::kOk) return;
  check(cudaGetLastError(), what);
  std::fprintf(stderr, "%s: status %d\n", what, static_cast<int>(status));
  std::exit(1);
}

// Microseconds of `work`, which enqueues on the stream: one figure a run, ascending.
template <class Work>
std::vector<double> microseconds(cudaStream_t stream, const Work& work) {
  constexpr int kRuns = 11;
  cudaEvent_t begin, end;
  check(cudaEventCreate(&begin), "event");
  check(cudaEventCreate(&end), "event");
  work();
  std::vector<double> times;
  for (int i = 0; i < kRuns; ++i) {
    check(cudaEventRecord(begin, stream), "record");
    work();
    check(cudaEventRecord(end, stream), "record");
    check(cudaEventSynchronize(end), "wait");
    float milliseconds = 0.0f;
    check(cudaEventElapsedTime(&milliseconds, begin, end), "time");
    times.push_back(milliseconds * 1e3);
  }
  std::sort(times.begin(), times.end());
  check(cudaEventDestroy(begin), "event");
  check(cudaEventDestroy(end), "event");
  return times;
}

// Prints `"name": {"median": .., "p20": .., "p80": ..}` of what `figure` makes of each time.
template <class Figure>
void print(const char* separator, const char* name, const std::vector<double>& times,
           const Figure& figure) {
  std::vector<double> figures;
  for (const double time : times) figures.push_back(figure(time));
  std::sort(figures.begin(), figures.end());
  const size_t last = figures.size() - 1;
  std::printf("%s\"%s\": {\"median\": %.3f, \"p20\": %.3f, \"p80\": %.3f}", separator, name,
              figures[last / 2], figures[last / 5], figures[last - last / 5]);
}

struct ReadParams {
  const char* data;
  int64_t bytes;  // a multiple of 16
  int sweeps;
  uint32_t* sink;
};

// Reads the working set `sweeps` times, four loads in flight a thread. In every sweep a CTA reads
// what its neighbour read in the last one, so that L1 never holds what is asked for.
XPRESS_KERNEL(512) read_kernel(ReadParams p) {
  const int64_t vectors = p.bytes / 16, threads = device::cta_count() * device::thread_count();
  uint32_t sum = 0;
  for (int sweep = 0; sweep < p.sweeps; ++sweep) {
    const int64_t cta = (device::cta_index() + sweep) % device::cta_count();
    const int64_t first = cta * device::thread_count() + device::thread_index();
    for (int64_t i = first; i < vectors; i += 4 * threads) {
      device::Bytes16 held[4];
      XPRESS_UNROLL
      for (int j = 0; j < 4; ++j) {
        const int64_t at = i + j * threads;
        held[j] = device::load_global_or_zero(p.data + 16 * at, at < vectors);
      }
      XPRESS_UNROLL
      for (int j = 0; j < 4; ++j) sum += held[j].word[0] ^ held[j].word[3];
    }
  }
  if (sum == 0x12345678u) *p.sink = sum;  // never, but the compiler does not know
}

struct BarrierParams {
  device::GridBarrier* barrier;
  int count;
};

XPRESS_KERNEL(256) grid_barrier_kernel(BarrierParams p) {
  for (int i = 0; i < p.count; ++i) device::grid_sync(p.barrier);
}

XPRESS_KERNEL(256) cluster_barrier_kernel(BarrierParams p) {
  for (int i = 0; i < p.count; ++i) device::cluster_sync();
}

XPRESS_KERNEL(32) empty_kernel(BarrierParams) {}

}  // namespace

int main() {
  cudaDeviceProp properties;
  check(cudaGetDeviceProperties(&properties, 0), "no GPU");
  const int sms = properties.multiProcessorCount;
  cudaStream_t stream;
  check(cudaStreamCreate(&stream), "stream");
  std::printf("{\n \"gpu\": \"%s\",\n \"sms\": %d,\n \"l2_mb\": %.1f,\n", properties.name, sms,
              properties.l2CacheSize / 1e6);

  constexpr int64_t kLargest = int64_t{1} << 30;
  char *source, *target;
  check(cudaMalloc(&source, kLargest), "memory");
  check(cudaMalloc(&target, kLargest), "memory");
  check(cudaMemset(source, 1, kLargest), "memory");
  const auto copies = microseconds(stream, [&] {
    check(cudaMemcpyAsync(target, source, kLargest, cudaMemcpyDefault, stream), "copy");
  });
  print(" ", "copy_gb_s", copies, [](double us) { return 2.0 * kLargest / us / 1e3; });

  std::printf(",\n \"read_gb_s\": {");
  const char* separator = "";
  for (const int64_t megabytes : {4, 8, 16, 26, 32, 40, 48, 56, 64, 78, 96, 128, 256, 1024}) {
    const int64_t bytes = megabytes * 1000000 / 16 * 16;
    const int sweeps = static_cast<int>(std::max<int64_t>(2, 1500 / megabytes));
    const auto times = microseconds(stream, [&] {
      check(device::launch(read_kernel, {2 * sms, 512}, stream,
                           ReadParams{source, bytes, sweeps, reinterpret_cast<uint32_t*>(target)}),
            "read");
    });
    print(separator, std::to_string(megabytes).c_str(), times,
          [&](double us) { return 1.0 * bytes * sweeps / us / 1e3; });
    separator = ", ";
  }
  std::printf("}");

  device::GridBarrier* barrier;
  check(cudaMalloc(&barrier, sizeof(*barrier)), "memory");
  check(cudaMemset(barrier, 0, sizeof(*barrier)), "memory");
  constexpr int kBarriers = 1000;
  const auto grid = microseconds(stream, [&] {
    check(device::launch(grid_barrier_kernel, {sms, 256, 0, 1, true}, stream,
                         BarrierParams{barrier, kBarriers}),
          "grid barrier");
  });
  print(",\n ", "grid_barrier_us", grid, [](double us) { return us / kBarriers; });
  if (properties.major >= 9) {
    const auto cluster = microseconds(stream, [&] {
      check(device::launch(cluster_barrier_kernel, {8, 256, 0, 8}, stream,
                           BarrierParams{barrier, kBarriers}),
            "cluster barrier");
    });
    print(",\n ", "cluster_barrier_us", cluster, [](double us) { return us / kBarriers; });
  }

  constexpr int kLaunches = 200;
  const auto launches = [&] {
    for (int i = 0; i < kLaunches; ++i) {
      check(device::launch(empty_kernel, {1, 32}, stream, BarrierParams{barrier, 0}), "launch");
    }
  };
  const auto each = [](double us) { return us / kLaunches; };
  print(",\n ", "launch_us", microseconds(stream, launches), each);
  cudaGraph_t graph;
  cudaGraphExec_t replay;
  check(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal), "capture");
  launches();
  check(cudaStreamEndCapture(stream, &graph), "capture");
  check(cudaGraphInstantiate(&replay, graph, 0), "graph");
  const auto replays =
      microseconds(stream, [&] { check(cudaGraphLaunch(replay, stream), "graph"); });
  print(",\n ", "graph_node_us", replays, each);
  std::printf("\n}\n");
  return 0;
}
