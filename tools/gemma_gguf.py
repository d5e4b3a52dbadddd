"""Converts a Gemma 3 text GGUF into a folder that `mlx_lm.load` reads; knows no cache and no locks.

Two things differ between the formats: names, and that GGUF's normalization weights have the
model's implicit one already added.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
from gguf import GGUFReader, dequantize

from tools.gemma_tokenizer import Vocabulary
from tools.gemma_tokenizer import save as save_tokenizer

# what is being done, steps done, steps in all
Progress = Callable[[str, int, int], None]

_OUTER = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
}
_IN_BLOCK = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "attn_norm": "input_layernorm",
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_BLOCK = re.compile(r"blk\.(\d+)\.(\w+)\.weight")


def parameter_name(gguf_name: str) -> str:
    """mlx-lm's name for a GGUF tensor; ValueError for a tensor that Gemma 3 does not have."""
    if gguf_name in _OUTER:
        return _OUTER[gguf_name]
    match = _BLOCK.fullmatch(gguf_name)
    if match is None or match[2] not in _IN_BLOCK:
        raise ValueError(f"{gguf_name} is not a tensor of a Gemma 3 text model")
    return f"model.layers.{match[1]}.{_IN_BLOCK[match[2]]}.weight"


def convert(gguf_file: Path, folder: Path, dtype: str, progress: Progress) -> None:
    """Writes config, tokenizer and `dtype` weights of `gguf_file` into the existing `folder`."""
    progress("reading the model file", 0, 1)
    reader = GGUFReader(gguf_file)
    fields = {name: field.contents() for name, field in reader.fields.items()}
    if fields["general.architecture"] != "gemma3":
        raise ValueError(f"{gguf_file} holds a {fields['general.architecture']}, not a gemma3")
    progress("building the tokenizer", 0, 1)
    vocabulary = _vocabulary(fields)
    save_tokenizer(vocabulary, folder)
    progress("building the tokenizer", 1, 1)
    config = _config(fields, len(vocabulary.tokens), dtype)
    (folder / "config.json").write_text(json.dumps(config, indent=2))
    mx.save_safetensors(
        str(folder / "model.safetensors"), _weights(reader, dtype, progress), {"format": "mlx"}
    )


def _weights(reader: GGUFReader, dtype: str, progress: Progress) -> dict[str, mx.array]:
    weights = {}
    for done, tensor in enumerate(reader.tensors):
        progress("dequantizing the weights", done, len(reader.tensors))
        values = dequantize(tensor.data, tensor.tensor_type)
        if tensor.name.endswith("_norm.weight"):
            values = values - np.float32(1)  # mlx-lm's RMSNorm multiplies by 1 + weight
        weights[parameter_name(tensor.name)] = mx.array(values).astype(getattr(mx, dtype))
        mx.eval(weights)
    progress("writing the weights", 0, 1)
    return weights


def _vocabulary(fields: dict[str, Any]) -> Vocabulary:
    def ggml(name: str) -> Any:
        return fields[f"tokenizer.ggml.{name}"]

    return Vocabulary(
        tokens=ggml("tokens"),
        scores=ggml("scores"),
        types=ggml("token_type"),
        bos=ggml("bos_token_id"),
        eos=ggml("eos_token_id"),
        unk=ggml("unknown_token_id"),
        pad=ggml("padding_token_id"),
    )


def _config(fields: dict[str, Any], vocab_size: int, dtype: str) -> dict[str, Any]:
    def gemma(name: str) -> Any:
        return fields[f"gemma3.{name}"]

    head_dim = gemma("attention.key_length")
    return {
        "model_type": "gemma3_text",
        "architectures": ["Gemma3ForCausalLM"],
        "hidden_size": gemma("embedding_length"),
        "num_hidden_layers": gemma("block_count"),
        "intermediate_size": gemma("feed_forward_length"),
        "num_attention_heads": gemma("attention.head_count"),
        "num_key_value_heads": gemma("attention.head_count_kv"),
        "head_dim": head_dim,
        "query_pre_attn_scalar": head_dim,
        "rms_norm_eps": gemma("attention.layer_norm_rms_epsilon"),
        "vocab_size": vocab_size,
        "max_position_embeddings": gemma("context_length"),
        "sliding_window": gemma("attention.sliding_window"),
        "rope_theta": gemma("rope.freq_base"),
        # Fixed by the architecture, so GGUF does not state them.
        "rope_local_base_freq": 10_000.0,
        "sliding_window_pattern": 6,
        "tie_word_embeddings": True,
        "bos_token_id": fields["tokenizer.ggml.bos_token_id"],
        "eos_token_id": fields["tokenizer.ggml.eos_token_id"],
        "pad_token_id": fields["tokenizer.ggml.padding_token_id"],
        "torch_dtype": dtype,
    }
