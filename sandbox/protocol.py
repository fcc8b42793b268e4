"""What a sandbox is asked (Job), what it answers (Result), and the protocol of every backend (Sandbox)."""

from __future__ import annotations

import dataclasses
import enum
import os
from typing import Protocol


class Outcome(enum.StrEnum):
    """How a run ended. Exactly one holds; anything else worth knowing is a flag of the Result."""

    OK = "ok"  # exit code 0 and a submission file
    USER_ERROR = "user_error"  # the program raised, or exited with a code other than 0
    TIMEOUT = "timeout"  # killed at the wall-clock limit
    OOM = "oom"  # killed for memory
    PIDS = "pids"  # died for want of processes
    DISK = "disk"  # died for want of scratch space
    OUTPUT_TRUNC = "output_trunc"  # killed for flooding its output
    NO_SUBMISSION = "no_submission"  # exit code 0, no submission file
    INVALID_SUBMISSION = "invalid_submission"  # a submission that the grader refuses by a named rule
    HACK = "hack"  # an attempt on the grader or the sandbox
    INFRA = "infra"  # our fault: retried or masked out of the batch, never rewarded


@dataclasses.dataclass(frozen=True)
class Limits:
    """What one run may use. All are enforced by the host."""

    wall_s: float = 60.0  # the clock starts when the program does; queueing is not billed
    memory_mb: int = 2048
    cpus: float = 1.0  # also the thread count that BLAS and OpenMP are told
    processes: int = 256
    scratch_mb: int = 256
    scratch_files: int = 10_000
    output_keep_bytes: int = 1 << 20  # this much of the head and this much of the tail are kept
    output_kill_bytes: int = 64 << 20  # past this the run is killed
    submission_bytes: int = 64 << 20


@dataclasses.dataclass(frozen=True)
class Job:
    """One program to run, once, in a box of its own.

    The program's working directory is a private empty scratch folder in which `data/` shows `data_dir` read-only; it is
    to leave `submission.csv` there.
    """

    run_id: str
    program: str
    data_dir: str  # absolute path on the host
    nonce: str = ""  # marks this run's milestone lines (sandbox.instrument); '' for none
    limits: Limits = Limits()
    seed: int = 0  # seeds `random` and `numpy.random` before the program starts


def check(job: Job) -> None:
    """Raises ValueError for a job that no backend could run as asked."""
    if not os.path.isabs(job.data_dir) or not os.path.isdir(job.data_dir):
        raise ValueError(f"data_dir: {job.data_dir!r} must be the absolute path of a folder that exists")
    if not all(character.isascii() and (character.isalnum() or character in "-_") for character in job.nonce):
        raise ValueError(f"nonce: {job.nonce!r} must be made of letters, digits, '-' and '_'")
    if job.seed < 0:
        raise ValueError(f"seed: {job.seed} must be >= 0")
    lowest = {"wall_s": 0.001, "memory_mb": 64, "cpus": 0.01, "processes": 8, "scratch_mb": 1, "scratch_files": 8}
    lowest |= {"output_keep_bytes": 1, "output_kill_bytes": 1, "submission_bytes": 1}
    for name, least in lowest.items():
        value = getattr(job.limits, name)
        if not least <= value < float("inf"):
            raise ValueError(f"limits.{name}: {value} must be a finite number >= {least}")


@dataclasses.dataclass(frozen=True)
class Milestone:
    """A claim by the program that it did something, stamped by the host's clock when it arrived."""

    name: str
    at_s: float  # seconds since the program started


@dataclasses.dataclass(frozen=True)
class Result:
    """What came out of a run. Durations are on the host's clock and never hold queueing or box start."""

    run_id: str
    outcome: Outcome
    exit_code: int | None = None
    wall_s: float = 0.0
    cpu_s: float = 0.0
    queue_s: float = 0.0
    start_s: float = 0.0  # box start
    milestones: tuple[Milestone, ...] = ()
    output_head: str = ""  # stdout and stderr in order of arrival, milestone lines removed, control bytes escaped
    output_tail: str = ""  # '' when the head holds everything
    output_bytes: int = 0
    submission: bytes | None = None  # of a program that ended by itself, well or not
    flags: tuple[str, ...] = ()  # e.g. 'weak_isolation', 'child_oom', 'output_trunc', 'left_processes'
    detail: str = ""  # one line for a person: why the outcome is what it is


@dataclasses.dataclass(frozen=True)
class Capabilities:
    """What a backend holds back on this machine, found by trying."""

    backend: str
    held: tuple[str, ...]
    not_held: tuple[str, ...]


class Sandbox(Protocol):
    """A pool of single-use boxes. `run` never raises for what a program does; a fault of ours is Outcome.INFRA."""

    async def start(self) -> Capabilities:
        """Checks the backend, removes what an earlier owner left behind, and says what is held back."""
        ...

    async def run(self, job: Job) -> Result:
        """Raises ValueError for a job that can't be run as asked (`check`)."""
        ...

    async def close(self) -> None: ...
