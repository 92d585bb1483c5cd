"""Sizes and defaults of one XPress head."""

from __future__ import annotations

from dataclasses import dataclass

MIN_BLOCK_SIZE = 2
MAX_BLOCK_SIZE = 32
MAX_RANK = 512
MAX_TOP_C = 1024
CHANNEL_MULTIPLE = 32  # the operators take r, H and m in multiples of this
_MAX_SIZE = 2**31 - 1
PARTS = ("hidden", "mean", "mixer", "mlp")  # of a head, each with its switch `use_...`


@dataclass(frozen=True)
class XPressConfig:
    """Sizes of a head and what `FoldedRefiner.refine` does unless told otherwise.

    The letters are the method's own (docs/method.md).

    Args:
        vocab_size: V_t, the target's vocabulary: rows of the token table.
        hidden_size: H, width of the drafter's hidden states.
        rank: r, channels of the latent, at most 512.
        mlp_hidden: m, width of the MLP; 0 stands for 2r.
        block_size: B, slots in a block with the anchor's, 2 to 32. A block drafts B-1 tokens.
        draft_vocab_size: V, the draft's vocabulary: rows of the readout and of the base logits;
            0 stands for V_t. Where it is smaller, a head carries the offsets `d2t`.
        num_passes: K, the cap on Jacobi passes, at least 1.
        top_c: C, candidates per slot; 0 reads the whole draft vocabulary.
        use_hidden: the latent reads the drafter's hidden states, `h_k` and their mean `g`.
        use_mean: it reads the mean `g`; without `use_hidden` it never does.
        use_mixer: slots are mixed; without it each slot reads its own previous token alone.
        use_mlp: the latent passes through the MLP.

    The four switches exist to measure what each part is worth. A part that is switched off keeps
    its parameters, as zeros that do not learn, so every checkpoint format and the fold stay as
    they are. Without hidden states, mixer and MLP the head is a Markov head.

    Raises:
        ValueError: a size is out of range; the message names it.
    """

    vocab_size: int
    hidden_size: int
    rank: int = 256
    mlp_hidden: int = 0
    block_size: int = 16
    draft_vocab_size: int = 0
    num_passes: int = 6
    top_c: int = 0
    use_hidden: bool = True
    use_mean: bool = True
    use_mixer: bool = True
    use_mlp: bool = True

    def __post_init__(self) -> None:
        for name in PARTS:
            _check_bool(f"use_{name}", getattr(self, f"use_{name}"))
        for name in ("rank", "mlp_hidden", "vocab_size", "draft_vocab_size"):
            check_int(name, getattr(self, name))  # before the zeros below are replaced
        # A frozen dataclass can only be completed through object.__setattr__.
        object.__setattr__(self, "mlp_hidden", self.mlp_hidden or 2 * self.rank)
        object.__setattr__(self, "draft_vocab_size", self.draft_vocab_size or self.vocab_size)
        check_range("vocab_size", self.vocab_size, 1)
        check_range("hidden_size", self.hidden_size, 1)
        check_range("rank", self.rank, 1, MAX_RANK)
        check_range("mlp_hidden", self.mlp_hidden, 1)
        check_range("block_size", self.block_size, MIN_BLOCK_SIZE, MAX_BLOCK_SIZE)
        check_range("draft_vocab_size", self.draft_vocab_size, 1, self.vocab_size)
        check_range("num_passes", self.num_passes, 1)
        check_range("top_c", self.top_c, 0, min(self.draft_vocab_size, MAX_TOP_C))

    @property
    def num_drafted(self) -> int:
        """D, the slots that a block drafts: all but the anchor's."""
        return self.block_size - 1

    @property
    def left_out(self) -> tuple[str, ...]:
        """The parts (PARTS) that are switched off."""
        return tuple(name for name in PARTS if not getattr(self, f"use_{name}"))


def is_int(value: object) -> bool:
    """Whether `value` is an int, which True and False are not."""
    return isinstance(value, int) and not isinstance(value, bool)


def check_int(name: str, value: object) -> None:
    """Raises ValueError unless `value` is an int."""
    if not is_int(value):
        raise ValueError(f"{name} must be an int, got {value!r}")


def check_range(name: str, value: int, low: int, high: int | None = None) -> None:
    """Raises ValueError unless `value` is an int from `low` to `high`, or to 2^31 - 1."""
    check_int(name, value)
    if not low <= value <= (_MAX_SIZE if high is None else high):
        limit = f"at least {low} and below 2^31" if high is None else f"from {low} to {high}"
        raise ValueError(f"{name} must be {limit}, got {value}")


def _check_bool(name: str, value: object) -> None:
    if not isinstance(value, bool):
        raise ValueError(f"{name} must be True or False, got {value!r}")
