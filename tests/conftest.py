"""Eight fake CPU devices, and skips that name the component they miss."""

from __future__ import annotations

import functools
import importlib.util
import os
import shutil
import subprocess
from pathlib import Path

import pytest

# Read when jax is first imported, so set before anything can import it. The last of two equal XLA flags counts.
os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=8".strip()
os.environ.setdefault("HF_HUB_OFFLINE", "1")  # no test may need a hub
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("MPLBACKEND", "Agg")

IMAGE = "jaxrl-sandbox"
REAL_MODEL = "qwen2.5-coder-0.5b-instruct"


def _runs(*command: str) -> bool:
    try:
        return subprocess.run(command, capture_output=True, timeout=20).returncode == 0
    except (OSError, subprocess.TimeoutExpired):
        return False


@functools.cache
def missing(component: str) -> str:
    """Why tests marked with `component` can't run here; '' if they can."""
    if component == "docker":
        if not shutil.which("docker"):
            return "no docker client: apt-get install docker.io"
        if not _runs("docker", "info"):
            return "no Docker engine answers: start one with .ci/start_dockerd"
        made = _runs("docker", "image", "inspect", IMAGE)
        return "" if made else f"no image {IMAGE}: make it with sandbox/build_image"
    if component == "bwrap":
        if not shutil.which("bwrap"):
            return "no bubblewrap: apt-get install bubblewrap"
        ok = _runs("bwrap", "--unshare-all", "--ro-bind", "/", "/", "true")
        return "" if ok else "bubblewrap may not make namespaces here"
    if component == "torch":
        return "" if importlib.util.find_spec("torch") else "torch isn't installed"
    if component == "real_weights":
        root = os.environ.get("JAXRL_REAL_MODELS", "")
        found = bool(root) and (Path(root) / REAL_MODEL / "config.json").is_file()
        return "" if found else f"set JAXRL_REAL_MODELS to a folder that holds {REAL_MODEL}"
    return ""


def pytest_runtest_setup(item: pytest.Item) -> None:
    for marker in item.iter_markers():
        if reason := missing(marker.name):
            pytest.skip(reason)


@pytest.fixture
def real_model() -> Path:
    """The folder of the real Qwen2.5-Coder-0.5B-Instruct; for tests marked `real_weights`."""
    return Path(os.environ["JAXRL_REAL_MODELS"]) / REAL_MODEL
