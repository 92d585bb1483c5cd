"""The speculative loop over a target, a drafter and a refiner (docs/method.md 1, 4 and 7).

One verification step at batch size 1: the drafter fills a block behind the anchor, the refiner
corrects the block, and the target judges [anchor, drafts] in one forward. The drafts that equal
the target's own greedy choices are kept, the target's next choice (the bonus token) is added and
becomes the new anchor; the caches are cropped to what was kept. So the output is the target's own
greedy decode, whatever was drafted: the draft decides the speed alone.

`speculative_steps` and `greedy_steps` yield one `StepEvent` per step, for callers that show or
interleave decodes; `speculative_generate` and `greedy_generate` consume them. A caller with many
prompts keeps a `SpeculativeDecoder`, which selects the LM head's rows of a reduced draft
vocabulary once.
"""

from __future__ import annotations

import contextlib
import inspect
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn import functional

try:
    import nvtx
except ImportError:  # the ranges serve profilers only
    nvtx = None

from xpress_ext.config import MAX_TOP_C, XPressConfig, is_int
from xpress_ext.reference import target_ids

if TYPE_CHECKING:
    from xpress_ext.drafter import DFlashConfig, DFlashDrafter
    from xpress_ext.heads import InferenceHead

STAGES = ("prompt", "target", "drafter", "lm_head", "refiner")
NEAR_TIE_GAP = 1e-3
PROMPT_CHUNK = 512  # bounds the hidden states of all layers that a long prompt would hold at once

_RANGES: dict[str, Any] = {
    stage: contextlib.nullcontext()
    if nvtx is None
    else nvtx.annotate(f"xpress:{stage}", domain="xpress")
    for stage in STAGES
}


@dataclass(frozen=True)
class StepEvent:
    """What one step committed. Step 0 is the prompt's forward, which yields the first token.

    tokens: target ids in order; the last one is the target's own (the bonus token) unless the
        step ended the decode inside the block. Their number is the acceptance length.
    drafted: how many drafts the target judged (0 in step 0 and in plain steps).
    accepted: how many of `tokens` were drafts.
    passes, full_readouts: what the refiner needed (0 without one); a serial head's steps count as
        passes.
    near_ties: indices into `tokens` whose two best target logits lie within the near-tie gap.
    milliseconds: time of each stage (STAGES) that ran.
    wall_milliseconds: time of the whole step, the Python between the stages included.
    finish_reason: "eos", "length", "context" (the target's positions are used up) or None.
    """

    step: int
    tokens: tuple[int, ...]
    drafted: int
    accepted: int
    passes: int
    full_readouts: int
    near_ties: tuple[int, ...]
    milliseconds: Mapping[str, float]
    wall_milliseconds: float
    finish_reason: str | None


