"""Bytes that the CUDA kernels load from and store to global memory, counted by the emulator.

    XPRESS_EMULATOR=1 make build && python benchmarks/kernel_traffic.py

At the size of Qwen3-8B's head (bf16) and on a grid for 132 SMs, each operator's bytes stand beside
its floor: every input that it must see and every output once. What the kernels ask for is counted,
so what L1 and L2 keep of a second request is counted too.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

ROOT = Path(__file__).resolve().parent.parent
RESULT = ROOT / "benchmarks" / "results" / "kernel_traffic.json"
sys.path.insert(0, str(ROOT / "python_tests"))

import emulator  # noqa: E402

V, H, R, M, B, C = 151936, 4096, 256, 512, 16, 32
D = B - 1
NUM_SMS = 132
WEIGHT, FP32, ID = 2, 4, 8  # bytes of an element


@dataclass(frozen=True)
class Row:
    """Bytes of one call. `readout` is what of them was loaded from W_r, `once` its size."""

    name: str
    loaded: int
    stored: int
    floor: int
    readout: int = 0
    once: int = V * R * WEIGHT

    @property
    def ratio(self) -> float:
        return (self.loaded + self.stored) / self.floor


class Inputs:
    """A random head of Qwen3-8B's size in bf16, and N drafts for it."""

    def __init__(self, N: int) -> None:
        generator = torch.Generator().manual_seed(0)

        def normal(*shape: int, scale: float = 1.0) -> Tensor:
            return (torch.randn(shape, generator=generator) * scale).bfloat16()

        self.N = N
        self.base_logits = normal(N, D, V, scale=3.0)
        self.hidden = normal(N, B, H)
        self.hidden_proj = normal(2, R, H, scale=0.5 * H**-0.5)
        self.token_table = normal(V, R, scale=0.5)
        self.mixer = torch.eye(B)[..., None].repeat(1, 1, R)
        self.gate_up = normal(2 * M, R, scale=R**-0.5)
        self.down = normal(R, M, scale=M**-0.5)
        self.readout = normal(V, R, scale=15 * R**-0.5)
        self.prev = torch.randint(V, (N, B), generator=generator)
        self.x = torch.randn(N, B, R, generator=generator)
        self.z = normal(N, D, R)

    def refine(self, num_passes: int, top_c: int = 0) -> Any:
        return emulator.jacobi_refine(
            self.base_logits,
            self.hidden,
            self.prev[:, 1].contiguous(),
            self.prev[:, 0].contiguous(),
            self.hidden_proj,
            self.token_table,
            self.mixer,
            self.gate_up,
            self.down,
            self.readout,
            num_passes,
            top_c,
        )


# Parts of the floors, in bytes.
TRIANGLE = B * (B + 1) // 2 * R * FP32
PROJECTION = 2 * R * H * WEIGHT
MLP = 3 * M * R * WEIGHT
READOUT = V * R * WEIGHT


def count(name: str, floor: int, call: Callable[[], Any]) -> Row:
    """The row of one call."""
    with emulator.on(num_sms=NUM_SMS):
        call()
    traffic = emulator.traffic()
    loaded, stored = (sum(bytes_[i] for bytes_ in traffic.values()) for i in (0, 1))
    return Row(name, loaded, stored, floor, traffic.get("readout", (0, 0))[0])


def latent_rows(i: Inputs) -> list[Row]:
    latents = i.N * B * R * FP32
    return [
        count(
            f"project_hidden, N={i.N}",
            PROJECTION + i.N * B * H * WEIGHT + latents,
            lambda: emulator.project_hidden(i.hidden, i.hidden_proj),
        ),
        count(
            f"causal_mix, N={i.N}",
            TRIANGLE + 2 * latents,
            lambda: emulator.causal_mix(i.x, i.mixer),
        ),
        count(
            f"fuse_mix, N={i.N}",
            TRIANGLE + 2 * latents + i.N * B * (R * WEIGHT + ID),
            lambda: emulator.fuse_mix(i.x, i.prev, i.token_table, i.mixer),
        ),
        count(
            f"refiner_mlp, N={i.N}",
            MLP + latents + i.N * B * R * WEIGHT,
            lambda: emulator.refiner_mlp(i.x, i.gate_up, i.down),
        ),
    ]


def base_bytes(i: Inputs) -> int:
    return i.N * D * V * WEIGHT


def candidate_rows(i: Inputs) -> list[Row]:
    candidates = emulator.top_candidates(i.base_logits, C)[0]
    row = R * WEIGHT + ID + WEIGHT  # of W_r, an id, a base logit
    return [
        count(
            f"top_candidates, C={C}, N={i.N}",
            base_bytes(i) + i.N * D * C * (ID + FP32),
            lambda: emulator.top_candidates(i.base_logits, C),
        ),
        count(
            f"readout_argmax, C={C}, N={i.N}",
            i.N * D * (C * row + R * WEIGHT + ID + FP32),
            lambda: emulator.readout_argmax(i.z, i.base_logits, i.readout, candidates),
        ),
    ]


def readout_row(i: Inputs) -> Row:
    """The full readout: streaming for one block, tiled for several."""
    form = "streaming" if i.N == 1 else "tiled"
    floor = READOUT + base_bytes(i) + i.N * D * (R * WEIGHT + ID + FP32)
    return count(
        f"readout_argmax, {form}, N={i.N}",
        floor,
        lambda: emulator.readout_argmax(i.z, i.base_logits, i.readout),
    )


def logits_row(i: Inputs) -> Row:
    floor = READOUT + base_bytes(i) + i.N * D * (R * WEIGHT + V * FP32)
    z, base = i.z.flatten(0, 1), i.base_logits.flatten(0, 1)
    return count(
        f"refined_logits, R={i.N * D}",
        floor,
        lambda: emulator.refined_logits(z, base, i.readout),
    )


def pass_rows(i: Inputs) -> list[Row]:
    """What one more pass of jacobi_refine costs: the difference between two calls."""
    # Context and mixed tokens in, z out; z is read once by whoever scores it.
    latent = TRIANGLE + i.N * B * R * (FP32 + WEIGHT) + MLP
    rows = []
    for name, top_c, scored in (
        ("full", 0, READOUT + base_bytes(i) + 2 * i.N * D * R * WEIGHT),
        (f"C={C}", C, i.N * D * C * R * WEIGHT),
    ):
        one, two = (count("", 1, lambda k=k, c=top_c: i.refine(k, c)) for k in (1, 2))
        rows.append(
            Row(
                f"jacobi_refine, a pass, {name}, N={i.N}",
                two.loaded - one.loaded,
                two.stored - one.stored,
                latent + scored,
                two.readout - one.readout,
            )
        )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, default=RESULT, metavar="FILE")
    options = parser.parse_args()
    one, eight = Inputs(1), Inputs(8)
    rows = [
        *latent_rows(one),
        *candidate_rows(one),
        readout_row(one),
        logits_row(one),
        *pass_rows(one),
        *latent_rows(eight),
        readout_row(eight),
    ]
    for row in rows:
        print(
            f"{row.name:38} {(row.loaded + row.stored) / 1e6:9.3f} MB  floor {row.floor / 1e6:8.3f}"
            f"  {row.ratio:5.2f}x  W_r {row.readout / row.once:4.2f} times"
        )
    shape = {"V": V, "H": H, "r": R, "m": M, "B": B, "C": C, "num_sms": NUM_SMS}
    result = {"shape": shape, "rows": [asdict(row) for row in rows]}
    options.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
