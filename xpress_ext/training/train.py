"""Train a drafter and its refiner: `python -m xpress_ext.training.train --help`.

The drafter starts from the target's own last layers, learns alone for the first part, and then
together with the refiner on the whole objective. Several one-thread processes share the work and
average their gradients: on a CPU that is about twice as fast as one process with two threads.
"""

from __future__ import annotations

import argparse
import json
import math
import socket
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.multiprocessing.spawn import spawn

from xpress_ext.atomic import write_atomically
from xpress_ext.checkpoint import save_checkpoint
from xpress_ext.config import XPressConfig
from xpress_ext.drafter import DFlashConfig, DFlashDrafter, default_target_layer_ids
from xpress_ext.reference import target_ids
from xpress_ext.refiner import XPressRefiner
from xpress_ext.targets import load_smollm2
from xpress_ext.training import data, losses, walk
from xpress_ext.training.prompts import standard_library_modules

MASK_TOKEN_ID = 16  # a control token that no text of the target contains


@dataclass
class Recipe:
    """All that decides a training run, besides its data; recorded beside the checkpoint."""

    minutes: float = 60.0
    seed: int = 0
    block_size: int = 16
    alone_block_size: int = 8  # slots trained while the drafter learns alone: later ones cost most
    draft_vocab_size: int = 12288
    rank: int = 64
    layers: int = 2
    context_layers: int = 5
    alone: float = 0.33  # share of the time in which the drafter learns alone
    sequences: int = 4  # per process and step
    anchors: int = 16  # per sequence
    scored: int = 1536  # ids that one step scores
    frequent: int = 512  # of these, always the most frequent
    drafter_rate: float = 1.5e-3
    refiner_rate: float = 3e-3
    warm_up: float = 0.04
    clip: float = 1.0
    beta: float = 0.3
    rounds: int = 3
    loss: losses.LossWeights = field(default_factory=losses.LossWeights)


def initial_drafter(target: Any, recipe: Recipe, scale: Tensor) -> DFlashDrafter:
    """A drafter whose layers are copies of the target's last ones.

    `fc` starts as a copy of the last context layer; scale [L] are the typical sizes of the
    context layers' values, divided out in `fc` so that no layer drowns the others' gradients.
    """
    source = target.config
    config = DFlashConfig(
        hidden_size=source.hidden_size,
        intermediate_size=source.intermediate_size,
        num_hidden_layers=recipe.layers,
        num_attention_heads=source.num_attention_heads,
        num_key_value_heads=source.num_key_value_heads,
        head_dim=source.hidden_size // source.num_attention_heads,
        vocab_size=source.vocab_size,
        num_target_layers=source.num_hidden_layers,
        target_layer_ids=tuple(
            default_target_layer_ids(source.num_hidden_layers, recipe.context_layers)
        ),
        mask_token_id=MASK_TOKEN_ID,
        block_size=recipe.block_size,
        rms_norm_eps=source.rms_norm_eps,
        rope_theta=source.rope_parameters["rope_theta"],
        max_position_embeddings=source.max_position_embeddings,
        qk_norm=False,
        draft_vocab_size=recipe.draft_vocab_size,
    )
    drafter = DFlashDrafter(config)
    for layer, copied in zip(drafter.layers, target.model.layers[-recipe.layers :], strict=True):
        layer.load_state_dict(copied.state_dict())
    drafter.norm.load_state_dict(target.model.norm.state_dict())
    drafter.hidden_norm.load_state_dict(
        target.model.layers[-recipe.layers].input_layernorm.state_dict()
    )
    width = config.hidden_size
    with torch.no_grad():
        drafter.fc.weight.normal_(std=0.02)
        drafter.fc.weight[:, -width:] += torch.eye(width)
    return drafter