@dataclass
class DecodeStatistics:
    """Figures of one decode; lists have one entry per verification step (the prompt is none).

    acceptance_lengths counts accepted drafts plus the bonus token, up to an end token or the
    length limit, so `num_tokens == 1 + sum(acceptance_lengths)`: the prompt gives the first token.
    near_ties are indices of output tokens where the target's two best logits lie within the gap:
    only there may a block's forward and a plain step choose differently.
    """

    block_size: int
    num_tokens: int = 0
    acceptance_lengths: list[int] = field(default_factory=list)
    drafted: list[int] = field(default_factory=list)
    passes: list[int] = field(default_factory=list)
    full_readouts: list[int] = field(default_factory=list)
    near_ties: list[int] = field(default_factory=list)
    milliseconds: dict[str, float] = field(default_factory=lambda: dict.fromkeys(STAGES, 0.0))
    prompt_milliseconds: float = 0.0
    decode_milliseconds: float = 0.0
    finish_reason: str | None = None

    def record(self, event: StepEvent) -> None:
        """Add one step; events must come in the order in which they were yielded."""
        self.near_ties += [self.num_tokens + index for index in event.near_ties]
        self.num_tokens += len(event.tokens)
        for stage, milliseconds in event.milliseconds.items():
            self.milliseconds[stage] += milliseconds
        self.finish_reason = event.finish_reason
        if event.step == 0:
            self.prompt_milliseconds += event.wall_milliseconds
            return
        self.decode_milliseconds += event.wall_milliseconds
        self.acceptance_lengths.append(len(event.tokens))
        self.drafted.append(event.drafted)
        self.passes.append(event.passes)
        self.full_readouts.append(event.full_readouts)

    @property
    def verification_steps(self) -> int:
        """Forwards of the target after the prompt's."""
        return len(self.acceptance_lengths)

    @property
    def mean_acceptance_length(self) -> float:
        """Tokens per verification step; 0 where the prompt's forward already ended the decode."""
        return _mean(self.acceptance_lengths)

    @property
    def mean_passes(self) -> float:
        """Refiner passes per drafted block."""
        return _mean([used for used, count in zip(self.passes, self.drafted, strict=True) if count])

    @property
    def acceptance_histogram(self) -> list[int]:
        """[B + 1] steps of each acceptance length; entry 0 is always 0."""
        histogram = [0] * (self.block_size + 1)
        for length in self.acceptance_lengths:
            histogram[length] += 1
        return histogram

    @property
    def whole_block_share(self) -> float:
        """Share of the steps that took all B - 1 drafts and the bonus token."""
        return _mean([float(length == self.block_size) for length in self.acceptance_lengths])

    @property
    def tokens_per_second(self) -> float:
        """Speed of the verification steps; the prompt's forward and its token are left out."""
        if self.decode_milliseconds == 0.0:
            return 0.0
        return 1e3 * sum(self.acceptance_lengths) / self.decode_milliseconds

    def to_dict(self) -> dict[str, Any]:
        """All fields and derived figures as plain numbers and lists, for JSON."""
        derived = (
            "verification_steps",
            "mean_acceptance_length",
            "acceptance_histogram",
            "whole_block_share",
            "mean_passes",
            "tokens_per_second",
        )
        return {**vars(self), **{name: getattr(self, name) for name in derived}}


@dataclass(frozen=True)
class GenerateOutput:
    """tokens [1, T_new] int64: the new tokens, an end token included; `stats`: their figures."""

    tokens: Tensor
    stats: DecodeStatistics


@dataclass(frozen=True)
class Difference:
    """The first output token in which two decodes differ, and whether a near-tie explains it."""

    index: int
    near_tie: bool


def first_difference(one: GenerateOutput, other: GenerateOutput) -> Difference | None:
    """Where two decodes of one prompt part, or None if they are equal.

    Behind the first difference the decodes follow different texts, so only that one tells.
    """
    ours, theirs = one.tokens[0].tolist(), other.tokens[0].tolist()
    if ours == theirs:
        return None
    common = min(len(ours), len(theirs))
    index = next((i for i in range(common) if ours[i] != theirs[i]), common)
    return Difference(index, index in one.stats.near_ties or index in other.stats.near_ties)


def speculative_generate(
    target: Any,
    drafter: DFlashDrafter,
    refiner: InferenceHead | None,
    input_ids: Tensor,
    *,
    max_new_tokens: int,
    eos_token_id: int | Sequence[int] | None = None,
    num_passes: int | None = None,
    top_c: int | None = None,
    exact: bool = False,
    callback: Callable[[StepEvent], None] | None = None,
    d2t: Tensor | None = None,
) -> GenerateOutput:
    """The target's own greedy decode, sped up by drafts.

    target: a Hugging Face causal LM in evaluation mode, whose cache can be cropped.
    refiner: a FoldedRefiner, or another head with its `refine` (xpress_ext.heads): MarkovHead,
        DominoHead, which is given the target's embedding here, or NoHead. None decodes with the
        drafter alone (the argmax of its base logits).
    input_ids [1, T] int64, T >= 1.
    max_new_tokens: at most so many new tokens; a block is cut where it would pass the limit. The
        decode also ends at the target's last position (`max_position_embeddings`).
    eos_token_id: ends the decode, itself included. None takes the target's generation config;
        an empty sequence never ends.
    num_passes, top_c, exact: a FoldedRefiner's (docs/method.md 4); None takes its config's. Heads
        without passes take none of them.
    callback: called with every StepEvent, the prompt's included.
    d2t [V] int64: offsets of a reduced draft vocabulary (target id = v + d2t[v]); taken from the
        refiner where there is one.

    Raises ValueError for arguments that do not fit together and TypeError for a target whose cache
    cannot be cropped.
    """
    decoder = SpeculativeDecoder(
        target, drafter, refiner, num_passes=num_passes, top_c=top_c, exact=exact, d2t=d2t
    )
    return decoder.generate(
        input_ids, max_new_tokens=max_new_tokens, eos_token_id=eos_token_id, callback=callback
    )


