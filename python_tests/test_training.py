"""The training objective term by term, the data behind it, and a training that learns."""

import itertools
import math
import random

import pytest
import torch

from xpress_ext.config import XPressConfig
from xpress_ext.drafter import DFlashConfig, DFlashDrafter
from xpress_ext.refiner import XPressRefiner
from xpress_ext.training import data, losses, prompts, walk

WIDTH, CONTEXT_LAYERS, VOCABULARY = 16, 2, 30


def answered(length: int, prompt_length: int, seed: int = 0) -> data.Answered:
    generator = torch.Generator().manual_seed(seed)

    def noise(width):
        return torch.randn(length, width, generator=generator)

    tokens = torch.randint(VOCABULARY, (length,), generator=generator)
    return data.Answered(tokens, prompt_length, noise(CONTEXT_LAYERS * WIDTH), noise(WIDTH))


# --- losses ---


def test_slot_weights_fall_by_gamma():
    weights = losses.slot_weights(5, gamma=4.0)
    assert weights.tolist() == pytest.approx([1.0, *(math.exp(-k / 4) for k in (1, 2, 3))])


def test_total_variation_is_one_minus_the_chance_of_acceptance():
    generator = torch.Generator().manual_seed(0)
    p, q = torch.rand(2, 6, 9, generator=generator).softmax(-1)
    accepted = torch.minimum(p, q).sum(-1)
    torch.testing.assert_close(losses.total_variation(p, q), 1 - accepted)


def test_total_variation_of_the_recipe_is_the_plain_l1_distance_weighted_by_point_nine():
    recipe = losses.LossWeights()
    p, q = torch.tensor([[1.0, 0.0]]), torch.tensor([[0.0, 1.0]])
    weighted = recipe.total_variation * losses.total_variation(p, q)
    assert weighted.item() == pytest.approx(0.9 * (p - q).abs().sum().item())


def test_distribution_loss_is_the_weighted_mean_of_its_terms():
    logits = torch.tensor([[2.0, 0.0, -1.0], [0.0, 1.0, 0.0], [5.0, 5.0, 5.0]])
    target = torch.tensor([[0.7, 0.2, 0.1], [0.1, 0.8, 0.1], [1.0, 0.0, 0.0]])
    label, weight = torch.tensor([0, 1, 2]), torch.tensor([1.0, 0.5, 0.0])
    weights = losses.LossWeights(cross_entropy=0.3, total_variation=2.0)
    rows = []
    for row in range(2):
        p = logits[row].softmax(-1)
        variation = 0.5 * (p - target[row]).abs().sum()
        rows.append(0.3 * -p[label[row]].log() + 2.0 * variation)
    expected = (1.0 * rows[0] + 0.5 * rows[1]) / 1.5
    loss = losses.distribution_loss(logits, label, target, weight, weights)
    torch.testing.assert_close(loss, expected)


def test_base_coefficient_falls_linearly_and_stays_in_its_range():
    values = [losses.base_coefficient(t) for t in (-1.0, 0.0, 0.5, 1.0, 2.0)]
    assert values == pytest.approx([0.6, 0.6, 0.4, 0.2, 0.2])


def test_slots_past_the_end_are_masked_with_all_later_ones():
    valid = losses.valid_slots(torch.tensor([3, 8]), torch.tensor([6, 9]), block_size=5)
    assert valid.tolist() == [[True, True, False, False], [False] * 4]


def test_fed_back_shifts_own_tokens_behind_predecessor_and_anchor():
    prev = torch.tensor([[7, 8, 1, 2, 3]])
    own = torch.tensor([[11, 12, 13, 14]])
    assert losses.fed_back(prev, own).tolist() == [[7, 8, 11, 12, 13]]


def test_objective_adds_its_terms():
    one, two, rounds = torch.tensor(1.0), torch.tensor(2.0), [torch.tensor(3.0), torch.tensor(5.0)]
    assert losses.objective(one, two, rounds, 0.5, 0.25).item() == 1 + 0.5 * 2 + 0.25 * 4
    assert losses.objective(one, two, [], 0.5, 0.25).item() == 2.0


