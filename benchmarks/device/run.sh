#!/usr/bin/env bash
# The GPU kit: builds the library, checks it and measures it on a machine with a GPU and no network.
#
#   benchmarks/device/run.sh                   every step, in under 8 minutes
#   benchmarks/device/run.sh micro latency-1   some steps
#   benchmarks/device/run.sh --dry-run         checks every command, file and import of a run
#   benchmarks/device/run.sh --list            the steps
#
# Tables (kit.txt, printed at the end), all results (kit.json) and all output (kit.log) go to $OUT
# (default build/device). A step that fails does not end the run; the exit status tells of it.
# PYTHON names the interpreter (default python3: one with torch for CUDA). XPRESS_LIBRARY names a
# prebuilt libxpress_ops.so to use instead of building; XPRESS_KIT_ARCH the GPU to build for (90a);
# PEER_VLLM an unpacked vLLM 0.33 wheel, a peer of the latency steps.
set -euo pipefail
cd "$(dirname "$0")/../.."
exec "${PYTHON:-python3}" benchmarks/device/kit.py "$@"
