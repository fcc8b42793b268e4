"""Hugging Face folders (config.json + safetensors) to params and back, with one table of names."""

from __future__ import annotations

import contextlib
import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import traverse_util
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from jaxrl_code.models.qwen2 import Model, Qwen2Config
from jaxrl_code.types import Params


class Tensor(NamedTuple):
    """A Hugging Face tensor. `inputs` = how many leading axes of ours are the input of a linear layer, which torch
    stores [out, in]; 0 = not a matrix that is applied, stored in the same order as ours."""

    name: str
    inputs: int = 0


LAYER = "model.layers.{}."
TENSORS = {
    "embed": Tensor("model.embed_tokens.weight"),
    "final_norm": Tensor("model.norm.weight"),
    "lm_head": Tensor("lm_head.weight", inputs=1),
    "value_head/kernel": Tensor("score.weight"),  # as in Qwen2ForTokenClassification with one label
    "value_head/bias": Tensor("score.bias"),
    "layers/attn_norm": Tensor(LAYER + "input_layernorm.weight"),
    "layers/mlp_norm": Tensor(LAYER + "post_attention_layernorm.weight"),
    "layers/attn/q": Tensor(LAYER + "self_attn.q_proj.weight", inputs=1),
    "layers/attn/k": Tensor(LAYER + "self_attn.k_proj.weight", inputs=1),
    "layers/attn/v": Tensor(LAYER + "self_attn.v_proj.weight", inputs=1),
    "layers/attn/o": Tensor(LAYER + "self_attn.o_proj.weight", inputs=2),
    "layers/attn/q_bias": Tensor(LAYER + "self_attn.q_proj.bias"),
    "layers/attn/k_bias": Tensor(LAYER + "self_attn.k_proj.bias"),
    "layers/attn/v_bias": Tensor(LAYER + "self_attn.v_proj.bias"),
    "layers/mlp/gate": Tensor(LAYER + "mlp.gate_proj.weight", inputs=1),
    "layers/mlp/up": Tensor(LAYER + "mlp.up_proj.weight", inputs=1),
    "layers/mlp/down": Tensor(LAYER + "mlp.down_proj.weight", inputs=1),
}


def critic_from_policy(params: Params) -> Params:
    """A critic's params: copies of the policy's trunk (nothing aliased: both get donated), and a head of zeros."""
    trunk = {name: jax.tree.map(jnp.copy, leaf) for name, leaf in params.items() if name != "lm_head"}
    scale = trunk["final_norm"]
    return trunk | {"value_head": {"kernel": jnp.zeros_like(scale), "bias": jnp.zeros((), scale.dtype)}}


def read_config(
    path: str | Path, *, dtype: str = "float32", param_dtype: str = "float32", remat: str = "none"
) -> Qwen2Config:
    """The model that `path`/config.json describes; ValueError if it is one that qwen2.py doesn't implement."""
    file = Path(path) / "config.json"
    if not file.is_file():
        raise ValueError(f"no model at {path}: {file} is missing (expected a Hugging Face folder with safetensors)")
    raw = json.loads(file.read_text())
    # transformers 5 writes rope_parameters; before, rope_theta stood alone with rope_scaling beside it.
    rope = raw.get("rope_parameters") or raw.get("rope_scaling") or {}
    unsupported = {
        "model_type": raw.get("model_type") != "qwen2" and raw.get("model_type"),
        "hidden_act": raw.get("hidden_act", "silu") != "silu" and raw["hidden_act"],
        "rope scaling": rope.get("rope_type", rope.get("type", "default")) != "default" and rope,
        "use_sliding_window": raw.get("use_sliding_window", False),
        "layer_types": set(raw.get("layer_types") or ()) - {"full_attention"},
        "quantization_config": raw.get("quantization_config"),
    }
    if raw.get("model_type") is None or any(unsupported.values()):
        found = {key: value for key, value in unsupported.items() if value} or {"model_type": None}
        raise ValueError(
            f"{file} asks for {found}; only plain Qwen2 (model_type 'qwen2', SiLU, full attention) is here"
        )
    required = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
    missing = [key for key in required if key not in raw]
    if missing:
        raise ValueError(f"{file} lacks {missing}")
    heads = raw["num_attention_heads"]
    return Qwen2Config(
        vocab_size=raw["vocab_size"],
        width=raw["hidden_size"],
        ffw=raw["intermediate_size"],
        layers=raw["num_hidden_layers"],
        heads=heads,
        kv_heads=raw.get("num_key_value_heads") or heads,
        head_dim=raw.get("head_dim") or raw["hidden_size"] // heads,
        rope_theta=float(rope.get("rope_theta") or raw.get("rope_theta") or 10_000.0),
        rms_eps=raw.get("rms_norm_eps", 1e-6),
        tied=raw.get("tie_word_embeddings", False),
        max_len=raw.get("max_position_embeddings", 32768),
        dtype=dtype,
        param_dtype=param_dtype,
        remat=remat,
    )