def initial_refiner(config: XPressConfig, d2t: Tensor, embedding: Tensor) -> XPressRefiner:
    """Random matrices, but token table and readout start from the target's embedding.

    Both take its leading `r` principal directions, so that rare tokens begin near their kin.
    """
    refiner = XPressRefiner(config, d2t)
    centred = embedding - embedding.mean(0)
    _, directions = torch.linalg.eigh(centred.T @ centred)
    projected = centred @ directions[:, -config.rank :]
    projected = projected / projected.std()
    with torch.no_grad():
        refiner.w1.weight.copy_(0.05 * projected)
        refiner.w2.weight.copy_(0.02 * projected[target_ids(d2t)])
    return refiner


class Trainer:
    """One process's share of the training."""

    def __init__(self, recipe: Recipe, options: argparse.Namespace, rank: int) -> None:
        self.recipe, self.options, self.rank = recipe, options, rank
        torch.manual_seed(recipe.seed)
        self.generator = torch.Generator().manual_seed(recipe.seed + 1000 * (rank + 1))
        paths = [sorted(Path(folder).glob("shard*.pt")) for folder in options.data]
        self.train, self.held_out = split_sequences(paths, options.held_out)
        target, tokenizer = load_smollm2(torch.float32)
        self.embedding = target.model.embed_tokens.weight
        counts = vocabulary_counts(self.train, tokenizer, options.gsm8k)
        self.vocabulary = data.rank_vocabulary(counts, recipe.draft_vocab_size)
        self.draft_of = torch.full((len(self.embedding),), -1)
        self.draft_of[self.vocabulary] = torch.arange(len(self.vocabulary))
        self.head = self.embedding[self.vocabulary]
        self.frequent = counts[self.vocabulary].argsort(descending=True)[: recipe.frequent]
        # fc reads the raw features, so their scale is divided out of them here and folded into
        # its weights when the drafter is saved.
        self.scale = feature_scale(self.train, recipe.context_layers)
        self.drafter = initial_drafter(target, recipe, self.scale)
        config = XPressConfig(
            vocab_size=len(self.embedding),
            hidden_size=self.drafter.config.hidden_size,
            rank=recipe.rank,
            block_size=recipe.block_size,
            draft_vocab_size=recipe.draft_vocab_size,
        )
        self.d2t = self.vocabulary - torch.arange(len(self.vocabulary))
        self.refiner = initial_refiner(config, self.d2t, self.embedding)
        self.optimizer = torch.optim.AdamW(
            [
                {"params": list(self.drafter.parameters()), "rate": recipe.drafter_rate},
                {"params": list(self.refiner.parameters()), "rate": recipe.refiner_rate},
            ],
            betas=(0.9, 0.98),
            weight_decay=0.01,
            fused=True,
        )
        self.step, self.blocks, self.progress = 0, 0, 0.0

    # --- one step ---

    def loss(self) -> tuple[Tensor, dict[str, float]]:
        recipe, joint = self.recipe, self.progress >= self.recipe.alone
        block_size = recipe.block_size if joint else recipe.alone_block_size
        picked = torch.randint(len(self.train), (recipe.sequences,), generator=self.generator)
        blocks = data.sample_blocks(
            [self.train[i] for i in picked], recipe.anchors, block_size, self.generator
        )
        self.blocks += len(blocks.anchor)
        context = self._scaled(blocks.context)
        with torch.autocast("cpu", torch.bfloat16, enabled=self.options.bf16):
            embeds = self.embedding[self._block_ids(blocks, block_size)]
            hidden = self.drafter.draft_anchors(embeds, context, blocks.sequence, blocks.anchor)
        hidden = hidden.float()
        return self._objective(blocks, hidden, joint)

    def _objective(
        self, blocks: data.Blocks, hidden: Tensor, joint: bool
    ) -> tuple[Tensor, dict[str, float]]:
        """Scores the valid slots over the step's ids and adds up the terms."""
        recipe = self.recipe
        labels = self.draft_of[blocks.tokens[:, 2:]]
        keep = blocks.valid & (labels >= 0)
        ids = data.scored_ids(
            labels[keep], len(self.vocabulary), self.frequent, recipe.scored, self.generator
        )
        place = torch.zeros(len(self.vocabulary), dtype=torch.long)
        place[ids] = torch.arange(len(ids))
        label = place[labels[keep]]
        slots = losses.slot_weights(hidden.shape[1], recipe.loss.gamma)
        weight = slots.expand_as(labels)[keep]
        rows = self.head[ids]
        target = (blocks.final[keep] @ rows.T).softmax(-1)
        base_logits = hidden[:, 1:][keep] @ rows.T

        def term(logits: Tensor) -> Tensor:
            return losses.distribution_loss(logits, label, target, weight, recipe.loss)

        base = term(base_logits)
        report = {"base": base.item()}
        if not joint:
            return base, report
        readout, prev = self.refiner.w2.weight[ids], blocks.tokens[:, :-1]

        def refine(prev: Tensor) -> Tensor:
            latent = self.refiner.latent(hidden, prev)[:, 1:]
            return base_logits + latent[keep] @ readout.T

        refined = term(refine(prev))
        consistency = []
        own = base_logits.detach()
        for _ in range(recipe.rounds):
            tokens = blocks.tokens[:, 2:].clone()
            tokens[keep] = self.vocabulary[ids[own.argmax(-1)]]
            logits = refine(losses.fed_back(prev, tokens))
            consistency.append(term(logits))
            own = logits.detach()
        report |= {"refined": refined.item(), "own": consistency[-1].item()}
        share = (self.progress - recipe.alone) / (1 - recipe.alone)
        return (
            losses.objective(
                refined, base, consistency, losses.base_coefficient(share), recipe.beta
            ),
            report,
        )

    def _scaled(self, context: Tensor) -> Tensor:
        return (context.unflatten(-1, (len(self.scale), -1)) / self.scale[:, None]).flatten(-2)

    def _block_ids(self, blocks: data.Blocks, block_size: int) -> Tensor:
        ids = torch.full((len(blocks.anchor), block_size), MASK_TOKEN_ID)
        ids[:, 0] = blocks.tokens[:, 1]
        return ids

    def take_step(self, started: float) -> dict[str, float]:
        """One optimizer step; the time that passed is averaged with the gradients."""
        for group in self.optimizer.param_groups:
            group["lr"] = group["rate"] * self._rate_factor()
        self.optimizer.zero_grad(set_to_none=True)
        loss, report = self.loss()
        loss.backward()
        elapsed = (time.time() - started) / (60 * self.recipe.minutes)
        self.progress = self._average_gradients(elapsed)
        parameters = [p for p in self._parameters() if p.grad is not None]
        report["norm"] = float(nn.utils.clip_grad_norm_(parameters, self.recipe.clip))
        self.optimizer.step()
        self.step += 1
        return report

    def _rate_factor(self) -> float:
        """Linear warm-up, then linear decay to zero; the refiner's begin with its own training."""
        warm = min(1.0, (self.progress + 1e-3) / self.recipe.warm_up)
        return warm * max(1.0 - self.progress, 0.0)

    def _parameters(self) -> list[nn.Parameter]:
        return [*self.drafter.parameters(), *self.refiner.parameters()]

    def _average_gradients(self, elapsed: float) -> float:
        gradients = [p.grad for p in self._parameters() if p.grad is not None]
        flat = torch.cat([torch.tensor([elapsed]), *(g.flatten() for g in gradients)])
        if self.options.processes > 1:
            dist.all_reduce(flat)
            flat /= self.options.processes
            start = 1
            for gradient in gradients:
                gradient.copy_(flat[start : start + gradient.numel()].view_as(gradient))
                start += gradient.numel()
        return float(flat[0])

    # --- held-out evaluation ---

    @torch.no_grad()
    def evaluate(self) -> dict[str, float]:
        """Mean acceptance lengths on held-out sequences, which the processes share."""
        head = self.head
        joint = self.progress >= self.recipe.alone
        refiners = [walk.drafter_alone(self.refiner.d2t)]
        if joint:
            refiners += [walk.refined_while_training(self.refiner, passes) for passes in (1, 6)]
        names = ["drafter", "xpress_k1", "xpress_k6"][: len(refiners)]
        result = {}
        for index, group in enumerate(self.held_out):
            totals = torch.zeros(len(refiners), 2)
            for sequence in group[self.rank :: self.options.processes]:
                end = min(len(sequence.tokens), sequence.prompt_length + 128)
                tokens = sequence.tokens[:end]
                anchors = torch.arange(sequence.prompt_length, end - 1)
                drafts = walk.draft_everywhere(
                    self.drafter,
                    self.embedding,
                    head,
                    tokens,
                    self._scaled(sequence.features[:end].float()),
                    anchors,
                    refiners,
                )
                for row, tried in zip(totals, drafts, strict=True):
                    lengths = walk.acceptance_lengths(tokens, anchors, tried)
                    row += torch.tensor([sum(lengths), len(lengths)])
            if self.options.processes > 1:
                dist.all_reduce(totals)
            for name, (committed, steps) in zip(names, totals.tolist(), strict=True):
                result[f"{Path(self.options.data[index]).name}.{name}"] = committed / max(steps, 1)
        return result

    def save(self, path: Path) -> None:
        """Writes the checkpoint in bf16, the features' scale folded into `fc`."""
        drafter = DFlashDrafter(self.drafter.config)
        drafter.load_state_dict(self.drafter.state_dict())
        with torch.no_grad():
            width = drafter.config.hidden_size
            drafter.fc.weight /= self.scale.repeat_interleave(width)
        save_checkpoint(path, drafter, self.refiner, dtype=torch.bfloat16)

    def save_state(self, path: Path) -> None:
        """Writes the fp32 parameters as they train, to go on from."""
        state = {"drafter": self.drafter.state_dict(), "refiner": self.refiner.state_dict()}
        everything = {**state, "scale": self.scale}
        write_atomically(path, lambda file: torch.save(everything, file))

    def resume(self, path: Path) -> None:
        """Goes on from such parameters; the refiner's only where the draft vocabulary is equal."""
        state = torch.load(path, weights_only=True)
        self.drafter.load_state_dict(state["drafter"])
        self.scale = state["scale"]
        if torch.equal(state["refiner"]["d2t"], self.d2t):
            self.refiner.load_state_dict(state["refiner"])


