"""A checkpoint is all or nothing: after kills, damage, a full disk, on other device counts, of another model."""

from __future__ import annotations

import errno
import logging
import os
import random
import shutil
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import struct
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from jaxrl_code.checkpoint import Checkpoints


@struct.dataclass
class State:
    params: dict
    opt_state: optax.OptState
    step: jax.Array
    key: jax.Array


def make_state(step: int = 0, width: int = 16) -> State:
    params = {"layers": {"w": jnp.full((width, 8), float(step)), "b": jnp.arange(8, dtype=jnp.bfloat16) + step}}
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3))
    return State(params, optimizer.init(params), jnp.int32(step), jax.random.key(step))


def raw(tree) -> list[np.ndarray]:
    return [
        np.asarray(jax.random.key_data(x) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x)
        for x in jax.tree.leaves(tree)
    ]


def assert_equal(one, other) -> None:
    assert jax.tree.structure(one) == jax.tree.structure(other)
    for a, b in zip(raw(one), raw(other), strict=True):
        np.testing.assert_array_equal(a, b)


def names(workdir: Path) -> list[str]:
    return sorted(path.name for path in (workdir / "checkpoints").iterdir())


def test_state_and_host_come_back_together(tmp_path):
    checkpoints = Checkpoints(tmp_path, "tiny")
    assert checkpoints.restore(make_state()) is None
    host = {"cursor": 7, "solutions": [{"score": None, "program": "x = '\u00e9'"}], "random": [2**80, "PCG64"]}
    checkpoints.save(3, make_state(3), host)
    step, state, found = checkpoints.restore(make_state())
    assert (step, found) == (3, host)
    assert_equal(state, make_state(3))


@pytest.mark.parametrize("count", [1, 2, 4, 8])
def test_restore_onto_other_device_counts(tmp_path, count):
    def lay_out(state, devices):
        mesh = Mesh(np.array(jax.devices()[:devices]), ("fsdp",), axis_types=(AxisType.Auto,))
        spec = {2: PartitionSpec("fsdp")}
        return jax.tree.map(lambda x: jax.device_put(x, NamedSharding(mesh, spec.get(x.ndim, PartitionSpec()))), state)

    Checkpoints(tmp_path, "tiny").save(1, lay_out(make_state(1), 4), {})
    target = lay_out(make_state(0), count)
    abstract = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), target)
    state = Checkpoints(tmp_path, "tiny").restore(abstract).state
    assert_equal(state, make_state(1))
    assert [x.sharding for x in jax.tree.leaves(state)] == [x.sharding for x in jax.tree.leaves(target)]


def test_what_is_restored_can_be_donated(tmp_path):
    checkpoints = Checkpoints(tmp_path, "tiny")
    checkpoints.save(1, make_state(1), {})
    step = jax.jit(lambda params: jax.tree.map(lambda x: x + 1, params), donate_argnums=0)
    params = checkpoints.restore(make_state()).state.params
    for _ in range(3):
        params = step(params)
    assert_equal(params, jax.tree.map(lambda x: x + 3, make_state(1).params))


def test_the_last_ones_are_kept_and_old_ones_go_after_the_commit(tmp_path, monkeypatch):
    checkpoints = Checkpoints(tmp_path, "tiny", keep=2)
    for step in (1, 2, 3):
        checkpoints.save(step, make_state(step), {})
    assert names(tmp_path) == ["step_00000002", "step_00000003"]
    # A save that fails has deleted nothing and leaves nothing.
    monkeypatch.setattr(Checkpoints, "_write", lambda *_: (_ for _ in ()).throw(RuntimeError("boom")))
    with pytest.raises(RuntimeError, match="boom"):
        checkpoints.save(4, make_state(4), {})
    assert names(tmp_path) == ["step_00000002", "step_00000003"]


def files_of(path: Path) -> list[Path]:
    return sorted(p for p in path.rglob("*") if p.is_file())


def test_any_damaged_file_is_noticed_and_the_last_good_one_taken(tmp_path, caplog):
    checkpoints = Checkpoints(tmp_path, "tiny")
    checkpoints.save(1, make_state(1), {"cursor": 1})
    newest = checkpoints.save(2, make_state(2), {"cursor": 2})
    rng = random.Random(0)
    victims = files_of(newest)
    assert len(victims) > 8
    for victim in victims:
        whole = victim.read_bytes()
        at = rng.randrange(len(whole))
        flipped = whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :]
        for damaged in (flipped, whole[: at], None):
            caplog.clear()
            victim.unlink() if damaged is None else victim.write_bytes(damaged)
            with caplog.at_level(logging.WARNING):
                restored = checkpoints.restore(make_state())
            assert (restored.step, restored.host) == (1, {"cursor": 1}), victim
            assert "passing over the damaged checkpoint" in caplog.text and str(newest) in caplog.text
        victim.write_bytes(whole)
    assert checkpoints.restore(make_state()).step == 2


def test_after_damage_the_run_goes_on_and_keeps_only_good_ones(tmp_path):
    checkpoints = Checkpoints(tmp_path, "tiny", keep=1)
    for step in (1, 2, 3):
        Checkpoints(tmp_path, "tiny", keep=3).save(step, make_state(step), {})
    for step in (2, 3):
        (tmp_path / "checkpoints" / f"step_0000000{step}" / "host.json").write_text("{")
    assert checkpoints.restore(make_state()).step == 1
    checkpoints.save(2, make_state(2), {})  # over the damaged one; the damaged future goes
    assert names(tmp_path) == ["step_00000002"]
    assert checkpoints.restore(make_state()).step == 2