def speculative_steps(
    target: Any,
    drafter: DFlashDrafter,
    refiner: InferenceHead | None,
    input_ids: Tensor,
    *,
    max_new_tokens: int,
    eos_token_id: int | Sequence[int] | None = None,
    num_passes: int | None = None,
    top_c: int | None = None,
    exact: bool = False,
    d2t: Tensor | None = None,
) -> Iterator[StepEvent]:
    """`speculative_generate` step by step: nothing is computed until the next event is asked for.

    Arguments are checked at the call, with the same exceptions.
    """
    decoder = SpeculativeDecoder(
        target, drafter, refiner, num_passes=num_passes, top_c=top_c, exact=exact, d2t=d2t
    )
    return decoder.steps(input_ids, max_new_tokens=max_new_tokens, eos_token_id=eos_token_id)


def greedy_generate(
    target: Any,
    input_ids: Tensor,
    *,
    max_new_tokens: int,
    eos_token_id: int | Sequence[int] | None = None,
    callback: Callable[[StepEvent], None] | None = None,
) -> GenerateOutput:
    """Plain autoregressive greedy decoding with the same arguments, limits and statistics."""
    steps = greedy_steps(
        target, input_ids, max_new_tokens=max_new_tokens, eos_token_id=eos_token_id
    )
    return collect(steps, block_size=1, device=input_ids.device, callback=callback)


def greedy_steps(
    target: Any,
    input_ids: Tensor,
    *,
    max_new_tokens: int,
    eos_token_id: int | Sequence[int] | None = None,
) -> Iterator[StepEvent]:
    """`greedy_generate` step by step: one token per event."""
    _check_target(target)
    request = _Request(target, input_ids, max_new_tokens, eos_token_id)
    return _decode(target, None, request)


def collect(
    steps: Iterable[StepEvent],
    *,
    block_size: int,
    device: torch.device | str = "cpu",
    callback: Callable[[StepEvent], None] | None = None,
) -> GenerateOutput:
    """Run `steps` to their end; tokens [1, T_new] int64 on `device`, with their statistics."""
    tokens: list[int] = []
    stats = DecodeStatistics(block_size)
    for event in steps:
        tokens += event.tokens
        stats.record(event)
        if callback is not None:
            callback(event)
    return GenerateOutput(torch.tensor([tokens], dtype=torch.int64, device=device), stats)


class SpeculativeDecoder:
    """A target with a drafter and a refiner, ready for any number of prompts.

    Arguments and exceptions as in `speculative_generate`. For a reduced draft vocabulary the rows
    of the LM head are copied once, here; a full one uses the target's own weight.
    """

    def __init__(
        self,
        target: Any,
        drafter: DFlashDrafter,
        refiner: InferenceHead | None = None,
        *,
        num_passes: int | None = None,
        top_c: int | None = None,
        exact: bool = False,
        d2t: Tensor | None = None,
    ) -> None:
        _check_target(target)
        if not hasattr(drafter, "draft"):
            raise TypeError(f"drafter must be a DFlashDrafter, got {type(drafter).__name__}")
        self.target = target
        self.block_size = int(drafter.config.block_size)
        if refiner is not None:
            _check_refiner(refiner, self.block_size)
        d2t = _one_d2t(d2t, None if refiner is None else refiner.d2t)
        options = _options(refiner, self.block_size, num_passes, top_c, exact)
        self._draft = _Draft(target, drafter, refiner, d2t, options)

    def steps(
        self,
        input_ids: Tensor,
        *,
        max_new_tokens: int,
        eos_token_id: int | Sequence[int] | None = None,
    ) -> Iterator[StepEvent]:
        """One event per step; the prompt is checked at the call, computed from the first event."""
        request = _Request(self.target, input_ids, max_new_tokens, eos_token_id)
        return _decode(self.target, self._draft, request)

    def generate(
        self,
        input_ids: Tensor,
        *,
        max_new_tokens: int,
        eos_token_id: int | Sequence[int] | None = None,
        callback: Callable[[StepEvent], None] | None = None,
    ) -> GenerateOutput:
        """All steps at once, with their statistics."""
        steps = self.steps(input_ids, max_new_tokens=max_new_tokens, eos_token_id=eos_token_id)
        return collect(
            steps, block_size=self.block_size, device=input_ids.device, callback=callback
        )


