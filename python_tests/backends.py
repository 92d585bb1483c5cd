"""The operators by backend, problems to give them, and how their results are compared.

A test that states a promise of the method runs on every backend through `get`. Within a backend
the promises hold bit for bit. Between backends tokens may differ only where the reference's best
two logits are closer than the rounding bound (`assert_tokens_match`).
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from types import ModuleType
from typing import Any

import plain
import torch
from torch import Tensor

from xpress_ext import build_info, ops, reference

HAS_CUDA = bool(build_info().cuda_operators)
# Those that refuse bad arguments themselves; the emulator runs launchers, to which the layer above
# them hands checked sizes and unchecked ids.
CHECKED = ("cpu", *(("cuda",) if HAS_CUDA else ()))
COMPILED = (*CHECKED, "emulator")
NAMES = ("reference", *COMPILED)
WEIGHT_DTYPES = (torch.float32, torch.bfloat16, torch.float16)

# Size of the corrections <W_r, z> beside base logits of standard deviation 3.
STRENGTHS = {"mild": 0.5, "large": 15.0}


def get(name: str) -> ModuleType:
    """The module whose functions are that backend's operators; "plain" has some of them."""
    if name in ("emulator", "cuda"):
        return importlib.import_module({"cuda": "on_cuda"}.get(name, name))
    return {"reference": reference, "plain": plain, "cpu": ops}[name]