def vocabulary_counts(sequences: list[data.Answered], tokenizer: Any, gsm8k: Path | None) -> Tensor:
    """Weighted counts [V_t] that rank the draft vocabulary.

    The target's answers count whole; the prompts, GSM8K's own text and the source of the standard
    library count little, but bring in words that these few answers happen not to use.
    """
    size = len(tokenizer)
    answers = torch.cat([s.tokens[s.prompt_length :] for s in sequences])
    prompts = torch.cat([s.tokens[: s.prompt_length] for s in sequences])
    counts = torch.bincount(answers, minlength=size) + 0.1 * torch.bincount(prompts, minlength=size)
    texts = [path.read_text(encoding="utf-8") for path in standard_library_modules()]
    if gsm8k is not None:
        texts += gsm8k.read_text(encoding="utf-8").splitlines()
    encoded = tokenizer(texts, add_special_tokens=False)["input_ids"]
    flat = torch.tensor([token for ids in encoded for token in ids])
    return counts + 0.05 * torch.bincount(flat, minlength=size)


def feature_scale(sequences: list[data.Answered], layers: int) -> Tensor:
    """Typical size of each context layer's values, [L]; the first token's outliers left out."""
    rows = torch.cat([s.features[4:].float() for s in sequences[:64]])
    return rows.unflatten(-1, (layers, -1)).pow(2).mean((0, 2)).sqrt()


