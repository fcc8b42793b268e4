"""From what the host saw of a run to its one outcome. Every backend uses this table, so that they agree."""

from __future__ import annotations

import dataclasses
import enum
import signal

from sandbox.cgroup import Counters
from sandbox.output import Output
from sandbox.protocol import Job, Outcome, Result

SUBMISSION_FAULTS = {
    "link_outside": (Outcome.HACK, "submission.csv is a link out of the working folder"),
    "link": (Outcome.INVALID_SUBMISSION, "submission.csv is a link"),
    "not_a_file": (Outcome.INVALID_SUBMISSION, "submission.csv isn't a readable regular file"),
    "hard_link": (Outcome.INVALID_SUBMISSION, "submission.csv has more than one name"),
    "too_big": (Outcome.INVALID_SUBMISSION, "submission.csv is larger than the limit"),
}


# What a program says where no counter of the host's tells: EAGAIN of fork, threading's own words.
_NO_PROCESS = ("[Errno 11] Resource temporarily unavailable", "can't start new thread")


class End(enum.Enum):
    """Why a run ended, as the host knows it."""

    EXIT = "exit"
    DEADLINE = "deadline"
    FLOOD = "flood"
    MEMORY = "memory"  # seen by polling, where no cgroup holds it
    PROCESSES = "processes"  # likewise
    SCRATCH = "scratch"  # likewise


@dataclasses.dataclass(frozen=True)
class Evidence:
    end: End
    exit_code: int  # 128 + n for signal n, as a shell has it
    counters: Counters
    scratch_full: bool
    submission: bytes | None
    fault: str  # of the submission (sandbox.scratch.read_submission), '' for none


def conclude(job: Job, seen: Evidence, output: Output, *, wall_s: float, cpu_s: float, start_s: float) -> Result:
    """The result of a run that was ours to judge; the backend may add flags of its own."""
    head, tail = output.text()
    outcome, detail = judge(seen, (tail or head)[-4000:], wall_s)
    flags = {
        "child_oom": seen.counters.oom_kills > 0 and outcome is not Outcome.OOM,
        "pids_hit": seen.counters.pids_hit and outcome is not Outcome.PIDS,
        "scratch_full": seen.scratch_full and outcome is not Outcome.DISK,
        "output_trunc": output.truncated,
    }
    return Result(
        job.run_id,
        outcome,
        exit_code=seen.exit_code if seen.end is End.EXIT else None,
        wall_s=wall_s,
        cpu_s=max(0.0, cpu_s),
        start_s=start_s,
        milestones=output.milestones,
        output_head=head,
        output_tail=tail,
        output_bytes=output.total,
        # A program that wrote its file and then fell over wrote its file; one that had to be killed didn't finish.
        submission=seen.submission if outcome in (Outcome.OK, Outcome.USER_ERROR) else None,
        flags=tuple(name for name, holds in flags.items() if holds),
        detail=detail,
    )


def judge(seen: Evidence, output_end: str, wall_s: float) -> tuple[Outcome, str]:
    """The outcome and one line for a person."""
    match seen.end:
        case End.DEADLINE:
            return Outcome.TIMEOUT, f"killed at the time limit after {wall_s:.1f} s"
        case End.FLOOD:
            return Outcome.OUTPUT_TRUNC, "killed for printing past the output limit"
        case End.MEMORY:
            return Outcome.OOM, "killed for memory"
        case End.PROCESSES:
            return Outcome.PIDS, "killed for its number of processes"
        case End.SCRATCH:
            return Outcome.DISK, "killed for its use of scratch space"
        case End.EXIT:
            pass
    if seen.exit_code != 0:
        if seen.counters.oom_kills:
            return Outcome.OOM, "killed for memory"
        if seen.counters.pids_hit or any(text in output_end for text in _NO_PROCESS):
            return Outcome.PIDS, "no more processes allowed"
        if seen.scratch_full or "[Errno 28]" in output_end or "[Errno 27]" in output_end:
            return Outcome.DISK, "no scratch space left"
        return Outcome.USER_ERROR, _exit(seen.exit_code) + _last_line(output_end)
    if seen.fault == "missing":
        return Outcome.NO_SUBMISSION, "no submission.csv was written"
    if seen.fault:
        return SUBMISSION_FAULTS[seen.fault]
    return Outcome.OK, ""


def _exit(code: int) -> str:
    try:
        return f"exit code {code} ({signal.Signals(code - 128).name})"
    except ValueError:
        return f"exit code {code}"


def _last_line(text: str) -> str:
    lines = text.strip().splitlines()
    return f": {lines[-1][:200]}" if lines else ""