def load(
    path: str | Path,
    head: str = "lm",
    *,
    dtype: str = "float32",
    param_dtype: str = "float32",
    remat: str = "none",
) -> tuple[Qwen2Config, Params]:
    """Config and params as host arrays in param_dtype; put them on devices with jax.device_put and a sharding.

    The host holds the params once and one tensor more. Raises ValueError, naming the tensor, when the weights don't
    fit the config.
    """
    path = Path(path)
    config = read_config(path, dtype=dtype, param_dtype=param_dtype, remat=remat)
    shapes: dict[str, Any] = traverse_util.flatten_dict(
        jax.eval_shape(Model(config, head).init, jax.random.key(0)), sep="/"
    )
    leaves = {ours: np.empty(shape.shape, shape.dtype) for ours, shape in shapes.items()}
    wanted = {
        TENSORS[ours].name.format(layer): (leaf[layer] if ours.startswith("layers/") else leaf, TENSORS[ours].inputs)
        for ours, leaf in leaves.items()
        for layer in range(config.layers if ours.startswith("layers/") else 1)
    }
    files = _weight_map(path)
    missing = sorted(wanted.keys() - files.keys())
    if missing:
        hint = "; for a new critic use critic_from_policy" if any("score" in name for name in missing) else ""
        raise ValueError(f"{path} lacks {len(missing)} of {len(wanted)} tensors, the first: {missing[:3]}{hint}")
    # A tied folder may store the head too (transformers ignores it as well); a critic doesn't need the other head.
    heads = {TENSORS[ours].name for ours in TENSORS if "head" in ours}
    extra = sorted(name for name in files.keys() - wanted.keys() - heads if not name.endswith("rotary_emb.inv_freq"))
    if extra:
        raise ValueError(f"{path} holds {len(extra)} tensors that a Qwen2 doesn't have, the first: {extra[:3]}")
    with contextlib.ExitStack() as stack:
        readers = {file: stack.enter_context(_open(path / file)) for file in sorted(set(files.values()))}
        for name, (view, inputs) in wanted.items():
            tensor = readers[files[name]].get_tensor(name)
            out, into = math.prod(view.shape[inputs:]), math.prod(view.shape[:inputs])
            if tensor.size != view.size or (inputs and tensor.shape != (out, into)):
                raise ValueError(f"{path}: {name} of shape {tensor.shape} does not fit {view.shape} of config.json")
            view[...] = (tensor.T if inputs else tensor).reshape(view.shape)
    return config, traverse_util.unflatten_dict(leaves, sep="/")


def tensors(params: Params) -> Iterator[tuple[str, np.ndarray]]:
    """Params under their Hugging Face names and in layout, one by one; one stacked leaf at a time is on the host."""
    flat = traverse_util.flatten_dict(params, sep="/")
    for ours, leaf in flat.items():
        name, inputs = TENSORS[ours]
        host = np.asarray(leaf)
        for layer, array in enumerate(host if ours.startswith("layers/") else host[None]):
            if inputs:
                array = array.reshape(math.prod(array.shape[:inputs]), -1).T
            elif ours == "value_head/kernel":
                array = array[None]
            elif ours != "embed":
                array = array.reshape(-1)
            yield name.format(layer), np.ascontiguousarray(array)