def split_sequences(
    paths: list[list[Path]], held_out: int
) -> tuple[list[data.Answered], list[list[data.Answered]]]:
    """Training sequences of all folders, and `held_out` from each folder's first shards."""
    train: list[data.Answered] = []
    kept: list[list[data.Answered]] = []
    for group in paths:
        sequences = [s for s in data.load_shards(group) if s.answer_length >= 16]
        # Shards are sorted by length inside; a stride takes a fair sample of the first few.
        window = sequences[: 8 * held_out]
        kept.append(window[::8][:held_out])
        chosen = {id(s) for s in kept[-1]}
        train += [s for s in sequences if id(s) not in chosen]
    return train, kept


def run(rank: int, recipe: Recipe, options: argparse.Namespace, port: int) -> None:
    """The whole training of one process."""
    torch.set_num_threads(1)
    if options.processes > 1:
        dist.init_process_group(
            "gloo", f"tcp://127.0.0.1:{port}", rank=rank, world_size=options.processes
        )
    trainer = Trainer(recipe, options, rank)
    if options.resume:
        trainer.resume(options.resume)
    log = Log(options.out / "train_log.jsonl") if rank == 0 else None
    if log:
        log.write(
            {
                "recipe": asdict(recipe),
                "train": len(trainer.train),
                "parameters": sum(p.numel() for p in trainer._parameters()),
            }
        )
    started, next_report = time.time(), 0.0
    next_evaluation = options.evaluate_every
    end = min(1.0, options.stop_after / recipe.minutes)
    while trainer.progress < end:
        report = trainer.take_step(started)
        if log and time.time() - started >= next_report:
            next_report = time.time() - started + 20
            log.write(
                {
                    "step": trainer.step,
                    "blocks": trainer.blocks * options.processes,
                    "seconds": round(time.time() - started, 1),
                    **{k: round(v, 4) for k, v in report.items()},
                }
            )
        if trainer.progress * recipe.minutes >= next_evaluation:
            next_evaluation += options.evaluate_every
            finish_round(trainer, log, started)
    finish_round(trainer, log, started)