# --- data ---


def test_blocks_hold_what_stands_at_their_anchors():
    sequences = [answered(12, 4, seed=1), answered(9, 3, seed=2)]
    anchors = [torch.tensor([4, 9]), torch.tensor([7])]
    blocks = data.blocks_at(sequences, anchors, block_size=4)
    assert blocks.sequence.tolist() == [0, 0, 1]
    first = sequences[0].tokens
    assert blocks.tokens[0].tolist() == first[3:8].tolist()
    assert blocks.valid.tolist() == [[True] * 3, [True, True, False], [True, False, False]]
    assert blocks.tokens[1].tolist() == [*first[8:12].tolist(), 0]
    torch.testing.assert_close(blocks.final[0], sequences[0].final[4:7])
    torch.testing.assert_close(blocks.context[1, :7], sequences[1].features[:7])
    assert blocks.context.shape[1] == 9  # nothing at or after the last anchor is carried along


def test_valid_slots_of_the_data_agree_with_the_mask_of_the_losses():
    sequences = [answered(12, 4)]
    anchors = torch.arange(4, 11)
    blocks = data.blocks_at(sequences, [anchors], block_size=6)
    expected = losses.valid_slots(anchors, torch.full((7,), 12), block_size=6)
    assert torch.equal(blocks.valid, expected)


def test_sampled_anchors_stand_in_the_answer_and_have_a_token_to_draft():
    generator = torch.Generator().manual_seed(0)
    sequences = [answered(20, 5, seed=3), answered(8, 6, seed=4)]
    blocks = data.sample_blocks(sequences, 50, 4, generator)
    for row, sequence in enumerate(sequences):
        anchors = blocks.anchor[blocks.sequence == row]
        expected = range(sequence.prompt_length, len(sequence.tokens) - 1)
        assert anchors.tolist() == list(expected)
    assert blocks.valid[:, 0].all()


def test_the_draft_vocabulary_is_ranked_by_count_then_by_lowest_id():
    counts = torch.tensor([1.0, 5.0, 0.0, 5.0, 1.0])
    assert data.rank_vocabulary(counts, 3).tolist() == [0, 1, 3]


def test_scored_ids_hold_every_label_and_the_frequent_once():
    generator = torch.Generator().manual_seed(0)
    labels, frequent = torch.tensor([3, 3, 40, -1]), torch.tensor([0, 1, 3])
    ids = data.scored_ids(labels, 100, frequent, 20, generator)
    assert len(ids) == 20
    assert torch.equal(ids, ids.unique())
    assert {0, 1, 3, 40} <= set(ids.tolist())
    few = torch.tensor([3, -1])
    assert data.scored_ids(few, 10, frequent, 50, generator).tolist() == list(range(10))


# --- prompts ---


def test_code_prompts_are_seeded_different_and_runnable_as_python():
    first = [prompts.composed_function(random.Random(seed)) for seed in range(40)]
    again = [prompts.composed_function(random.Random(seed)) for seed in range(40)]
    assert first == again
    assert len(set(first)) > 35
    for function in first:
        compile(function, "prompt", "exec")


def test_examples_in_composed_prompts_are_true():
    tests = {name: test for name, _, test in prompts._INTEGER_TESTS}
    assert [n for n in range(20) if tests["prime"](n)] == [2, 3, 5, 7, 11, 13, 17, 19]
    assert [n for n in range(20) if tests["square"](n)] == [0, 1, 4, 9, 16]


def test_the_standard_library_gives_documented_functions():
    functions = list(itertools.islice(prompts.standard_library_functions(), 200))
    assert len(set(functions)) > 150
    assert all(f.startswith("def ") and '"""' in f for f in functions)


# --- the walk ---