class _Request:
    """A checked prompt with the limits of its decode."""

    def __init__(
        self,
        target: Any,
        input_ids: Tensor,
        max_new_tokens: int,
        eos_token_id: int | Sequence[int] | None,
    ) -> None:
        _check_prompt(target, input_ids)
        if isinstance(max_new_tokens, bool) or not isinstance(max_new_tokens, int):
            raise TypeError(f"max_new_tokens must be an int, got {max_new_tokens!r}")
        if max_new_tokens < 1:
            raise ValueError(f"max_new_tokens must be at least 1, got {max_new_tokens}")
        self.input_ids = input_ids
        self.eos = _end_tokens(target, eos_token_id)
        self.limit = max_new_tokens
        self.limit_reason = "length"
        positions = getattr(target.config.get_text_config(), "max_position_embeddings", None)
        if positions is not None and positions - input_ids.shape[1] < max_new_tokens:
            self.limit = positions - input_ids.shape[1]
            self.limit_reason = "context"

    def commit(
        self, choices: list[int], drafts: list[int], committed: int
    ) -> tuple[tuple[int, ...], int, str | None]:
        """The step's tokens, how many of them were drafts, and the finish reason.

        choices [n + 1]: the target's greedy choices behind anchor and drafts; drafts [n];
        committed: how many tokens the decode has so far.
        """
        accepted = 0
        while accepted < len(drafts) and drafts[accepted] == choices[accepted]:
            accepted += 1
        tokens = choices[: min(accepted + 1, self.limit - committed)]
        end = next((i for i, token in enumerate(tokens) if token in self.eos), None)
        if end is not None:
            return tuple(tokens[: end + 1]), min(accepted, end + 1), "eos"
        reason = self.limit_reason if committed + len(tokens) == self.limit else None
        return tuple(tokens), min(accepted, len(tokens)), reason


class _Clock:
    """Times the stages of one step and names them for a profiler.

    On a GPU events are recorded in the stream and read when the step ends, so that timing adds no
    synchronisation to the ones that the loop needs anyway.
    """

    def __init__(self, device: torch.device) -> None:
        self._cuda = device.type == "cuda"
        self._spans: list[tuple[str, Any, Any]] = []
        self._started = time.perf_counter()

    @contextlib.contextmanager
    def stage(self, name: str) -> Iterator[None]:
        with _RANGES[name]:
            start = self._mark()
            yield
            self._spans.append((name, start, self._mark()))

    def _mark(self) -> Any:
        if not self._cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def stop(self) -> tuple[dict[str, float], float]:
        """Milliseconds of each stage, and of the whole step."""
        stages: dict[str, float] = {}
        for name, start, end in self._spans:
            if self._cuda:
                end.synchronize()
            span = start.elapsed_time(end) if self._cuda else 1e3 * (end - start)
            stages[name] = stages.get(name, 0.0) + span
        return stages, 1e3 * (time.perf_counter() - self._started)


@torch.inference_mode()
def _decode(target: Any, draft: _Draft | None, request: _Request) -> Iterator[StepEvent]:
    """All steps of one decode; without a draft every step is plain autoregressive decoding."""
    loop = _Loop(target, draft, request)
    event = loop.read_prompt()
    yield event
    while event.finish_reason is None:
        event = loop.verify_block()
        yield event


