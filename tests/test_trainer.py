"""The whole loop for real, small: the shipped policy, programs in the sandbox, a kill in the middle, a full disk."""

from __future__ import annotations

import json
import math
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parent.parent
STEPS = 4
# One task of each kind of metric keeps it quick; one CPU device, as a laptop has.
FLAGS = (
    "--config=configs/mlebench.py:local",
    f"--config.steps={STEPS}",
    "--config.data.tasks=('breast-cancer', 'penguin-mass')",
    "--config.rollout.batch=8",
    "--config.ppo.minibatches=2",
    "--config.ppo.micro_rows=4",
    "--config.eval.programs=4",
    "--config.checkpoint.keep=1",
)
MEASURED = ("time/", "env/duration", "env/cpu", "env/queue", "rollout/duration", "rollout/reward_per_s",
            "rollout/reward_rate", "eval/wall_s")  # fmt: skip

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


def command(workdir: Path, data: Path, *flags: str) -> list[str]:
    where = (f"--workdir={workdir}", f"--config.data.root={data}")
    return [sys.executable, str(ROOT / "launch" / "train.py"), *FLAGS, *where, *flags]


def environment(data: Path) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"}
    # The runs compile the same programs: once is enough.
    return kept | {"PYTHONUNBUFFERED": "1", "JAX_COMPILATION_CACHE_DIR": str(data.parent / "compiled")}


def train(workdir: Path, data: Path, *flags: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command(workdir, data, *flags), cwd=ROOT, env=environment(data), capture_output=True, text=True, timeout=800
    )


def rows(workdir: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (workdir / "metrics.jsonl").read_text().splitlines()]


def exact(row: dict[str, Any]) -> dict[str, Any]:
    """What must repeat: all but what a clock measured."""
    return {k: v for k, v in row.items() if not k.startswith(MEASURED) and not k.endswith("wall_s")}


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("data")
    root.chmod(0o755)  # programs run as other users
    root.parent.chmod(0o755)
    prepare = [sys.executable, str(ROOT / "launch" / "prepare.py"), f"--root={root}/mlebench"]
    subprocess.run(prepare, cwd=ROOT, check=True, capture_output=True)
    return root / "mlebench"


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory, data: Path) -> tuple[Path, str]:
    """A run that nothing disturbed, and what it printed."""
    workdir = tmp_path_factory.mktemp("whole") / "run"
    done = train(workdir, data)
    assert done.returncode == 0, done.stderr[-3000:]
    return workdir, done.stdout


def test_a_run_leaves_what_a_user_looks_for(finished: tuple[Path, str]) -> None:
    workdir, printed = finished
    for name in ("metrics.jsonl", "learning_curve.png", "config.json", "eval_00000.json", f"eval_{STEPS:05d}.json"):
        assert (workdir / name).stat().st_size > 0
    assert (workdir / "policy" / "model.safetensors").exists()
    assert "before → after" in printed and "breast-cancer" in printed
    assert f"step {STEPS}/{STEPS}" in printed
    steps = [row["step"] for row in rows(workdir)]
    assert steps == [*range(STEPS + 1)]


def test_the_learner_agrees_with_the_sampler(finished: tuple[Path, str]) -> None:
    for row in rows(finished[0])[:STEPS]:
        assert row["rollout/logp_diff_max"] < 1e-4


def test_nothing_compiles_after_the_second_step(finished: tuple[Path, str]) -> None:
    compiles = [row["time/compiles"] for row in rows(finished[0])[:STEPS]]
    assert compiles[0] > 0
    assert compiles[2:] == [0] * (STEPS - 2)


def test_tensorboard_reads_the_run(finished: tuple[Path, str]) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(finished[0]))
    events.Reload()
    tags: Any = events.Tags()
    rewards = [event.value for event in events.Scalars("rollout/reward_mean")]
    assert rewards == pytest.approx([row["rollout/reward_mean"] for row in rows(finished[0])[:STEPS]])
    assert "rollout/reward" in tags["histograms"]
    assert any("rollout/program_0" in tag for tag in tags["tensors"])


def test_a_killed_run_goes_on_and_equals_one_that_was_not(
    finished: tuple[Path, str], tmp_path: Path, data: Path
) -> None:
    workdir = tmp_path / "run"
    for wanted in (1, 3):  # killed in the step after this many were saved; the second time while that is going on
        quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL, "start_new_session": True}
        process = subprocess.Popen(command(workdir, data), cwd=ROOT, env=environment(data), **quiet)
        deadline = time.monotonic() + 400
        while not (workdir / "checkpoints" / f"step_{wanted:08d}" / "MANIFEST").exists():
            assert process.poll() is None and time.monotonic() < deadline
            time.sleep(0.05)
        time.sleep(0.5 * (wanted - 1))
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    done = train(workdir, data)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "going on from step 3" in done.stdout
    for ours, theirs in zip(rows(workdir), rows(finished[0]), strict=True):
        assert exact(ours) == exact(theirs)


def test_a_finished_run_only_shows_its_table(finished: tuple[Path, str], data: Path) -> None:
    before = rows(finished[0])
    done = train(finished[0], data)
    assert done.returncode == 0
    assert "before → after" in done.stdout
    assert [exact(row) for row in rows(finished[0])] == [exact(row) for row in before]


def test_a_damaged_checkpoint_is_passed_over(finished: tuple[Path, str], tmp_path: Path, data: Path) -> None:
    workdir = tmp_path / "run"
    shutil.copytree(finished[0], workdir)
    good = workdir / "checkpoints" / f"step_{STEPS:08d}"
    bad = workdir / "checkpoints" / f"step_{STEPS + 1:08d}"
    shutil.copytree(good, bad)
    victim = max((path for path in bad.rglob("*") if path.is_file()), key=lambda path: path.stat().st_size)
    victim.write_bytes(victim.read_bytes()[: victim.stat().st_size // 2])
    done = train(workdir, data)
    assert done.returncode == 0, done.stderr
    assert str(bad) in done.stderr
    assert f"going on from step {STEPS}" in done.stdout


def test_a_checkpoint_of_another_model_is_refused(finished: tuple[Path, str], tmp_path: Path, data: Path) -> None:
    other = tmp_path / "policy"
    shutil.copytree(ROOT / "assets" / "qwen2-tiny-mle", other)
    done = train(finished[0], data, f"--config.model.path={other}")
    assert done.returncode == 1
    assert done.stderr.strip().splitlines()[-1].startswith("error: ")
    assert "Traceback" not in done.stderr
    assert str(other) in done.stderr


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root to mount a small file system")
def test_a_full_disk_stops_the_run_with_one_line(tmp_path: Path, data: Path) -> None:
    small = tmp_path / "small"
    small.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=8m", "tmpfs", str(small)], check=True)
    try:
        done = train(small / "run", data, "--config.eval.programs=1", "--config.steps=1")
        assert done.returncode == 1
        assert "Traceback" not in done.stderr
        assert "no room in" in done.stderr.strip().splitlines()[-1]
    finally:
        subprocess.run(["umount", str(small)], check=True)


def test_metrics_are_finite(finished: tuple[Path, str]) -> None:
    for row in rows(finished[0]):
        bad = [name for name, value in row.items() if value is None or not math.isfinite(value)]
        assert not bad
