"""The grader's process: killable, warm, several at once, leaving nothing behind, with a fault of ours never a score."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest
import pytest_asyncio

from sandbox.grade import Grade, GradeSpec, Reason
from sandbox.grader import Grader

pytestmark = pytest.mark.asyncio(loop_scope="module")

ROOT = Path(__file__).parent.parent
SAMPLE = "id,y\n1,0\n2,0\n"
GOOD = b"id,y\n1,0.1\n2,0.9\n"
FUNCTIONS = '''
import os, sys, time
def hang(submission, answers): time.sleep(600)
def spin(submission, answers):
    while True: pass
def eat(submission, answers): return len(bytearray(3 << 30)) * 1.0
def leave(submission, answers): os._exit(3)
def leave_politely(submission, answers): sys.exit(0)
def kill(submission, answers): os.kill(os.getpid(), 9)
def kill_server(submission, answers): os.kill(os.getppid(), 9)
def talk(submission, answers):
    print('{"id": 1, "score": 1.0}', flush=True); os.write(1, b"noise"); input_ = sys.stdin.read()
    return float(submission["y"].sum())
def nap(submission, answers): time.sleep(0.5); return 0.0
def main_is(submission, answers): return float(sys.modules["__main__"].__dict__.get("TRAINER", 0))
'''  # fmt: skip


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def grader():
    """One for all tests that don't end it: its imports cost seconds."""
    grader = Grader(workers=4, timeout_s=30.0, memory_mb=1024)
    await grader.start()
    yield grader
    await grader.close()


@pytest.fixture
def spec(tmp_path: Path):
    (tmp_path / "answers.csv").write_text("id,y\n1,0\n2,1\n")
    (tmp_path / "sample.csv").write_text(SAMPLE)
    (tmp_path / "functions.py").write_text(FUNCTIONS)

    def make(function: str = "", metric: str = "auc-roc", **paths: str) -> GradeSpec:
        files = {"answers": str(tmp_path / "answers.csv"), "sample": str(tmp_path / "sample.csv")} | paths
        if function:
            return GradeSpec(**files, grade_fn=f"{tmp_path}/functions.py:{function}")
        return GradeSpec(**files, metric=metric)

    return make