class _Loop:
    """State of one decode: what is committed, and what the next draft starts from."""

    def __init__(self, target: Any, draft: _Draft | None, request: _Request) -> None:
        self._request = request
        self._device = request.input_ids.device
        self._sequence = _Sequence(target, () if draft is None else draft.layer_ids)
        self._block = None if draft is None else _Block(draft)
        self._steps = 0
        self._committed = 0
        self._predecessor = self._anchor = int(request.input_ids[0, -1])
        self._features: Tensor | None = None

    def read_prompt(self) -> StepEvent:
        """One forward of the prompt: the first token, which becomes the first anchor."""
        clock = _Clock(self._device)
        with clock.stage("prompt"):
            logits, self._features = self._sequence.read_prompt(self._request.input_ids)
            choices, ties = _judge(logits)
        return self._commit(clock, choices, ties, _NO_DRAFT)

    def verify_block(self) -> StepEvent:
        """Draft, refine, and judge [anchor, drafts] in one forward of the target."""
        clock = _Clock(self._device)
        # Drafts that could still be output: one place is the bonus token's.
        room = self._request.limit - self._committed - 1
        drafted = _NO_DRAFT
        if self._block is not None and room > 0:
            drafted = self._block.fill(clock, self._features, self._predecessor, self._anchor)
            drafted = replace(drafted, tokens=drafted.tokens[:room])
        with clock.stage("target"):
            ids = torch.tensor([[self._anchor, *drafted.tokens]], device=self._device)
            logits, features = self._sequence.forward(ids)
            choices, ties = _judge(logits)
        event = self._commit(clock, choices, ties, drafted)
        kept = len(event.tokens)
        self._sequence.drop(len(choices) - kept)
        self._features = None if features is None else features[:, :kept]
        return event

    def _commit(
        self, clock: _Clock, choices: list[int], ties: list[bool], drafted: _Drafted
    ) -> StepEvent:
        tokens, accepted, reason = self._request.commit(choices, drafted.tokens, self._committed)
        stages, wall = clock.stop()
        event = StepEvent(
            step=self._steps,
            tokens=tokens,
            drafted=len(drafted.tokens),
            accepted=accepted,
            passes=drafted.passes,
            full_readouts=drafted.full_readouts,
            near_ties=tuple(index for index in range(len(tokens)) if ties[index]),
            milliseconds=stages,
            wall_milliseconds=wall,
            finish_reason=reason,
        )
        self._steps += 1
        self._committed += len(tokens)
        self._predecessor, self._anchor = (self._anchor, *tokens)[-2:]
        return event


class _Sequence:
    """The target's walk over one sequence: its cache, and the layers that the drafter reads."""

    def __init__(self, target: Any, layer_ids: Sequence[int]) -> None:
        from transformers import DynamicCache

        self._target = target
        self._layer_ids = layer_ids
        self._cache = DynamicCache(config=target.config)
        # While recording, a sliding window keeps what it slid over until the next crop.
        self._recording = bool(layer_ids) and hasattr(self._cache, "activate_past_recording")
        if self._recording:
            self._cache.activate_past_recording()
        parameters = inspect.signature(target.forward).parameters
        self._cache_name = "cache" if "cache" in parameters else "past_key_values"
        self._keep_name = "logits_to_keep" if "logits_to_keep" in parameters else None

    def read_prompt(self, ids: Tensor) -> tuple[Tensor, Tensor | None]:
        """ids [1, T] -> the last token's logits [1, V_t], features [1, T, L*d] of all tokens."""
        features = []
        for chunk in ids.split(PROMPT_CHUNK, dim=1):
            logits, feature = self.forward(chunk, keep=1)
            self.drop(0)
            features.append(feature)
        if not self._layer_ids:
            return logits, None
        return logits, torch.cat([feature for feature in features if feature is not None], dim=1)

    def forward(self, ids: Tensor, keep: int = 0) -> tuple[Tensor, Tensor | None]:
        """ids [1, n] -> logits [n, V_t] (of the last `keep`, if given), features [1, n, L*d]."""
        arguments: dict[str, Any] = {self._cache_name: self._cache}
        if self._keep_name is not None:
            arguments[self._keep_name] = keep
        output = self._target(
            input_ids=ids,
            use_cache=True,
            output_hidden_states=bool(self._layer_ids),
            return_dict=True,
            **arguments,
        )
        if not self._layer_ids:
            return output.logits[0, -keep:], None
        states = [output.hidden_states[layer + 1] for layer in self._layer_ids]
        return output.logits[0, -keep:], torch.cat(states, dim=-1)

    def drop(self, count: int) -> None:
        """Take the last `count` tokens out of the cache."""
        if count > 0 or self._recording:
            _check_croppable(self._cache)
            self._cache.crop(-count)


@dataclass(frozen=True)
class _Drafted:
    """tokens: B - 1 target ids; what the refiner needed for them."""

    tokens: list[int]
    passes: int
    full_readouts: int


_NO_DRAFT = _Drafted([], 0, 0)


