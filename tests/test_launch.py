"""What a user can get wrong on the command line: one line, a non-zero exit, no traceback, nothing written."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
LOCAL = "--config=configs/mlebench.py:local"


def launch(*flags: str, cwd: Path = ROOT) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(ROOT / "launch" / "train.py"), *flags]
    bare = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"}  # one CPU device
    return subprocess.run(command, cwd=cwd, env=bare, capture_output=True, text=True, timeout=120)


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ((), ("--config is missing", "configs/mlebench.py:local")),
        (("--config=configs/nope.py",), ("configs/nope.py", "No such file")),
        (("--config=configs/mlebench.py:8b",), ("no preset '8b'", "0.5b")),
        ((LOCAL, "--config.ppo.clipp=0.1"), ("unknown config key clipp", '"clip"')),
        ((LOCAL, "--config.pp.clip=0.1"), ("unknown config key pp", '"ppo"')),
        ((LOCAL, "--config.ppo.clip=often"), ("config.ppo.clip=often", "float")),
        ((LOCAL, "--config.steps=1.5"), ("config.steps=1.5",)),
        ((LOCAL, "twice"), ("unexpected argument 'twice'",)),
        ((LOCAL, "--confg.steps=2"), ("confg.steps",)),
    ],
)
def test_a_wrong_flag_is_one_line(flags: tuple[str, ...], words: tuple[str, ...]) -> None:
    done = launch(*flags)
    assert done.returncode == 1
    lines = done.stderr.strip().splitlines()
    assert len(lines) == 1, done.stderr
    assert lines[0].startswith("error: ")
    for word in words:
        assert word in lines[0]


@pytest.mark.slow
def test_the_default_on_a_bare_machine_names_all_that_is_missing(tmp_path: Path) -> None:
    start = time.monotonic()
    done = launch("--config=configs/mlebench.py", f"--config.data.root={tmp_path}/none", f"--workdir={tmp_path}/run")
    assert time.monotonic() - start < 10
    assert done.returncode == 1
    assert "Traceback" not in done.stderr
    for word in (
        "weights:",
        "hf download Qwen/Qwen2.5-3B-Instruct",
        "data:",
        "launch/prepare.py",
        "devices:",
        ":local",
    ):
        assert word in done.stderr
    assert not (tmp_path / "run").exists()