def alive(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rsplit(")", 1)[1].split()[0] not in "ZX"
    except OSError:
        return False


def group(pid: int) -> list[int]:
    """Living processes of a process group."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                fields = (entry / "stat").read_text().rsplit(")", 1)[1].split()
            except OSError:
                continue
            if int(fields[2]) == pid and fields[0] not in "ZX":
                found.append(int(entry.name))
    return found


async def test_scores_and_refusals(grader, spec):
    assert await grader.grade(GOOD, spec()) == Grade(1.0, True, Reason.OK)
    assert await grader.grade(b"id,y\n1,0.1\n3,0.9\n", spec()) == Grade(None, False, Reason.WRONG_IDS)
    assert await grader.grade(None, spec()) == Grade(None, False, Reason.NONE)
    assert await grader.grade(b"1" * (65 << 20), spec()) == Grade(None, False, Reason.TOO_LARGE)
    assert await grader.grade(b"id,y\n" + b"1,0.5\n" * (4 << 20), spec()) == Grade(None, False, Reason.TOO_LARGE)
    assert (await grader.grade(GOOD, spec("talk"))).score == 1.0


async def test_faults_are_ours_and_the_grader_lives_on(grader, spec):
    for name, detail in (
        ("eat", "MemoryError"),
        ("leave", "code 3"),
        ("leave_politely", "SystemExit"),
        ("kill", "SIGKILL"),
        ("absent", "AttributeError"),
    ):
        grade = await grader.grade(GOOD, spec(name))
        assert grade.infra and (grade.score, grade.valid) == (None, False)
        assert detail in grade.detail and detail not in grade.reason
    grade = await grader.grade(GOOD, spec(answers="/no/such/answers.csv"))
    assert grade.infra and "FileNotFoundError" in grade.detail
    assert (await grader.grade(GOOD, spec(metric="f2"))).infra
    assert (await grader.grade(GOOD, spec())).score == 1.0


async def test_a_grader_that_hangs_is_killed(spec):
    grader = Grader(timeout_s=1.0)
    assert (await grader.grade(GOOD, spec())).score == 1.0
    assert grader._server is not None
    started = time.monotonic()
    grades = await asyncio.gather(*(grader.grade(GOOD, spec(name)) for name in ("hang", "spin")))
    assert all(grade.infra and "time limit" in grade.detail for grade in grades)
    assert 0.9 < time.monotonic() - started < 15
    assert group(grader._server.process.pid) == [grader._server.process.pid]
    await grader.close()


async def test_several_run_at_once(grader, spec):
    await grader.grade(GOOD, spec("nap"))
    started = time.monotonic()
    assert {grade.score for grade in await asyncio.gather(*(grader.grade(GOOD, spec("nap")) for _ in range(4)))} == {
        0.0
    }
    assert time.monotonic() - started < 1.9


async def test_the_loop_is_never_blocked(grader, spec):
    lags = []

    async def watch():
        while True:
            before = time.monotonic()
            await asyncio.sleep(0.01)
            lags.append(time.monotonic() - before - 0.01)

    watcher = asyncio.create_task(watch())
    await asyncio.gather(*(grader.grade(b"id,y\n" + b"1,0.5\n" * 1_000_000, spec()) for _ in range(4)))
    watcher.cancel()
    assert max(lags) < 1.0


@pytest.mark.slow
async def test_a_dead_process_is_replaced_and_its_question_asked_again(grader, spec):
    await grader.grade(GOOD, spec())
    asked = asyncio.create_task(grader.grade(GOOD, spec("nap")))
    await asyncio.sleep(0.2)
    os.kill(grader._server.process.pid, signal.SIGKILL)
    assert await asked == Grade(0.0, True, Reason.OK)
    grade = await grader.grade(GOOD, spec("kill_server"))  # each time: given up after the second
    assert grade.infra and "died" in grade.detail
    assert (await grader.grade(GOOD, spec())).score == 1.0


@pytest.mark.slow
async def test_a_process_that_cannot_start_is_a_fault_with_its_reason(spec):
    grader = Grader(preload=("no_such_module_here",))
    grade = await grader.grade(GOOD, spec())
    assert grade.infra and "no_such_module_here" in grade.detail
    await grader.close()


async def test_answers_are_read_again_when_they_change(grader, spec):
    assert (await grader.grade(GOOD, spec())).score == 1.0
    path = Path(spec().answers)
    path.write_text("id,y\n1,1\n2,0\n")
    os.utime(path, ns=(1, 1))
    assert (await grader.grade(GOOD, spec())).score == 0.0


async def test_check_names_a_competition_that_cannot_be_graded(grader, spec):
    await grader.check(spec())
    with pytest.raises(ValueError, match=r"no/such/answers.csv"):
        await grader.check(spec(answers="/no/such/answers.csv"))
    with pytest.raises(ValueError, match="unknown metric"):
        await grader.check(spec(metric="f2"))
    with pytest.raises(ValueError, match=r"sample submission /no/sample.csv"):
        await grader.check(spec(sample="/no/sample.csv"))


async def test_close_and_cancellation_leave_no_process(spec):
    grader = Grader()
    await grader.grade(GOOD, spec())
    assert grader._server is not None
    pid = grader._server.process.pid
    hanging = asyncio.create_task(grader.grade(GOOD, spec("hang")))
    await asyncio.sleep(0.5)
    assert len(group(pid)) == 2
    hanging.cancel()
    with pytest.raises(asyncio.CancelledError):
        await hanging
    await grader.close()
    assert group(pid) == []
    await grader.close()  # twice does no harm
    with pytest.raises(RuntimeError, match="closed"):
        await grader.grade(GOOD, spec())


@pytest.mark.parametrize("name", ["workers", "timeout_s", "memory_mb"])
async def test_bad_numbers_are_refused(name):
    with pytest.raises(ValueError, match=f"grader {name} = 0"):
        Grader(**{name: 0})


TRAINER = """
    import os, sys, threading, time
    print("main", flush=True)
    import asyncio
    import jax, jax.numpy as jnp
    from sandbox.grade import GradeSpec
    from sandbox.grader import Grader
    TRAINER = 1
    jax.block_until_ready(jnp.ones((64, 64)) @ jnp.ones((64, 64)))
    assert threading.active_count() >= 1 and len(os.listdir("/proc/self/task")) > 2

    async def main():
        grader = Grader()
        specs = [GradeSpec("{folder}/answers.csv", "{folder}/sample.csv", **{{key: value}})
                 for key, value in (("metric", "auc"), ("grade_fn", "{folder}/functions.py:main_is"))]
        for spec in specs:
            grade = await grader.grade(b"id,y\\n1,0.1\\n2,0.9\\n", spec)
            print(grade.score, grade.detail, flush=True)
        print(grader._server.process.pid, flush=True)
        if "wait" in sys.argv:
            await asyncio.sleep(600)
        await grader.close()

    asyncio.run(main())
"""


@pytest.mark.slow
@pytest.mark.parametrize("how", ["end", "wait"])
async def test_beside_jax_threads_its_main_is_not_imported_and_its_death_ends_the_grader(spec, tmp_path, how):
    script = tmp_path / "train.py"
    script.write_text(textwrap.dedent(TRAINER.format(folder=tmp_path)))
    spec()
    env = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONWARNINGS": "error::RuntimeWarning"}
    command = [sys.executable, str(script), how]
    with subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        assert process.stdout is not None
        lines = [process.stdout.readline().split() for _ in range(4)]
        assert lines[:3] == [["main"], ["1.0"], ["0.0"]], lines  # printed once; TRAINER isn't there in the grader
        pid = int(lines[3][0])
        if how == "wait":
            assert alive(pid)
            process.kill()
        assert process.wait(30) == (0 if how == "end" else -signal.SIGKILL)
    deadline = time.monotonic() + 10
    while alive(pid) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not alive(pid)