class _Draft:
    """Drafter, LM head of the draft vocabulary, and refiner."""

    def __init__(
        self,
        target: Any,
        drafter: DFlashDrafter,
        refiner: InferenceHead | None,
        d2t: Tensor | None,
        options: Mapping[str, int],
    ) -> None:
        self.layer_ids = tuple(int(layer) for layer in drafter.target_layer_ids)
        _check_drafter(target, drafter.config, self.layer_ids)
        self._drafter = drafter
        self._refiner = refiner
        self._options = options
        self._embedding = target.get_input_embeddings()
        self._dtype = next(drafter.parameters()).dtype
        head = target.get_output_embeddings()
        bias = getattr(head, "bias", None)
        self._ids: Tensor | None = None
        if d2t is not None:
            self._ids = _draft_ids(d2t.to(head.weight.device), head.weight.shape[0])
        self._head_weight = head.weight if self._ids is None else head.weight[self._ids]
        self._head_bias = bias if bias is None or self._ids is None else bias[self._ids]
        if refiner is not None:
            _check_sizes(refiner, self._head_weight.shape[0], drafter.config.hidden_size)
            if hasattr(refiner, "attach_embedding"):
                refiner.attach_embedding(self._embedding)
        block_size = int(drafter.config.block_size)
        masks = [int(drafter.config.mask_token_id)] * (block_size - 1)
        self._masks = torch.tensor([masks], device=head.weight.device)

    def new_cache(self) -> Any:
        """The drafter's empty context cache for one sequence."""
        return self._drafter.new_cache()

    def hidden(self, anchor: Tensor, features: Tensor, cache: Any, position: int) -> Tensor:
        """anchor [1], features [1, T_new, L*d] -> hidden states [1, B, H] of the block."""
        embeds = self._embedding(torch.cat([anchor[None], self._masks], dim=1))
        return self._drafter.draft(
            embeds.to(self._dtype), features.to(self._dtype), cache, position
        )

    def base_logits(self, hidden: Tensor) -> Tensor:
        """hidden [1, B, H] -> logits [1, B-1, V] of slots 1..B-1."""
        weight = self._head_weight
        return functional.linear(hidden[:, 1:].to(weight.dtype), weight, self._head_bias)

    @property
    def refines(self) -> bool:
        """False for the drafter alone."""
        return self._refiner is not None

    def best(self, base_logits: Tensor) -> _Drafted:
        """base_logits [1, B-1, V] -> the drafter's own B - 1 tokens, their argmax."""
        best = base_logits[0].argmax(dim=-1)
        return _Drafted((best if self._ids is None else self._ids[best]).tolist(), 0, 0)

    def refine(
        self, base_logits: Tensor, hidden: Tensor, anchor: Tensor, predecessor: Tensor
    ) -> _Drafted:
        """base_logits [1, B-1, V], hidden [1, B, H], two ids [1] -> the refined B - 1 tokens."""
        assert self._refiner is not None
        output = self._refiner.refine(
            _operator_dtype(base_logits),
            _operator_dtype(hidden),
            anchor,
            predecessor,
            **self._options,
        )
        return _Drafted(output.tokens[0].tolist(), int(output.passes), int(output.full_readouts))


class _Block:
    """The drafter's walk over one sequence: its context cache and how much it holds."""

    def __init__(self, draft: _Draft) -> None:
        self._draft = draft
        self._cache = draft.new_cache()
        self._length = 0  # tokens before the anchor, so also the anchor's position

    def fill(
        self, clock: _Clock, features: Tensor | None, predecessor: int, anchor: int
    ) -> _Drafted:
        """Draft behind `anchor`; features [1, T_new, L*d] of all tokens committed since."""
        assert features is not None
        self._length += features.shape[1]
        device = features.device
        ids = torch.tensor([predecessor, anchor], device=device)
        with clock.stage("drafter"):
            hidden = self._draft.hidden(ids[1:], features, self._cache, self._length)
        with clock.stage("lm_head"):
            base_logits = self._draft.base_logits(hidden)
            if not self._draft.refines:
                return self._draft.best(base_logits)
        with clock.stage("refiner"):
            return self._draft.refine(base_logits, hidden, ids[1:], ids[:1])


