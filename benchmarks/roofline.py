"""The floors of the CUDA kernels on a GPU: least bytes and least arithmetic, in microseconds.

    python benchmarks/roofline.py                     H200, head of Qwen3-8B
    python benchmarks/roofline.py --gpu a100 --N 64
    python benchmarks/roofline.py --micro micro.json  bandwidths measured by benchmarks/device

A floor is what no implementation can go below: every input that it must see and every output once,
at the GPU's bandwidth; the multiply-adds of the method, at its rate for bf16 with fp32 sums. Where
the bytes fit into L2 and stay there from pass to pass, the floor from L2 stands beside it. Two
lines are of designs that do not exist yet: a readout in fp8, and one that keeps a share of W_r in
shared memory from pass to pass.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.inputs import PRESETS, HeadShape
from benchmarks.timing import table

WEIGHT, FP32, ID, FP8 = 2, 4, 8, 1  # bytes of an element
KEPT = 200_000  # bytes of W_r that an SM could keep in shared memory, of 227 KB


@dataclass(frozen=True)
class Gpu:
    """A GPU's figures, and where they are from."""

    name: str
    memory_gb_s: float
    l2_mb: float
    sms: int
    dense_bf16_tflop_s: float  # without sparsity
    source: str
    l2_gb_s: float | None = None  # measured only


GPUS = {
    "h200": Gpu("H200 SXM", 4800, 50, 132, 989, "NVIDIA H200 datasheet"),
    "h100": Gpu("H100 SXM", 3350, 50, 132, 989, "NVIDIA H100 datasheet"),
    "a100": Gpu("A100 SXM 80 GB", 2039, 40, 108, 312, "NVIDIA A100 datasheet"),
    "l40s": Gpu("L40S", 864, 96, 142, 362, "NVIDIA L40S datasheet"),
    "b200": Gpu("B200 SXM", 8000, 126, 148, 2250, "NVIDIA HGX B200 datasheet, per GPU"),
}


@dataclass(frozen=True)
class Stage:
    """What a stage must move and do, for all N blocks."""

    name: str
    num_bytes: int
    flop: int


def stages(shape: HeadShape, N: int, C: int, sms: int) -> list[Stage]:
    """The stages of a draft; weights and inputs in bf16."""
    V, r, m, B, H = shape.V, shape.r, shape.m, shape.B, shape.H
    D = B - 1
    latents = N * B * r
    triangle = B * (B + 1) // 2 * r
    mlp = 3 * m * r
    latent_flop = 2 * N * B * mlp + 2 * N * triangle
    read = N * D * (V + r) * WEIGHT  # base logits and latents
    return [
        Stage(
            "project_hidden, once",
            2 * r * H * WEIGHT + N * B * H * WEIGHT + latents * FP32,
            2 * N * (B + 1) * H * r,
        ),
        Stage("causal_mix, once", triangle * FP32 + 2 * latents * FP32, 2 * N * triangle),
        Stage(
            f"top_candidates C={C}, once",
            N * D * V * WEIGHT + N * D * C * (ID + FP32),
            0,
        ),
        Stage(
            "fuse_mix, a pass",
            triangle * FP32 + 2 * latents * FP32 + N * B * (r * WEIGHT + ID),
            2 * N * triangle,
        ),
        Stage(
            "refiner_mlp, a pass",
            mlp * WEIGHT + latents * (FP32 + WEIGHT),
            2 * N * B * mlp,
        ),
        Stage(
            "latent stage (both), a pass",
            triangle * FP32 + latents * (FP32 + 2 * WEIGHT) + mlp * WEIGHT,
            latent_flop,
        ),
        Stage(
            "full readout, a pass",
            V * r * WEIGHT + read,
            2 * N * D * V * r,
        ),
        Stage("  with W_r in fp8", V * r * FP8 + read, 2 * N * D * V * r),
        Stage(
            f"  with {sms} x {KEPT // 1000} KB of W_r kept",
            max(0, V * r * WEIGHT - sms * KEPT) + read,
            2 * N * D * V * r,
        ),
        Stage(
            f"candidate readout C={C}, a pass",
            N * D * C * (r * WEIGHT + ID + FP32),
            2 * N * D * C * r,
        ),
    ]


