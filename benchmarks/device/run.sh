#!/usr/bin/env bash
# The GPU kit: builds the library, checks it and measures it on a machine with a GPU and no network.
#
#   benchmarks/device/run.sh                 every step; results under $OUT (default build/device)
#   benchmarks/device/run.sh micro latency   some steps
#   benchmarks/device/run.sh --dry-run       checks every command and file that a run would use
#   benchmarks/device/run.sh --list          the steps
#
# PYTHON names the interpreter (default python3: one with torch for CUDA). XPRESS_LIBRARY names a
# prebuilt libxpress_ops.so to use instead of building; PEER_VLLM an unpacked vLLM 0.33 wheel.
set -euo pipefail
cd "$(dirname "$0")/../.."
exec "${PYTHON:-python3}" benchmarks/device/kit.py "$@"