def test_acceptance_lengths_follow_the_walk_of_verification():
    tokens = torch.arange(10, 21)  # prompt 10..12, answer 13..20
    anchors = torch.arange(3, 10)
    drafts = torch.zeros(7, 3, dtype=torch.long)
    drafts[0] = torch.tensor([14, 15, 99])  # two right: commits 14, 15 and the bonus 16
    drafts[3] = torch.tensor([99, 18, 19])  # first wrong: commits 17
    drafts[4] = torch.tensor([18, 19, 20])  # all right, and the answer ends
    assert walk.acceptance_lengths(tokens, anchors, drafts) == [3, 1, 3]


def small_models() -> tuple[DFlashDrafter, XPressRefiner]:
    torch.manual_seed(0)
    drafter = DFlashDrafter(
        DFlashConfig(
            hidden_size=WIDTH, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2,
            num_key_value_heads=1, head_dim=8, vocab_size=VOCABULARY, num_target_layers=4,
            target_layer_ids=(1, 2), mask_token_id=0, block_size=4,
        )
    )  # fmt: skip
    return drafter, XPressRefiner(XPressConfig(VOCABULARY, WIDTH, rank=8, block_size=4))


def test_passes_while_training_equal_the_folded_refiners():
    _, refiner = small_models()
    torch.nn.init.normal_(refiner.mix.L, std=0.5)
    for parameter in refiner.parameters():
        parameter.data.mul_(10)
    torch.manual_seed(1)
    base_logits, hidden = torch.randn(9, 3, VOCABULARY), torch.randn(9, 4, WIDTH)
    anchor, predecessor = torch.randint(VOCABULARY, (2, 9))
    folded = refiner.fold(torch.float32)
    for passes in (1, 2, 3):
        ours = walk.refined_while_training(refiner, passes)
        tokens = ours(base_logits, hidden, anchor, predecessor)
        expected = folded.refine(
            base_logits, hidden, anchor, predecessor, passes, backend="reference"
        )
        assert torch.equal(tokens, expected.tokens)


def test_the_objective_teaches_a_drafter_and_its_refiner():
    """A sequence that repeats can be drafted wholly; the loss must fall and the walk grow."""
    drafter, refiner = small_models()
    generator = torch.Generator().manual_seed(0)
    tokens = torch.arange(48) % 8 + 3
    embedding = torch.randn(VOCABULARY, WIDTH, generator=generator)
    features = embedding[tokens].repeat(1, CONTEXT_LAYERS)
    sequence = data.Answered(tokens, 4, features, torch.zeros(48, WIDTH))
    parameters = [*drafter.parameters(), *refiner.parameters()]
    optimizer = torch.optim.AdamW(parameters, lr=5e-3)
    history = []
    for _ in range(300):
        blocks = data.sample_blocks([sequence], 16, 4, generator)
        hidden = drafter.draft_anchors(
            drafter.block_embeddings(embedding, blocks.tokens[:, 1]),
            blocks.context, blocks.sequence, blocks.anchor,
        )  # fmt: skip
        labels, keep = blocks.tokens[:, 2:], blocks.valid
        target = torch.nn.functional.one_hot(labels[keep], VOCABULARY).float()
        weight = losses.slot_weights(4, 4.0).expand_as(labels)[keep]
        base_logits = hidden[:, 1:] @ embedding.T
        prev = blocks.tokens[:, :-1]
        own = losses.fed_back(prev, base_logits.argmax(-1))
        terms = [
            losses.distribution_loss(logits[keep], labels[keep], target, weight,
                                     losses.LossWeights(1.0, 1.0))
            for logits in (refiner(base_logits, hidden, prev), base_logits,
                           refiner(base_logits, hidden, own))
        ]  # fmt: skip
        loss = losses.objective(terms[0], terms[1], terms[2:], 0.5, 0.3)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        history.append(loss.item())
    assert history[-1] < 0.2 * history[0]
    anchors = torch.arange(4, 47)
    drafts = walk.draft_everywhere(
        drafter, embedding, embedding, tokens, features, anchors,
        [walk.drafter_alone(None), walk.refined_while_training(refiner, 3)],
    )  # fmt: skip
    for tried in drafts:
        lengths = walk.acceptance_lengths(tokens, anchors, tried)
        assert sum(lengths) / len(lengths) > 3
