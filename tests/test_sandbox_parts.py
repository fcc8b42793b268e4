"""The parts of the sandbox that need no box: output, pool, outcome, cgroup files, harness, image of the environment."""

from __future__ import annotations

import asyncio
import itertools
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sandbox import seccomp
from sandbox.cgroup import Cgroup, CgroupRoot, Counters
from sandbox.harness import READY
from sandbox.manager import Manager, make_sandbox
from sandbox.markers import marker_line, parse_marker
from sandbox.outcome import End, Evidence, judge
from sandbox.output import Output
from sandbox.protocol import Capabilities, Job, Limits, Outcome, Result

HARNESS = Path(__file__).parent.parent / "sandbox" / "harness.py"


def collect(chunks: list[bytes], nonce: str = "n0", keep: int = 1 << 16) -> Output:
    output = Output(nonce, keep)
    for at, chunk in enumerate(chunks):
        output.feed(chunk, float(at))
    output.close()
    return output


@given(st.lists(st.integers(0, 60), max_size=6))
def test_output_is_the_same_however_it_is_cut(cuts: list[int]) -> None:
    data = b"bwrap: hm\n" + READY + "é@@n0:trained\nx@@n0:x\n@@n\n@@n0:predicted\n@@n0:".encode()
    edges = [0, *sorted(min(cut, len(data)) for cut in cuts), len(data)]
    output = collect([data[a:b] for a, b in itertools.pairwise(edges)])
    assert output.text() == ("éx@@n0:x\n@@n\n@@n0:", "")
    assert [claim.name for claim in output.milestones] == ["trained", "predicted"]
    assert output.prelude == "bwrap: hm\n"
    assert output.total == len(data) - len(READY) - len("bwrap: hm\n")


def test_milestones_carry_the_time_of_their_chunk() -> None:
    output = Output("n0", 100)
    output.feed(READY + b"@@n0:imported\n", 10.0)
    output.feed(b"@@n0:tra", 11.0)
    output.feed(b"ined\n", 12.5)
    assert [(claim.name, claim.at_s) for claim in output.milestones] == [("imported", 0.0), ("trained", 2.5)]


def test_output_keeps_both_ends_in_constant_memory() -> None:
    output = Output("", 10)
    output.feed(READY + b"0123456789", 0.0)
    for _ in range(10_000):
        output.feed("é".encode() * 50, 0.0)
    output.feed("zé".encode(), 0.0)
    output.close()
    assert output.text() == ("0123456789", "é" * 3 + "zé")  # the tail's first byte was half a character
    assert output.truncated
    assert output.total == 10 + 10_000 * 100 + 3
    assert len(output._tail) < 1 << 17


def test_output_is_safe_to_print() -> None:
    output = collect([READY + b"\x1b[2Jred\r\nover\rwrite\x00\xff\t" + "\u202e\u200b\x9b".encode()])
    assert output.text()[0] == "\\x1b[2Jred\nover\\x0dwrite\\x00\ufffd\t\\u202e\\u200b\\x9b"


def test_a_marker_in_a_loop_counts_once_and_hides_no_later_one() -> None:
    output = collect([READY, b"@@n0:trained\n" * 10_000, b"@@n0:predicted\n"], keep=100)
    assert [claim.name for claim in output.milestones] == ["trained", "predicted"]
    assert output.text() == ("", "")


def test_a_marker_needs_its_nonce() -> None:
    assert parse_marker(marker_line("abc", "trained"), "abc") == "trained"
    assert parse_marker("@@abc:trained\n", "abc") == "trained"
    assert parse_marker("@@abc:won", "abc") is None
    assert parse_marker("@@abd:trained", "abc") is None
    assert parse_marker("@@:trained", "") is None


NOTHING = Counters()
KILLED = Counters(oom_kills=1)


@pytest.mark.parametrize(
    ("seen", "output", "outcome"),
    [
        (Evidence(End.EXIT, 0, NOTHING, False, b"", ""), "", Outcome.OK),
        (Evidence(End.EXIT, 0, KILLED, True, b"", ""), "", Outcome.OK),
        (Evidence(End.EXIT, 137, KILLED, False, None, "missing"), "", Outcome.OOM),
        (Evidence(End.EXIT, 137, NOTHING, False, None, "missing"), "", Outcome.USER_ERROR),
        (Evidence(End.EXIT, 1, Counters(pids_hit=True), False, None, "missing"), "", Outcome.PIDS),
        (Evidence(End.EXIT, 1, NOTHING, False, None, ""), "RuntimeError: can't start new thread", Outcome.PIDS),
        (Evidence(End.EXIT, 1, NOTHING, True, None, ""), "", Outcome.DISK),
        (Evidence(End.EXIT, 1, NOTHING, False, None, ""), "OSError: [Errno 28] No space", Outcome.DISK),
        (Evidence(End.EXIT, 1, NOTHING, False, None, "link_outside"), "", Outcome.USER_ERROR),
        (Evidence(End.DEADLINE, 137, KILLED, True, None, ""), "", Outcome.TIMEOUT),
        (Evidence(End.FLOOD, 137, NOTHING, False, None, ""), "", Outcome.OUTPUT_TRUNC),
        (Evidence(End.MEMORY, 137, NOTHING, False, None, ""), "", Outcome.OOM),
        (Evidence(End.EXIT, 0, NOTHING, False, None, "missing"), "", Outcome.NO_SUBMISSION),
        (Evidence(End.EXIT, 0, NOTHING, False, None, "too_big"), "", Outcome.INVALID_SUBMISSION),
        (Evidence(End.EXIT, 0, NOTHING, False, None, "link_outside"), "", Outcome.HACK),
    ],
)
def test_the_outcome_table(seen: Evidence, output: str, outcome: Outcome) -> None:
    assert judge(seen, output, 1.0)[0] is outcome