def heads(backend: str, count: int) -> range:
    """Seeds of `count` random heads; of a sixth as many for the emulator, which is slow."""
    return range(-(-count // 6) if backend == "emulator" else count)


def few(backend: str, values: Sequence[int]) -> Sequence[int]:
    """All values; for the emulator the first, the last and one between."""
    if backend != "emulator":
        return values
    return sorted({values[0], values[len(values) // 3], values[-1]})


def schedules(backend: str, count: int) -> Iterator[AbstractContextManager[Any]]:
    """Ways to run an operator that must not change a bit of its results.

    On the emulator: `count` orders of its threads, on GPUs of several sizes, with clusters and
    without. Elsewhere there is one.
    """
    if backend != "emulator":
        yield nullcontext()
        return
    emulator = get(backend)
    for seed in range(count):
        yield emulator.on(seed=seed, num_sms=(2, 3, 5)[seed % 3], has_clusters=seed % 2 == 0)


@dataclass(frozen=True)
class Problem:
    """The tensors that `jacobi_refine` takes, but for the options."""

    base_logits: Tensor  # [N,D,V]
    hidden: Tensor  # [N,B,H]
    anchor: Tensor  # [N]
    predecessor: Tensor  # [N]
    hidden_proj: Tensor  # [2,r,H]
    token_table: Tensor  # [V_t,r]
    mixer: Tensor  # [B,B,r]
    mlp_gate_up: Tensor  # [2m,r]
    mlp_down: Tensor  # [r,m]
    readout: Tensor  # [V,r]
    d2t: Tensor | None = None  # [V]

    @property
    def num_drafted(self) -> int:
        return self.base_logits.shape[1]

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """The ten leading arguments of `jacobi_refine` and `sequential_decode`."""
        inputs = (self.base_logits, self.hidden, self.anchor, self.predecessor)
        latent = (self.hidden_proj, self.token_table, self.mixer, self.mlp_gate_up)
        return (*inputs, *latent, self.mlp_down, self.readout)

    def refine(
        self,
        backend: str,
        num_passes: int | None = None,
        top_c: int = 0,
        exact: bool = False,
        seed_tokens: Tensor | None = None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """`jacobi_refine` on this problem; num_passes None stands for D."""
        passes = self.num_drafted if num_passes is None else num_passes
        return get(backend).jacobi_refine(
            *self.tensors, passes, top_c, exact, seed_tokens, self.d2t
        )

    def with_(self, **changes: Tensor | None) -> Problem:
        """This problem with some tensors replaced."""
        return replace(self, **changes)

    def block(self, n: int) -> Problem:
        """Block n alone."""
        one = slice(n, n + 1)
        return self.with_(
            base_logits=self.base_logits[one],
            hidden=self.hidden[one],
            anchor=self.anchor[one],
            predecessor=self.predecessor[one],
        )

    def random_seeds(self, seed: int) -> Tensor:
        """[N,D] random target ids to start from."""
        shape = (len(self.anchor), self.num_drafted)
        return torch.randint(len(self.token_table), shape, generator=_generator(seed))

    def logits(self, backend: str, tokens: Tensor) -> Tensor:
        """[N,D,V] fp32: all logits that a pass computes from `tokens` [N,D], by the operators."""
        ops = get(backend)
        z = self.latent(backend, tokens)[:, 1:]
        rows = ops.refined_logits(z.flatten(0, 1), self.base_logits.flatten(0, 1), self.readout)
        return rows.view(self.base_logits.shape)

    def latent(self, backend: str, tokens: Tensor) -> Tensor:
        """z [N,B,r], weight type, that a pass computes from `tokens` [N,D], by the operators."""
        ops = get(backend)
        prev = torch.cat([self.predecessor[:, None], self.anchor[:, None], tokens[:, :-1]], dim=1)
        context = ops.causal_mix(ops.project_hidden(self.hidden, self.hidden_proj), self.mixer)
        c = ops.fuse_mix(context, prev, self.token_table, self.mixer)
        return ops.refiner_mlp(c, self.mlp_gate_up, self.mlp_down)

    def sequential(self, backend: str, candidates: Tensor | None = None) -> Tensor:
        """[N,D] target ids decoded one slot after another, by the operators."""
        tokens = self.anchor[:, None].repeat(1, self.num_drafted)
        for k in range(self.num_drafted):
            z = self.latent(backend, tokens)[:, 1:]
            best = get(backend).readout_argmax(z, self.base_logits, self.readout, candidates)[0]
            tokens[:, k] = self.to_target(best)[:, k]
        return tokens

    def to_target(self, draft_ids: Tensor) -> Tensor:
        return draft_ids if self.d2t is None else draft_ids + self.d2t[draft_ids]


def random_problem(
    seed: int,
    *,
    N: int = 2,
    B: int = 8,
    V: int = 97,
    H: int = 32,
    r: int = 32,
    m: int = 64,
    V_t: int = 0,
    strength: str = "large",
    weight: torch.dtype = torch.float32,
    inputs: torch.dtype | None = None,
) -> Problem:
    """A random head and drafts for it; a reduced draft vocabulary where V_t > V.

    The inputs (hidden, base logits) are of type `inputs`, the weight type unless given.
    """
    inputs = inputs or weight
    generator = _generator(seed)

    def normal(*shape: int, scale: float = 1.0) -> Tensor:
        return torch.randn(shape, generator=generator) * scale

    num_targets = V_t or V
    return Problem(
        base_logits=normal(N, B - 1, V, scale=3.0).to(inputs),
        hidden=normal(N, B, H).to(inputs),
        anchor=torch.randint(num_targets, (N,), generator=generator),
        predecessor=torch.randint(num_targets, (N,), generator=generator),
        hidden_proj=normal(2, r, H, scale=0.5 * H**-0.5).to(weight),
        token_table=normal(num_targets, r, scale=0.5).to(weight),
        mixer=torch.eye(B)[..., None] + torch.ones(B, B).tril()[..., None] * normal(B, B, r) * 0.3,
        mlp_gate_up=normal(2 * m, r, scale=r**-0.5).to(weight),
        mlp_down=normal(r, m, scale=m**-0.5).to(weight),
        readout=normal(V, r, scale=STRENGTHS[strength] * r**-0.5).to(weight),
        d2t=_random_offsets(V, V_t, generator) if V_t else None,
    )


def counting_problem(N: int = 3, B: int = 8) -> Problem:
    """A head that counts: token_k = token_{k-1} + 1 (mod 32), while the drafter says 0 everywhere.

    Every pass settles exactly one slot, and the arithmetic is exact in every type.
    """
    V = r = 32
    one_hot = torch.eye(V)
    base_logits = torch.zeros(N, B - 1, V)
    base_logits[..., 0] = 1.0
    return Problem(
        base_logits=base_logits,
        hidden=torch.zeros(N, B, 32),
        anchor=torch.arange(N) * 7 + 5,
        predecessor=torch.zeros(N, dtype=torch.int64),
        hidden_proj=torch.zeros(2, r, 32),
        token_table=one_hot,
        mixer=torch.eye(B)[..., None].repeat(1, 1, r),
        mlp_gate_up=torch.zeros(64, r),
        mlp_down=torch.zeros(r, 32),
        readout=10 * one_hot.roll(1, dims=0),
    )


def hidden_winner_problem(seed: int, **sizes: int) -> Problem:
    """A head whose right tokens are never among the candidates.

    Channel 0 of z is 1 in every slot. It lifts the upper half of the vocabulary by more than the
    base logits had held against it, so no right token is in the lower half, where all candidates
    are as long as C is at most V/2.
    """
    problem = random_problem(seed, **sizes)
    readout, base_logits = problem.readout.clone(), problem.base_logits.clone()
    token_table, mixer = problem.token_table.clone(), problem.mixer.clone()
    hidden_proj, mlp_down = problem.hidden_proj.clone(), problem.mlp_down.clone()
    half = len(readout) // 2
    base_logits[..., half:] -= 200.0
    hidden_proj[:, 0], mlp_down[0], token_table[:, 0] = 0.0, 0.0, 1.0
    mixer[..., 0] = torch.eye(len(mixer))
    readout[:half, 0], readout[half:, 0] = 0.0, 600.0
    return problem.with_(
        base_logits=base_logits,
        hidden_proj=hidden_proj,
        token_table=token_table,
        mixer=mixer,
        mlp_down=mlp_down,
        readout=readout,
    )


def quantised_problem(seed: int, **sizes: int) -> Problem:
    """A head full of ties: small integers everywhere, and every logit at two ids.

    All sums are exact in fp32, so that every order of accumulation gives the same logits:
    backends must agree on every token.
    """
    generator = _generator(seed)
    problem = random_problem(seed, **sizes)
    half = len(problem.readout) // 2

    def integers(like: Tensor, limit: int) -> Tensor:
        drawn = torch.randint(-limit, limit + 1, like.shape, generator=generator)
        return drawn.to(like.dtype)

    base_logits = integers(problem.base_logits, 2)
    readout = integers(problem.readout, 1) * (integers(problem.readout, 5) == 5)
    base_logits[..., half : 2 * half] = base_logits[..., :half]
    readout[half : 2 * half] = readout[:half]
    return problem.with_(
        base_logits=base_logits,
        hidden=torch.zeros_like(problem.hidden),
        token_table=integers(problem.token_table, 1),
        mixer=integers(problem.mixer, 1),
        mlp_down=torch.zeros_like(problem.mlp_down),
        readout=readout,
    )


def rounding_bound(problem: Problem, tokens: Tensor) -> float:
    """How far a backend's logits may lie from the reference's: twice plain torch's own error.

    One more rounding of the greatest logit is added for the reference itself.
    """
    exact = problem.logits("reference", tokens)
    error = (problem.logits("plain", tokens).double() - exact.double()).abs().max()
    return float(2 * error + torch.finfo(torch.float32).eps * exact.abs().max())


def assert_tokens_match(
    reference_logits: Tensor, tokens: Tensor, expected: Tensor, bound: float
) -> int:
    """Tokens equal the expected ones, or lose to them by no more than rounding explains.

    Args:
        reference_logits: [N,D,V] fp32, from which both were chosen.
        tokens: [N,D] draft ids, by the backend under test.
        expected: [N,D] draft ids, by the reference.
        bound: how far a logit of the backend may lie from the reference's.

    Returns:
        The number of slots where they differ.
    """
    differs = (tokens != expected).nonzero()
    for n, k in differs.tolist():
        row = reference_logits[n, k]
        gap = float(row[expected[n, k]] - row[tokens[n, k]])
        assert gap <= 2 * bound, (
            f"block {n} slot {k + 1}: token {int(tokens[n, k])}, expected "
            f"{int(expected[n, k])}, which is ahead by {gap:.3g}; rounding explains {2 * bound:.3g}"
        )
    return len(differs)


def assert_close_as_torch(name: str, actual: Tensor, exact: Tensor, plain: Tensor) -> None:
    """An output is at most twice as far from the exact one as plain torch's in the same type.

    One rounding of the greatest value, in the output's type, is added for the reference itself.
    """
    exact64 = exact.double()
    allowed = 2 * (plain.double() - exact64).abs().max()
    allowed = allowed + torch.finfo(actual.dtype).eps * exact64.abs().max()
    error = (actual.double() - exact64).abs()
    worst = int(error.argmax())
    assert error.max() <= allowed, (
        f"{name}: off by {float(error.max()):.3g} at flat position {worst} of "
        f"{tuple(actual.shape)}; {float(allowed):.3g} is allowed"
    )


def _random_offsets(V: int, V_t: int, generator: torch.Generator) -> Tensor:
    # Neither the first nor the last target id is drafted, so that tests can use them as outsiders.
    targets = 1 + torch.randperm(V_t - 2, generator=generator)[:V].sort().values
    return targets - torch.arange(V)


def _generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)