def save(path: str | Path, config: Qwen2Config, params: Params, *, shard_bytes: int = 4 * 1024**3) -> None:
    """Write a folder that `load` and transformers read, in the params' dtype; config.json last, when all is there."""
    path = Path(path)
    path.mkdir(parents=True, exist_ok=True)
    for stale in (*path.glob("model*.safetensors"), *path.glob("model*.index.json"), *path.glob("config.json")):
        stale.unlink()
    shards: list[list[str]] = []
    shard: dict[str, np.ndarray] = {}
    total = 0

    def flush() -> None:
        # transformers asks for the 'format' entry.
        save_file(shard, path / f"part-{len(shards)}.tmp", metadata={"format": "pt"})
        shards.append(list(shard))
        shard.clear()

    for name, tensor in tensors(params):
        if shard and sum(t.nbytes for t in shard.values()) + tensor.nbytes > shard_bytes:
            flush()
        shard[name] = tensor
        total += tensor.nbytes
    flush()
    weight_map: dict[str, str] = {}
    for i, names in enumerate(shards):
        file = "model.safetensors" if len(shards) == 1 else f"model-{i + 1:05d}-of-{len(shards):05d}.safetensors"
        (path / f"part-{i}.tmp").rename(path / file)
        weight_map |= dict.fromkeys(names, file)
    if len(shards) > 1:
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        (path / "model.safetensors.index.json").write_text(json.dumps(index, indent=2))
    raw = _raw_config(config, critic="value_head" in params, dtype=str(np.dtype(params["embed"].dtype)))
    (path / "config.json").write_text(json.dumps(raw, indent=2) + "\n")


def _raw_config(config: Qwen2Config, *, critic: bool, dtype: str) -> dict[str, Any]:
    """config.json; rope_theta and torch_dtype are also written where readers before transformers 5 look."""
    raw = {
        "architectures": ["Qwen2ForTokenClassification" if critic else "Qwen2ForCausalLM"],
        "model_type": "qwen2",
        "vocab_size": config.vocab_size,
        "hidden_size": config.width,
        "intermediate_size": config.ffw,
        "num_hidden_layers": config.layers,
        "num_attention_heads": config.heads,
        "num_key_value_heads": config.kv_heads,
        "head_dim": config.head_dim,
        "hidden_act": "silu",
        "rope_theta": config.rope_theta,
        "rope_parameters": {"rope_type": "default", "rope_theta": config.rope_theta},
        "rms_norm_eps": config.rms_eps,
        "tie_word_embeddings": config.tied,
        "max_position_embeddings": config.max_len,
        "use_sliding_window": False,
        "dtype": dtype,
        "torch_dtype": dtype,
    }
    return raw | {"num_labels": 1} if critic else raw


def _weight_map(path: Path) -> dict[str, str]:
    """Tensor name -> file, from the index of a sharded folder or from the one file."""
    index = path / "model.safetensors.index.json"
    if index.is_file():
        files = json.loads(index.read_text())["weight_map"]
        absent = sorted({file for file in files.values() if not (path / file).is_file()})
        if absent:
            raise ValueError(f"{path} is incomplete: {index.name} names {absent}, which are missing")
        return files
    if not (path / "model.safetensors").is_file():
        raise ValueError(f"{path} has no weights: neither model.safetensors nor {index.name}")
    with _open(path / "model.safetensors") as reader:
        return dict.fromkeys(reader.keys(), "model.safetensors")


def _open(file: Path) -> Any:
    try:
        return safe_open(file, framework="numpy")
    except SafetensorError as error:
        raise ValueError(f"{file} is damaged or not a safetensors file: {error}") from error
