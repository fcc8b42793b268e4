"""What a user can get wrong, found before anything is built: every finding says what, where and how to mend it."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import jax
from huggingface_hub import snapshot_download
from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError
from ml_collections import ConfigDict

from jaxrl_code.ppo.config import PPOConfig

LOCAL_HINT = "or run the whole loop on this machine as it is: --config=configs/mlebench.py:local"


def check(config: Any) -> None:
    """Raises ValueError: one line for a wrong value, one line each for what this machine lacks."""
    _check_values(config)
    lacks = [*_weights(config), *_data(config), *_devices(config)]
    if lacks:
        raise ValueError("\n  ".join(["this machine lacks what the config asks for:", *lacks, LOCAL_HINT]))


def weights_folder(path: str) -> Path | None:
    """The folder of a model given as a folder, or as a hub id that was downloaded earlier. Never goes online."""
    if Path(path).expanduser().is_dir():
        return Path(path).expanduser()
    try:
        return Path(snapshot_download(path, local_files_only=True))
    except (LocalEntryNotFoundError, HFValidationError):
        return None


def ppo_config(config: Any) -> PPOConfig:
    numbers = {name: value for name, value in config.ppo.items() if name != "buckets"}
    return PPOConfig(temperature=config.rollout.temperature, **numbers)


def data_root(config: Any) -> Path:
    if config.data.root:
        return Path(config.data.root).expanduser()
    cache = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(cache).expanduser() / "mle-bench" / "data"


def _weights(config: Any) -> list[str]:
    path, folder = config.model.path, weights_folder(config.model.path)
    if folder is None:
        return [f"weights: model.path = {path!r} is no folder and not in the hub cache; get it: hf download {path}"]
    if not (folder / "config.json").is_file():
        return [f"weights: model.path = {path!r} holds no config.json; give a folder in Hugging Face format"]
    return []


def _data(config: Any) -> list[str]:
    root = data_root(config)
    if not root.is_dir():
        return [f"data: data.root = {str(root)!r} does not exist; make it with: python launch/prepare.py --root {root}"]
    return []


def _devices(config: Any) -> list[str]:
    asked, there = config.mesh.fsdp * config.mesh.tp, jax.device_count()
    if asked > there:
        return [
            f"devices: mesh.fsdp * mesh.tp = {config.mesh.fsdp} * {config.mesh.tp} needs {asked} devices, here are "
            f"{there} ({jax.devices()[0].platform}); set --config.mesh.fsdp={there} --config.mesh.tp=1"
        ]
    return []


def _check_values(c: Any) -> None:
    for name, value in _leaves(c):
        if isinstance(value, list):
            raise ValueError(f"config.{name} = {value!r} is a list; write a tuple: {tuple(value)!r}")
    for name in ("steps", "rollout.batch", "rollout.prompt_tokens", "rollout.response_tokens", "ppo.micro_rows",
                 "ppo.epochs", "ppo.minibatches", "eval.programs", "checkpoint.every", "checkpoint.keep",
                 "sampler.slots", "mesh.fsdp", "mesh.tp", "buffer.capacity"):  # fmt: skip
        if _get(c, name) < 1:
            raise ValueError(f"config.{name} = {_get(c, name)} must be at least 1")
    if c.rollout.temperature <= 0:
        raise ValueError(f"config.rollout.temperature = {c.rollout.temperature} must be above 0 in training")
    if c.rollout.top_p != 1 or c.rollout.top_k != 0:
        raise ValueError(
            f"config.rollout.top_p = {c.rollout.top_p}, top_k = {c.rollout.top_k}: training needs 1 and 0 (off), else "
            "the sampler's log-probs belong to another distribution than the learner's"
        )
    if not 0 <= c.rollout.improve_share <= 1:
        raise ValueError(f"config.rollout.improve_share = {c.rollout.improve_share} must lie in [0, 1]")
    ppo_config(c).check_rows(c.rollout.batch, c.mesh.fsdp)
    longest = c.rollout.prompt_tokens + c.rollout.response_tokens
    if max(c.ppo.buckets) < longest:
        raise ValueError(
            f"config.ppo.buckets = {tuple(c.ppo.buckets)} ends below rollout.prompt_tokens + response_tokens = "
            f"{longest}; add a bucket of at least that"
        )
    if max(c.sampler.prompt_buckets) < c.rollout.prompt_tokens:
        raise ValueError(
            f"config.sampler.prompt_buckets = {tuple(c.sampler.prompt_buckets)} ends below rollout.prompt_tokens = "
            f"{c.rollout.prompt_tokens}; add a bucket of at least that"
        )
    if c.sampler.kind != "local":
        raise ValueError(f"config.sampler.kind = {c.sampler.kind!r} must be 'local'")


def _leaves(config: Any, prefix: str = "") -> list[tuple[str, Any]]:
    leaves = []
    for name, value in config.items():
        leaves += _leaves(value, f"{prefix}{name}.") if isinstance(value, ConfigDict) else [(prefix + name, value)]
    return leaves


def _get(config: Any, dotted: str) -> Any:
    for name in dotted.split("."):
        config = config[name]
    return config