def _judge(logits: Tensor) -> tuple[list[int], list[bool]]:
    """logits [n, V_t] -> greedy choices [n], and whether each one's runner-up is within the gap."""
    best = logits.max(dim=-1, keepdim=True).values
    near = (logits >= best - NEAR_TIE_GAP).sum(dim=-1)
    choices, counts = torch.stack([logits.argmax(dim=-1), near]).tolist()
    if 0 in counts:
        raise ValueError("the target's logits hold NaN: check its weights and dtype")
    return choices, [count > 1 for count in counts]


def _operator_dtype(values: Tensor) -> Tensor:
    """The operators take 16- and 32-bit floats; a float64 target is rounded for its draft only."""
    return values.float() if values.dtype == torch.float64 else values


def _draft_ids(d2t: Tensor, target_vocabulary: int) -> Tensor:
    """d2t [V] offsets -> target ids [V] int64."""
    if d2t.ndim != 1 or d2t.dtype != torch.int64:
        raise ValueError(f"d2t must be [V] int64, got {list(d2t.shape)} {d2t.dtype}")
    ids = target_ids(d2t)
    if ids.numel() and (int(ids.min()) < 0 or int(ids.max()) >= target_vocabulary):
        raise ValueError(
            f"d2t leads to target ids {int(ids.min())}..{int(ids.max())}, "
            f"but the target's LM head has rows 0..{target_vocabulary - 1}"
        )
    return ids


def _end_tokens(target: Any, eos_token_id: int | Sequence[int] | None) -> frozenset[int]:
    if eos_token_id is None:
        config = getattr(target, "generation_config", None)
        eos_token_id = getattr(config, "eos_token_id", None)
    if eos_token_id is None:
        return frozenset()
    tokens = eos_token_id if isinstance(eos_token_id, Iterable) else (eos_token_id,)
    for token in tokens:
        _check_int("eos_token_id", token)
    return frozenset(tokens)


def _check_int(name: str, value: object) -> None:
    if not is_int(value):
        raise TypeError(f"{name} must be an int, got {value!r}")


def _check_target(target: Any) -> None:
    if not hasattr(target, "get_output_embeddings") or not hasattr(target, "config"):
        raise TypeError(
            f"target must be a Hugging Face causal LM (transformers), got {type(target).__name__}"
        )
    if getattr(target.config, "is_encoder_decoder", False):
        raise TypeError("target is an encoder-decoder; only decoder-only causal LMs are supported")
    if target.get_output_embeddings() is None:
        raise TypeError(f"target {type(target).__name__} has no LM head")
    if target.training:
        raise ValueError("target is in training mode: call target.eval() first")


def _check_prompt(target: Any, input_ids: Tensor) -> None:
    if not isinstance(input_ids, Tensor):
        raise TypeError(f"input_ids must be a tensor [1, T], got {type(input_ids).__name__}")
    if input_ids.dtype != torch.int64:
        raise TypeError(f"input_ids must be int64, got {input_ids.dtype}")
    if input_ids.ndim != 2 or input_ids.shape[0] != 1 or input_ids.shape[1] < 1:
        raise ValueError(
            f"input_ids must be [1, T] with T >= 1 (one sequence), got {list(input_ids.shape)}"
        )
    weight = target.get_input_embeddings().weight
    if input_ids.device != weight.device:
        raise ValueError(f"input_ids are on {input_ids.device}, the target on {weight.device}")
    lowest, highest = int(input_ids.min()), int(input_ids.max())
    if lowest < 0 or highest >= weight.shape[0]:
        raise ValueError(
            f"input_ids span {lowest}..{highest}, but the target's vocabulary is "
            f"0..{weight.shape[0] - 1}"
        )
    positions = getattr(target.config.get_text_config(), "max_position_embeddings", None)
    if positions is not None and input_ids.shape[1] >= positions:
        raise ValueError(
            f"the prompt has {input_ids.shape[1]} tokens, which leaves no room in the target's "
            f"context of {positions}: shorten it"
        )


def _options(
    refiner: InferenceHead | None,
    block_size: int,
    num_passes: int | None,
    top_c: int | None,
    exact: bool,
) -> dict[str, int]:
    """What the head's `refine` is called with beside its inputs, its defaults filled in."""
    config = None if refiner is None else refiner.config
    if config is None or isinstance(config, XPressConfig):
        return _pass_options(config, block_size - 1, num_passes, top_c, exact)
    if (num_passes, top_c, exact) != (None, None, False):
        raise ValueError(
            f"a {type(refiner).__name__} makes no passes: leave out num_passes, top_c and exact"
        )
    return {}