def floors(gpu: Gpu, stage: Stage) -> dict[str, float | None]:
    """Microseconds by bytes, by arithmetic, and from L2 where the bytes fit and it was measured."""
    fits = stage.num_bytes <= gpu.l2_mb * 1e6
    return {
        "bytes_us": stage.num_bytes / gpu.memory_gb_s / 1e3,
        "l2_us": stage.num_bytes / gpu.l2_gb_s / 1e3 if fits and gpu.l2_gb_s else None,
        "arithmetic_us": stage.flop / gpu.dense_bf16_tflop_s / 1e6,
    }


def measured(gpu: Gpu, micro: dict[str, Any]) -> Gpu:
    """The GPU with the bandwidths that benchmarks/device measured on it.

    Raises:
        ValueError: the file is not one of benchmarks/device/micro.cu.
    """
    try:
        reads = {int(size): spread["median"] for size, spread in micro["read_gb_s"].items()}
        l2 = max(float(rate) for size, rate in reads.items() if size <= 26)
        return replace(
            gpu,
            name=str(micro["gpu"]),
            memory_gb_s=float(micro["copy_gb_s"]["median"]),
            l2_mb=float(micro["l2_mb"]),
            sms=int(micro["sms"]),
            l2_gb_s=l2,
            source="benchmarks/device/micro.cu; arithmetic: " + gpu.source,
        )
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise ValueError(f"not a result of benchmarks/device/micro.cu: {error!r}") from None


def main(argv: Sequence[str] | None = None) -> int:
    """Prints the table; writes JSON where asked."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--gpu", choices=GPUS, default="h200")
    parser.add_argument("--micro", type=Path, metavar="FILE", help="JSON of benchmarks/device")
    parser.add_argument("--preset", choices=PRESETS, default="qwen3-8b", help="shape of the head")
    parser.add_argument("--N", type=int, nargs="+", default=[1, 8, 64], help="blocks in a batch")
    parser.add_argument("--C", type=int, default=32, help="candidates per slot")
    parser.add_argument("--json", type=Path, metavar="FILE")
    args = parser.parse_args(argv)
    if min(args.N) < 1 or args.C < 1:
        parser.error(f"--N {args.N}, --C {args.C}: all must be at least 1")
    gpu = GPUS[args.gpu]
    if args.micro:
        try:
            gpu = measured(gpu, json.loads(args.micro.read_text()))
        except (OSError, ValueError) as error:
            parser.error(f"--micro {args.micro}: {error}")
    shape = PRESETS[args.preset]
    print(
        f"{gpu.name}: {gpu.sms} SMs, {gpu.memory_gb_s:.0f} GB/s, L2 {gpu.l2_mb:.0f} MB,"
        f" {gpu.dense_bf16_tflop_s:.0f} TFLOP/s bf16 ({gpu.source})"
    )
    print(f"head {args.preset}: " + " ".join(f"{k}={v}" for k, v in asdict(shape).items()))
    rows, result = [], []
    for N in args.N:
        for stage in stages(shape, N, args.C, gpu.sms):
            at = floors(gpu, stage)
            shown = ["" if us is None else f"{us:.2f}" for us in at.values()]
            size = [f"{stage.num_bytes / 1e6:.3f}", f"{stage.flop / 1e9:.3f}"]
            rows.append([stage.name, str(N), *size, *shown])
            result.append({**asdict(stage), "N": N, **at})
    columns = ["stage", "N", "MB", "GFLOP", "bytes us", "L2 us", "arithmetic us"]
    print(table(columns, rows))
    if args.json:
        text = json.dumps({"gpu": asdict(gpu), "shape": asdict(shape), "stages": result}, indent=1)
        args.json.write_text(text + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