def test_another_model_is_an_error_of_one_line(tmp_path):
    Checkpoints(tmp_path, "qwen2 2 layers").save(1, make_state(1), {})
    with pytest.raises(ValueError, match="of the model qwen2 2 layers, this run's is qwen2 4 layers") as error:
        Checkpoints(tmp_path, "qwen2 4 layers").restore(make_state())
    assert "--workdir" in str(error.value) and "\n" not in str(error.value)
    with pytest.raises(ValueError, match=r"float32\[16,8\] for .*layers/w, this run wants float32\[32,8\]") as error:
        Checkpoints(tmp_path, "qwen2 2 layers").restore(make_state(width=32))
    assert "\n" not in str(error.value)


def test_keep_must_be_positive(tmp_path):
    with pytest.raises(ValueError, match="keep is 0"):
        Checkpoints(tmp_path, "tiny", keep=0)


@pytest.fixture
def small_disk(tmp_path):
    """A file system of 2 MB; where mounting isn't allowed, the write below fails as a full disk does."""
    mount = ["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", str(tmp_path)]
    mounted = subprocess.run(mount, capture_output=True).returncode == 0
    yield tmp_path, mounted
    if mounted:
        subprocess.run(["umount", str(tmp_path)], check=True)


@pytest.mark.parametrize("seen_before_writing", [True, False])
def test_a_full_disk_is_one_line_and_leaves_the_earlier_checkpoint(
    small_disk, seen_before_writing, monkeypatch, caplog, capfd
):
    folder, real = small_disk
    checkpoints = Checkpoints(folder, "tiny")
    checkpoints.save(1, make_state(1), {"cursor": 1})
    huge = {"w": jax.random.normal(jax.random.key(0), (2_000_000,))}
    if not seen_before_writing:  # as when someone else fills the disk meanwhile
        monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=1 << 40))
    if not real:
        monkeypatch.setattr(Checkpoints, "_write", lambda *_: (_ for _ in ()).throw(OSError(errno.ENOSPC, "full")))
    with pytest.raises(OSError, match=r"no room in .* for the checkpoint of step 2 .*about 8 MB") as error:
        checkpoints.save(2, huge, {})
    assert error.value.errno == errno.ENOSPC and "\n" not in str(error.value)
    assert "Traceback" not in caplog.text + "".join(capfd.readouterr())
    assert names(folder) == ["step_00000001"]
    assert checkpoints.restore(make_state()).host == {"cursor": 1}


def test_saving_and_restoring_leave_no_thread(tmp_path):
    before = set(threading.enumerate())
    checkpoints = Checkpoints(tmp_path, "tiny")
    checkpoints.save(1, make_state(1), {})
    checkpoints.restore(make_state())
    until = time.monotonic() + 5  # a closed event loop lets its worker go without waiting for it
    while set(threading.enumerate()) - before and time.monotonic() < until:
        time.sleep(0.01)
    assert set(threading.enumerate()) <= before


async def test_saving_inside_a_running_event_loop(tmp_path):
    checkpoints = Checkpoints(tmp_path, "tiny")
    checkpoints.save(1, make_state(1), {})
    assert checkpoints.restore(make_state()).step == 1


# Imports once, then forks a saver for each line on stdin; a saver says 'step' when that step's save has returned.
SAVER = r"""
import os, sys
import jax, jax.numpy as jnp
from jaxrl_code.checkpoint import Checkpoints
for line in sys.stdin:
    pid = os.fork()
    if pid == 0:
        print("pid", os.getpid(), flush=True)
        checkpoints = Checkpoints(sys.argv[1], "tiny")
        step = int(line)
        while True:
            step += 1
            state = {"w": jnp.full((50_000,), step), "v": jnp.full((7,), step)}
            checkpoints.save(step, state, {"step": step, "filler": "x" * 100_000})
            print(f"{step}\n", end="", flush=True)  # one write: a kill between number and newline left half a line
    os.waitpid(pid, 0)
    print("dead", flush=True)
"""


@pytest.mark.slow
def test_kill_9_at_any_moment_leaves_a_whole_checkpoint(tmp_path):
    rng = random.Random(0)
    zeros = {"w": jnp.zeros((50_000,), jnp.int32), "v": jnp.zeros((7,), jnp.int32)}
    root = Path(__file__).parent.parent
    command = [sys.executable, "-W", "ignore", "-c", SAVER, str(tmp_path)]
    env = {**os.environ, "PYTHONPATH": str(root)}
    with subprocess.Popen(command, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as saver:
        assert saver.stdin and saver.stdout
        last, half = 0, 0
        for _ in range(20):
            saver.stdin.write(f"{last}\n")
            saver.stdin.flush()
            said = []
            pid = int(saver.stdout.readline().split()[1])
            said.append(int(saver.stdout.readline()))  # it is at work
            time.sleep(rng.uniform(0, 0.5))
            os.kill(pid, 9)
            while (line := saver.stdout.readline()) != "dead\n":
                said.append(int(line))
            half += any(name.startswith(".") for name in names(tmp_path))
            restored = Checkpoints(tmp_path, "tiny").restore(zeros)
            assert restored.step >= said[-1] >= last + 1  # what it said was saved is there
            assert restored.host["step"] == restored.step
            assert (restored.state["w"] == restored.step).all() and (restored.state["v"] == restored.step).all()
            last = restored.step
        saver.stdin.close()
    assert saver.returncode == 0
    assert half > 0  # some kills did fall in the middle of a save
