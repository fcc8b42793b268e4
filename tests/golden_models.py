"""Tiny random Qwen2 models in the Hugging Face layout, the same on every machine; tests/goldens holds their logits."""

from __future__ import annotations

import json
import zlib
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

GOLDENS = Path(__file__).parent / "goldens"

# vocabulary, width, ffw, layers, heads, kv heads, head width, tied, rope theta
SHAPES = {
    "gqa_tied": (97, 40, 72, 3, 4, 2, 10, True, 1e6),
    "mha_untied": (128, 48, 96, 2, 3, 3, 16, False, 1e4),
    "mqa_wide_heads_untied": (61, 36, 50, 2, 5, 1, 12, False, 1e6),  # heads * head width is not the width
    "odd_one_layer_tied": (131, 28, 53, 1, 7, 7, 4, True, 5e5),
}


def hf_config(name: str) -> dict:
    """config.json as transformers 5 writes it."""
    vocab, width, ffw, layers, heads, kv_heads, head_dim, tied, theta = SHAPES[name]
    return {
        "architectures": ["Qwen2ForCausalLM"],
        "model_type": "qwen2",
        "vocab_size": vocab,
        "hidden_size": width,
        "intermediate_size": ffw,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": tied,
        "max_position_embeddings": 64,
        "rope_parameters": {"rope_type": "default", "rope_theta": theta},
        "use_sliding_window": False,
    }


def hf_tensors(name: str) -> dict[str, np.ndarray]:
    """Each tensor seeded by its own name, large enough that every one of them matters for the logits."""
    vocab, width, ffw, layers, heads, kv_heads, head_dim, tied, _ = SHAPES[name]
    shapes = {"model.embed_tokens.weight": (vocab, width), "model.norm.weight": (width,)}
    if not tied:
        shapes["lm_head.weight"] = (vocab, width)
    for layer in range(layers):
        prefix = f"model.layers.{layer}."
        for norm in ("input_layernorm", "post_attention_layernorm"):
            shapes[f"{prefix}{norm}.weight"] = (width,)
        for matrix, out in (("q", heads), ("k", kv_heads), ("v", kv_heads)):
            shapes[f"{prefix}self_attn.{matrix}_proj.weight"] = (out * head_dim, width)
            shapes[f"{prefix}self_attn.{matrix}_proj.bias"] = (out * head_dim,)
        shapes[f"{prefix}self_attn.o_proj.weight"] = (width, heads * head_dim)
        shapes[f"{prefix}mlp.gate_proj.weight"] = (ffw, width)
        shapes[f"{prefix}mlp.up_proj.weight"] = (ffw, width)
        shapes[f"{prefix}mlp.down_proj.weight"] = (width, ffw)
    return {tensor: _random(f"{name}/{tensor}", shape) for tensor, shape in shapes.items()}


def _random(name: str, shape: tuple[int, ...]) -> np.ndarray:
    normal = np.random.default_rng(zlib.crc32(name.encode())).standard_normal(shape)
    if name.endswith("norm.weight"):
        return (1 + 0.3 * normal).astype(np.float32)
    return (0.5 * normal if len(shape) == 1 else normal / np.sqrt(shape[-1])).astype(np.float32)


def tokens(name: str) -> np.ndarray:
    return np.random.default_rng(7).integers(0, SHAPES[name][0], (2, 12)).astype(np.int32)


def write(name: str, folder: Path) -> Path:
    """A Hugging Face folder of this model, written without the code under test."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(hf_config(name)))
    save_file(hf_tensors(name), folder / "model.safetensors", metadata={"format": "pt"})
    return folder