def finish_round(trainer: Trainer, log: Log | None, started: float) -> None:
    """Evaluate on held-out sequences, and write the checkpoint and a state to resume from."""
    result = trainer.evaluate()
    if log:
        log.write(
            {
                "step": trainer.step,
                "seconds": round(time.time() - started, 1),
                "held_out": {k: round(v, 4) for k, v in result.items()},
            }
        )
        trainer.save(trainer.options.out)
        if trainer.options.state:
            trainer.save_state(trainer.options.state)


class Log:
    """Lines of JSON, appended and printed."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self.file = path.open("w", encoding="utf-8")

    def write(self, line: dict[str, Any]) -> None:
        text = json.dumps(line)
        print(text, flush=True)
        self.file.write(text + "\n")
        self.file.flush()


def parse_arguments() -> tuple[Recipe, argparse.Namespace]:
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--data", nargs="+", required=True, help="folders of shards")
    parser.add_argument("--gsm8k", type=Path, help="GSM8K training file, to rank the vocabulary")
    parser.add_argument("--out", type=Path, required=True, help="folder of the checkpoint")
    parser.add_argument("--state", type=Path, help="file for the fp32 state to resume from")
    parser.add_argument("--resume", type=Path, help="such a file to start from")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--held-out", type=int, default=12, help="sequences kept of each folder")
    parser.add_argument("--evaluate-every", type=float, default=8.0, help="minutes")
    parser.add_argument(
        "--stop-after", type=float, default=math.inf, help="minutes; the schedule stays --minutes"
    )
    parser.add_argument("--bf16", action="store_true", help="bf16 products (AVX512-BF16 or AMX)")
    for name, value in asdict(Recipe()).items():
        if name != "loss":
            parser.add_argument(f"--{name.replace('_', '-')}", type=type(value), default=value)
    for name, value in asdict(losses.LossWeights()).items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=float, default=value)
    options = parser.parse_args()
    chosen = {name: getattr(options, name) for name in asdict(Recipe()) if name != "loss"}
    weights = {name: getattr(options, name) for name in asdict(losses.LossWeights())}
    return Recipe(**chosen, loss=losses.LossWeights(**weights)), options


def main() -> None:
    recipe, options = parse_arguments()
    if options.processes == 1:
        run(0, recipe, options, 0)
        return
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    spawn(run, (recipe, options, port), nprocs=options.processes)


if __name__ == "__main__":
    main()
