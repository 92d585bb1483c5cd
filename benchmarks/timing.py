"""What latency scripts share: interleaved timing, floors, the machine, tables."""

from __future__ import annotations

import os
import platform
import statistics
import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import torch

_Key = TypeVar("_Key", bound=Hashable)

# Instruction sets with which torch multiplies bf16 matrices, and which our CPU code does not use.
MATRIX_FLAGS = ("avx512_bf16", "amx_bf16")
_SHOWN_FLAGS = ("avx2", "avx512f", "avx512_vnni", "avx512_bf16", "amx_tile", "amx_bf16")


@dataclass(frozen=True)
class Spread:
    """Microseconds of one line: median and the 20th and 80th percentiles."""

    median: float
    p20: float
    p80: float

    @classmethod
    def of(cls, samples: Sequence[float]) -> Spread:
        """From samples in microseconds (at least one)."""
        if len(samples) == 1:
            return cls(samples[0], samples[0], samples[0])
        cuts = statistics.quantiles(samples, n=5, method="inclusive")
        return cls(statistics.median(samples), cuts[0], cuts[-1])

    def scaled(self, factor: float) -> Spread:
        """All three times ``factor``."""
        return Spread(self.median * factor, self.p20 * factor, self.p80 * factor)


def synchronize(device: str) -> None:
    """Waits for the device; nothing to wait for on the CPU."""
    if device.startswith("cuda"):
        torch.cuda.synchronize()


def interleaved(
    calls: Mapping[_Key, Callable[[], object]], repeats: int, device: str = "cpu"
) -> dict[_Key, Spread]:
    """Times every call once a round, ``repeats`` rounds over, so that all meet the same weather.

    Each call runs once, untimed, before the first round.

    Args:
        calls: What to run, by key.
        repeats: Rounds.
        device: Where it runs; CUDA is synchronised around each call.
    """
    for call in calls.values():
        call()
    samples: dict[_Key, list[float]] = {key: [] for key in calls}
    for _ in range(repeats):
        for key, call in calls.items():
            synchronize(device)
            start = time.perf_counter()
            call()
            synchronize(device)
            samples[key].append((time.perf_counter() - start) * 1e6)
    return {key: Spread.of(times) for key, times in samples.items()}


@dataclass(frozen=True)
class Ceilings:
    """What the machine can do at best, measured on the threads of this run."""

    copy_gb_s: float  # bytes read plus bytes written, a copy of 256 MB; on a GPU 4 GB
    matmul_gflop_s: float  # fp32 product of matrices 2048 x 2048; on a GPU bf16, 8192 x 8192

    @classmethod
    def measure(cls, device: str = "cpu", repeats: int = 7) -> Ceilings:
        """Measures both. A GPU's are so large that the waiting around them does not count."""
        on_gpu = device.startswith("cuda")
        size, dtype = (8192, torch.bfloat16) if on_gpu else (2048, torch.float32)
        source = torch.zeros((1024 if on_gpu else 64) << 20, device=device)
        target = torch.empty_like(source)
        square = torch.randn(size, size, device=device).to(dtype)
        product = torch.empty_like(square)
        times = interleaved(
            {
                "copy": lambda: target.copy_(source),
                "matmul": lambda: torch.mm(square, square, out=product),
            },
            repeats,
            device,
        )
        return cls(
            copy_gb_s=2 * source.numel() * 4 / times["copy"].median / 1e3,
            matmul_gflop_s=2 * size**3 / times["matmul"].median / 1e3,
        )

    def copy_us(self, num_bytes: float) -> float:
        """Microseconds to move that many bytes at copy speed."""
        return num_bytes / self.copy_gb_s / 1e3

    def matmul_us(self, flop: float) -> float:
        """Microseconds for that many operations at the speed of the large product."""
        return flop / self.matmul_gflop_s / 1e3


def cpu_flags() -> tuple[str, ...]:
    """Vector and matrix instruction sets of this CPU, of those that matter here."""
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        return ()
    line = next((line for line in text.splitlines() if line.startswith("flags")), "")
    return tuple(flag for flag in _SHOWN_FLAGS if flag in line.split())


def describe_machine(device: str) -> dict[str, object]:
    """CPU, instruction sets, threads, load and versions; what stands above every table."""
    name = platform.processor() or platform.machine()
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        name = next((x.split(":", 1)[1].strip() for x in lines if x.startswith("model name")), name)
    except OSError:
        pass
    machine: dict[str, object] = {
        "cpu": name,
        "cores": os.cpu_count(),
        "flags": list(cpu_flags()),
        "threads": torch.get_num_threads(),
        "load_average": round(os.getloadavg()[0], 2),
        "torch": torch.__version__,
        "python": platform.python_version(),
    }
    if device.startswith("cuda"):
        machine["gpu"] = torch.cuda.get_device_name()
    return machine


def table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Aligned text: the first column to the left, all others to the right."""
    widths = [max(len(row[i]) for row in [columns, *rows]) for i in range(len(columns))]

    def line(cells: Sequence[str]) -> str:
        first = cells[0].ljust(widths[0])
        return "  ".join([first, *(c.rjust(w) for c, w in zip(cells[1:], widths[1:], strict=True))])

    return "\n".join([line(columns), line(["-" * w for w in widths]), *map(line, rows)])
