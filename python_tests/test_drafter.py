"""The dFlash drafter: public names and sizes, and one meaning for all its paths."""

import pytest
import torch

from xpress_ext.drafter import DFlashConfig, DFlashDrafter, default_target_layer_ids

QWEN3_8B = {
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "num_hidden_layers": 5,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 151936,
    "num_target_layers": 36,
    "block_size": 16,
    "rope_theta": 1000000,
    "dflash_config": {"mask_token_id": 151669, "target_layer_ids": [1, 9, 17, 25, 33]},
}


def small_config(**changes) -> DFlashConfig:
    sizes = dict(  # noqa: C408
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        vocab_size=50,
        num_target_layers=7,
        target_layer_ids=(1, 3, 5),
        mask_token_id=49,
        block_size=5,
        rope_theta=1e4,
    )
    return DFlashConfig(**{**sizes, **changes})


def small_drafter(**changes) -> DFlashDrafter:
    torch.manual_seed(0)
    drafter = DFlashDrafter(small_config(**changes)).double()
    for parameter in drafter.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    return drafter


def test_qwen3_8b_drafter_has_the_published_number_of_parameters():
    with torch.device("meta"):
        drafter = DFlashDrafter(DFlashConfig.from_dict(QWEN3_8B))
    assert sum(p.numel() for p in drafter.parameters()) == 1_048_626_432


def test_parameter_names_are_the_public_ones():
    names = {
        name for name, _ in DFlashDrafter(small_config(num_hidden_layers=1)).named_parameters()
    }
    attention = {
        f"layers.0.self_attn.{p}.weight"
        for p in ("q_proj", "k_proj", "v_proj", "o_proj", "q_norm", "k_norm")
    }
    mlp = {f"layers.0.mlp.{p}_proj.weight" for p in ("gate", "up", "down")}
    norms = {"layers.0.input_layernorm.weight", "layers.0.post_attention_layernorm.weight"}
    assert names == attention | mlp | norms | {"norm.weight", "fc.weight", "hidden_norm.weight"}


def test_default_target_layers_are_those_of_the_published_drafters():
    assert default_target_layer_ids(36, 5) == [1, 9, 17, 25, 33]
    assert default_target_layer_ids(30, 5) == [1, 8, 14, 20, 27]
    assert default_target_layer_ids(36, 1) == [18]


def test_config_survives_a_round_trip_through_the_format_b_keys():
    config = small_config(qk_norm=False, draft_vocab_size=20)
    assert DFlashConfig.from_dict(config.to_dict()) == config


def test_rope_theta_is_read_from_either_place():
    keys = small_config().to_dict()
    del keys["rope_theta"]
    keys["rope_parameters"] = {"rope_type": "default", "rope_theta": 12345.0}
    assert DFlashConfig.from_dict(keys).rope_theta == 12345.0


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "rope_type is yarn"),
        ({"attention_bias": True}, "attention_bias"),
        ({"hidden_act": "gelu"}, "hidden_act is gelu"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "sliding_attention"),
        ({"block_size": 33}, "block_size is 33"),
        ({"dflash_config": {"mask_token_id": 3}}, "dflash_config.target_layer_ids"),
        ({"dflash_config": {"mask_token_id": 50, "target_layer_ids": [1]}}, "mask_token_id is 50"),
        ({"dflash_config": {"mask_token_id": 3, "target_layer_ids": [7]}}, "target_layer_ids"),
    ],
)
def test_unsupported_configs_are_refused_by_name(change, named):
    with pytest.raises(ValueError, match=named):
        DFlashConfig.from_dict({**small_config().to_dict(), **change})