def _pass_options(
    config: XPressConfig | None,
    drafted: int,
    num_passes: int | None,
    top_c: int | None,
    exact: bool,
) -> dict[str, int]:
    if num_passes is None:
        num_passes = drafted if exact or config is None else config.num_passes
    if top_c is None:
        top_c = 0 if config is None else config.top_c
    _check_int("num_passes", num_passes)
    _check_int("top_c", top_c)
    if not isinstance(exact, bool):
        raise TypeError(f"exact must be a bool, got {exact!r}")
    if num_passes < 1:
        raise ValueError(f"num_passes must be at least 1, got {num_passes}")
    limit = MAX_TOP_C if config is None else min(MAX_TOP_C, config.draft_vocab_size)
    if not 0 <= top_c <= limit:
        raise ValueError(
            f"top_c must be 0 (the whole draft vocabulary) or a number of candidates up to "
            f"{limit}, got {top_c}"
        )
    if exact and (top_c < 1 or num_passes < drafted):
        raise ValueError(
            f"exact=True needs top_c >= 1 and num_passes >= {drafted} (block_size - 1), "
            f"got top_c={top_c}, num_passes={num_passes}"
        )
    # More passes than slots act as that many.
    return {"num_passes": min(num_passes, drafted), "top_c": top_c, "exact": exact}


def _check_refiner(refiner: InferenceHead, block_size: int) -> None:
    if not hasattr(refiner, "refine"):
        raise TypeError(
            "refiner must be a FoldedRefiner, another head with `refine`, or None, "
            f"got {type(refiner).__name__}"
            + ("; call .fold() on it" if hasattr(refiner, "fold") else "")
        )
    if refiner.config.block_size != block_size:
        raise ValueError(
            f"the refiner's block_size is {refiner.config.block_size}, the drafter's {block_size}"
        )
    if refiner.config.num_drafted != block_size - 1:
        raise ValueError(
            f"the head drafts {refiner.config.num_drafted} of {block_size} slots (the shift "
            "layout); decoding takes heads of the fill-in layout only"
        )


def _one_d2t(given: Tensor | None, refiners: Tensor | None) -> Tensor | None:
    """The offsets that the LM head's rows are chosen by; the refiner reads its own."""
    if given is None:
        return refiners
    if not isinstance(given, Tensor):
        raise TypeError(f"d2t must be a tensor, got {type(given).__name__}")
    if refiners is not None and not torch.equal(given.cpu(), refiners.cpu()):
        raise ValueError("d2t differs from the refiner's own; leave it out, the refiner's is taken")
    return given


def _check_sizes(refiner: InferenceHead, rows: int, hidden_size: int) -> None:
    if refiner.config.hidden_size != hidden_size:
        raise ValueError(
            f"the refiner's hidden_size is {refiner.config.hidden_size}, the drafter's "
            f"{hidden_size}"
        )
    if refiner.config.draft_vocab_size != rows:
        raise ValueError(
            f"the refiner scores {refiner.config.draft_vocab_size} tokens, the LM head gives "
            f"{rows}: pass the d2t that belongs to the refiner"
        )


def _check_drafter(target: Any, config: DFlashConfig, layer_ids: Sequence[int]) -> None:
    rows, width = target.get_input_embeddings().weight.shape
    if config.hidden_size != width:
        raise ValueError(
            f"the drafter's hidden_size is {config.hidden_size}, the target's is {width}: "
            "a drafter borrows the embedding and the LM head of the target it was trained for"
        )
    if config.mask_token_id >= rows:
        raise ValueError(
            f"the drafter's mask_token_id is {config.mask_token_id}, "
            f"the target's embedding has rows 0..{rows - 1}"
        )
    layers = target.config.get_text_config().num_hidden_layers
    if max(layer_ids) >= layers:
        raise ValueError(
            f"the drafter reads target layers {list(layer_ids)}, the target has 0..{layers - 1}"
        )


def _check_croppable(cache: Any) -> None:
    if not hasattr(cache, "crop") or not getattr(cache, "is_croppable", True):
        raise TypeError(
            "the target's cache cannot be cropped (recurrent or quantised layers), so rejected "
            "drafts could not be taken back; speculative decoding needs an attention cache"
        )


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else 0.0