def test_a_v2_group_is_read_and_limited(tmp_path: Path) -> None:
    folder = tmp_path / "jaxrl-sandbox.x.0"
    folder.mkdir()
    for name in ("memory.max", "memory.swap.max", "cpu.max", "pids.max", "cgroup.procs"):
        (folder / name).touch()
    (folder / "cpu.stat").write_text("usage_usec 2500000\nuser_usec 2000000\n")
    (folder / "memory.events").write_text("low 0\noom 1\noom_kill 2\n")
    (folder / "pids.events").write_text("max 3\n")
    group = Cgroup((folder,), unified=True)
    group.limit(Limits(memory_mb=100, cpus=1.5, processes=7))
    read = {name: (folder / name).read_text() for name in ("memory.max", "memory.swap.max", "cpu.max", "pids.max")}
    swap = {"memory.swap.max": "0"}
    assert read == {"memory.max": str(100 << 20), "cpu.max": "150000 100000", "pids.max": "7"} | swap
    assert group.counters() == Counters(2.5, 2, True)
    assert group.joins == (str(folder / "cgroup.procs"),)
    assert [found.folders for found in CgroupRoot((tmp_path,), True).leftovers("x")] == [(folder,)]


def test_the_filter_is_whole_instructions() -> None:
    code = seccomp.program()
    assert code is None or (len(code) % 8 == 0 and len(code) // 8 < 4096)


@pytest.mark.parametrize(
    "program", ["def f():\n    raise KeyError('é')\nf()\n", "x = (\n", "import sys\nsys.exit('bye')\n"]
)
def test_the_harness_fails_as_python_does(tmp_path: Path, program: str) -> None:
    file = tmp_path / "program.py"
    file.write_text(program)
    plain = subprocess.run([sys.executable, str(file)], capture_output=True, cwd=tmp_path)
    ours = subprocess.run(
        [sys.executable, "-P", "-s", "-u", str(HARNESS), "program.py", "0"], capture_output=True, cwd=tmp_path
    )
    assert (ours.returncode, ours.stderr) == (plain.returncode, plain.stderr)
    assert ours.stdout == READY


class Backend:
    """Answers as told, and notes how many run at once."""

    def __init__(self, *answers: Outcome, takes_s: float = 0.02) -> None:
        self.answers, self.takes_s = list(answers), takes_s
        self.now = self.most = self.started = 0
        self.closed = False

    async def start(self) -> Capabilities:
        return Capabilities("fake", (), ())

    async def run(self, job: Job) -> Result:
        self.started += 1
        self.now += 1
        self.most = max(self.most, self.now)
        try:
            await asyncio.sleep(self.takes_s)
        finally:
            self.now -= 1
        return Result(job.run_id, self.answers.pop(0) if self.answers else Outcome.OK)

    async def close(self) -> None:
        assert self.now == 0
        self.closed = True


@pytest.fixture
def job(tmp_path: Path) -> Job:
    return Job("r", "pass", str(tmp_path))


async def test_the_pool_is_bounded_and_queueing_is_told_apart(job: Job) -> None:
    backend = Backend(takes_s=0.1)
    manager = Manager(backend, max_running=2)
    results = await asyncio.gather(*(manager.run(job) for _ in range(6)))
    assert backend.most == 2
    waits = sorted(result.queue_s for result in results)
    assert waits[1] < 0.05
    assert waits[-1] > 0.15


async def test_our_own_faults_are_tried_again_up_to_a_bound(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sandbox.manager.RETRY_PAUSE_S", 0.01)
    backend = Backend(Outcome.INFRA, Outcome.INFRA, Outcome.USER_ERROR)
    assert (await Manager(backend, max_running=1).run(job)).outcome is Outcome.USER_ERROR
    backend = Backend(*[Outcome.INFRA] * 9)
    assert (await Manager(backend, max_running=1, infra_retries=2).run(job)).outcome is Outcome.INFRA
    assert backend.started == 3


async def test_closing_ends_runs_and_answers_those_who_wait(job: Job) -> None:
    backend = Backend(takes_s=60.0)
    manager = Manager(backend, max_running=1)
    tasks = [asyncio.create_task(manager.run(job)) for _ in range(3)]
    await asyncio.sleep(0.05)
    await manager.close()
    assert {(await task).outcome for task in tasks} == {Outcome.INFRA}
    assert backend.closed
    with pytest.raises(RuntimeError, match="after close"):
        await manager.run(job)


async def test_a_cancelled_run_is_over_when_its_caller_is(job: Job) -> None:
    backend = Backend(takes_s=60.0)
    manager = Manager(backend, max_running=1)
    task = asyncio.create_task(manager.run(job))
    await asyncio.sleep(0.05)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert backend.now == 0
    await manager.close()


def test_bad_settings_are_named() -> None:
    with pytest.raises(ValueError, match="sandbox kind: 'chroot' must be"):
        make_sandbox("chroot")
    with pytest.raises(ValueError, match="python: '/no/python' doesn't run"):
        make_sandbox("auto", python="/no/python")
    with pytest.raises(ValueError, match="max_running: -1"):
        make_sandbox("auto", max_running=-1)