@pytest.mark.parametrize("qk_norm", [True, False])
@pytest.mark.parametrize("kv_heads", [1, 2, 4])
def test_cached_drafting_equals_drafting_from_scratch(qk_norm, kv_heads):
    drafter = small_drafter(qk_norm=qk_norm, num_key_value_heads=kv_heads)
    block, width = drafter.config.block_size, drafter.config.hidden_size
    context = torch.randn(1, 200, 3 * width, dtype=torch.double)
    anchors = [1, 4, 5, 90, 200]  # the buffers grow on the way
    blocks = torch.randn(len(anchors), block, width, dtype=torch.double)
    cache, done = drafter.new_cache(), 0
    expected = drafter.draft_anchors(
        blocks, context, torch.zeros(len(anchors), dtype=torch.long), torch.tensor(anchors)
    )
    for i, anchor in enumerate(anchors):
        hidden = drafter.draft(blocks[i : i + 1], context[:, done:anchor], cache, anchor)
        done = anchor
        torch.testing.assert_close(hidden[0], expected[i], rtol=1e-10, atol=1e-10)


def test_a_block_sees_nothing_at_or_after_its_anchor_but_itself():
    drafter = small_drafter()
    width, block = drafter.config.hidden_size, drafter.config.block_size
    context = torch.randn(2, 9, 3 * width, dtype=torch.double)
    blocks = torch.randn(2, block, width, dtype=torch.double)
    which, anchor = torch.tensor([1, 1]), torch.tensor([4, 6])
    before = drafter.draft_anchors(blocks, context, which, anchor)
    changed = context.clone()
    changed[1, 4:] += 1
    changed[0] += 1
    after = drafter.draft_anchors(blocks, changed, which, anchor)
    assert torch.equal(before[0], after[0])
    assert not torch.equal(before[1], after[1])


def test_slots_of_a_block_see_each_other_in_both_directions():
    drafter = small_drafter()
    context = torch.randn(1, 3, 3 * drafter.config.hidden_size, dtype=torch.double)
    blocks = torch.randn(1, drafter.config.block_size, drafter.config.hidden_size).double()
    last_changed = blocks.clone()
    last_changed[0, -1] += 1
    first, second = (
        drafter.draft(b, context, drafter.new_cache(), 3) for b in (blocks, last_changed)
    )
    assert (first[0, 0] != second[0, 0]).any()


def test_attention_equals_the_formula_with_repeated_heads():
    drafter = small_drafter(qk_norm=False)
    attention = drafter.layers[0].self_attn
    x = torch.randn(1, 5, 32, dtype=torch.double)
    rotary = drafter._rotary(torch.arange(5)[None])
    keys, values = attention.keys_values(x, rotary)
    ours = attention.attend(x, rotary, keys, values, None)
    query = attention.q_proj(x).view(1, 5, 4, 8)
    left, right = query.chunk(2, -1)
    cos, sin = (t.double() for t in rotary)
    query = torch.cat([left * cos - right * sin, right * cos + left * sin], -1).transpose(1, 2)
    repeated_keys, repeated_values = (t.repeat_interleave(2, 1) for t in (keys, values))
    weights = (query @ repeated_keys.transpose(2, 3) / 8**0.5).softmax(-1)
    mixed = (weights @ repeated_values).transpose(1, 2).reshape(1, 5, 32)
    torch.testing.assert_close(ours, attention.o_proj(mixed), rtol=1e-5, atol=1e-5)


def test_a_start_position_that_does_not_meet_the_context_is_refused():
    drafter = small_drafter()
    context = torch.randn(1, 3, 96, dtype=torch.double)
    with pytest.raises(ValueError, match="start_position is 5, expected 3"):
        drafter.draft(torch.randn(1, 5, 32).double(), context, drafter.new_cache(), 5)


def test_block_embeddings_are_the_anchor_and_masks():
    drafter = small_drafter()
    table = torch.randn(50, 32)
    blocks = drafter.block_embeddings(table, torch.tensor([7, 8]))
    assert torch.equal(blocks[1, 0], table[8])
    assert torch.equal(blocks[:, 1:], table[49].expand(2, 4, 32))
