"""Random-weight models of real mlx-lm classes, small enough to run a hundred times a second."""

from __future__ import annotations

from functools import cache
from importlib import import_module
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_map

VOCAB = 97
WINDOW = 24

_COMMON: dict[str, Any] = {
    "num_hidden_layers": 3,
    "vocab_size": VOCAB,
    "rms_norm_eps": 1e-5,
}
_CONFIGS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": (
        "llama",
        {
            "hidden_size": 64,
            "intermediate_size": 96,
            "num_attention_heads": 4,
            "num_key_value_heads": 4,
            "head_dim": 16,
        },
    ),
    "llama-d80": (
        "llama",
        {
            "hidden_size": 64,
            "intermediate_size": 96,
            "num_attention_heads": 2,
            "num_key_value_heads": 1,
            "head_dim": 80,
        },
    ),
    "qwen3": (
        "qwen3",
        {
            "hidden_size": 64,
            "intermediate_size": 96,
            "num_attention_heads": 8,
            "num_key_value_heads": 2,
            "head_dim": 32,
            "max_position_embeddings": 4096,
            "tie_word_embeddings": True,
            "rope_theta": 10_000.0,
        },
    ),
    "phi3-d96": (
        "phi3",
        {
            "hidden_size": 192,
            "intermediate_size": 96,
            "num_attention_heads": 2,
            "num_key_value_heads": 1,
        },
    ),
    "gemma3": (
        "gemma3_text",
        {
            "num_hidden_layers": 6,
            "hidden_size": 64,
            "intermediate_size": 96,
            "num_attention_heads": 4,
            "num_key_value_heads": 1,
            "head_dim": 32,
            "query_pre_attn_scalar": 32,
            "sliding_window": WINDOW,
            "sliding_window_pattern": 3,
        },
    ),
    "gemma3n": (  # its last layers read the keys and values of earlier ones
        "gemma3n",
        {
            "text_config": {
                "model_type": "gemma3n_text",
                "hidden_size": 64,
                "num_hidden_layers": 4,
                "intermediate_size": 64,
                "num_attention_heads": 2,
                "head_dim": 32,
                "rms_norm_eps": 1e-5,
                "vocab_size": VOCAB,
                "num_key_value_heads": 1,
                "num_kv_shared_layers": 2,
                "vocab_size_per_layer_input": VOCAB,
                "sliding_window": WINDOW,
                "max_position_embeddings": 1000,
                "rope_local_base_freq": 1.0,
                "rope_theta": 1000.0,
                "final_logit_softcapping": 10.0,
                "layer_types": [
                    "sliding_attention",
                    "full_attention",
                    "sliding_attention",
                    "full_attention",
                ],
                "activation_sparsity_pattern": [0.5] * 4,
                "hidden_size_per_layer_input": 16,
                "altup_num_inputs": 4,
                "altup_coef_clip": 120.0,
                "altup_correct_scale": True,
                "altup_active_idx": 0,
                "laurel_rank": 8,
                "rope_scaling": None,
            }
        },
    ),
    "qwen3-next": (  # linear attention in three layers of four
        "qwen3_next",
        {
            "num_hidden_layers": 4,
            "hidden_size": 64,
            "intermediate_size": 64,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "linear_num_value_heads": 2,
            "linear_num_key_heads": 2,
            "linear_key_head_dim": 16,
            "linear_value_head_dim": 16,
            "linear_conv_kernel_dim": 3,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "decoder_sparse_step": 1,
            "shared_expert_intermediate_size": 64,
            "mlp_only_layers": [0],
            "moe_intermediate_size": 64,
            "head_dim": 32,
            "rope_theta": 1000.0,
            "partial_rotary_factor": 0.5,
            "max_position_embeddings": 1000,
        },
    ),
    "falcon-h1": (  # attention and Mamba side by side in every layer: a CacheList each
        "falcon_h1",
        {
            "hidden_size": 64,
            "intermediate_size": 64,
            "num_attention_heads": 2,
            "num_key_value_heads": 1,
            "head_dim": 32,
            "mamba_d_ssm": 64,
            "mamba_d_head": 16,
            "mamba_n_heads": 4,
            "mamba_d_state": 16,
        },
    ),
    "llama4": (  # chunked attention, whose caches stay mlx-lm's own, in three layers of four
        "llama4",
        {
            "text_config": {
                "attention_bias": False,
                "attention_chunk_size": 8,
                "head_dim": 32,
                "hidden_size": 64,
                "interleave_moe_layer_step": 2,
                "intermediate_size": 64,
                "intermediate_size_mlp": 64,
                "max_position_embeddings": 1000,
                "model_type": "llama4",
                "num_attention_heads": 2,
                "num_experts_per_tok": 1,
                "num_hidden_layers": 4,
                "num_key_value_heads": 1,
                "num_local_experts": 2,
                "rms_norm_eps": 1e-4,
                "rope_scaling": None,
                "rope_theta": 1000,
                "use_qk_norm": True,
                "vocab_size": VOCAB,
            }
        },
    ),
}

FULL = ["llama", "llama-d80", "qwen3", "phi3-d96"]
WINDOWED = ["gemma3", "gemma3n"]
HYBRID = ["qwen3-next", "falcon-h1", "llama4"]
ALL = FULL + WINDOWED + HYBRID


def build(name: str, *, seed: int = 0, dtype: mx.Dtype = mx.float32) -> nn.Module:
    """A new model with weights that follow from `seed` alone."""
    module_name, config = _CONFIGS[name]
    module = import_module(f"mlx_lm.models.{module_name}")
    mx.random.seed(seed)
    args = module.ModelArgs.from_dict({"model_type": module_name, **_COMMON, **config})
    model = module.Model(args)
    model.update(tree_map(lambda array: _restless(array, dtype), model.parameters()))
    mx.eval(model.parameters())
    return model


def _restless(array: mx.array, dtype: mx.Dtype) -> mx.array:
    """Weights large enough that attention, hence every cached token, moves the logits."""
    if not mx.issubdtype(array.dtype, mx.floating):
        return array
    return (array * 2.5 if array.ndim > 1 else array).astype(dtype)


@cache
def model(name: str) -> nn.Module:
    """One shared model of each kind; tests must not change it."""
    return build(name)


def prompt(length: int, seed: int = 1) -> list[int]:
    tokens = mx.random.randint(0, VOCAB, (length,), key=mx.random.key(seed))
    return [int(token) for token in tokens.tolist()]  # type: ignore[union-attr]


def logits_in_chunks(model: nn.Module, cache: list[Any], chunks: list[list[int]]) -> mx.array:
    """Logits [tokens, vocab] of all chunks fed one after the other, as mlx-lm prefills."""
    parts = []
    for chunk in chunks:
        parts.append(model(mx.array([chunk]), cache=cache)[0])
        mx.eval(parts[-1], [entry.state for entry in cache])
    return mx.concatenate(parts)


def split(tokens: list[int], sizes: list[int]) -> list[list[int]]:
    """`tokens` in chunks of `sizes`, the last size repeated to the end."""
    chunks, start, index = [], 0, 0
    while start < len(tokens):
        size = sizes[min(index, len(sizes) - 1)]
        chunks.append(tokens[start : start + size])
        start, index = start + size, index + 1
    return chunks


def greedy(model: nn.Module, cache: list[Any], rest: list[int], count: int) -> list[int]:
    """The next `count` tokens by mlx-lm's own generate_step."""
    from mlx_lm.generate import generate_step

    steps = generate_step(mx.array(rest), model, prompt_cache=cache, max_tokens=count)
    return [int(token) for token, _ in steps]
