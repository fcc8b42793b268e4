"""One episode: the policy answers a prompt, its program is instrumented, run, graded and rewarded."""

from __future__ import annotations

import contextlib
import dataclasses
import secrets
from collections.abc import Callable, Collection

import numpy as np

from jaxrl_code.chat import Tokenizer
from jaxrl_code.rewards import Reward
from jaxrl_code.sampling.base import Request, Sampler, SamplingParams
from jaxrl_code.tasks.competition import Competition
from jaxrl_code.tasks.prompts import extract_program
from jaxrl_code.tasks.solutions import Solution
from jaxrl_code.types import Episode, Turn
from sandbox.grade import Grade, GradeSpec
from sandbox.grader import Grader
from sandbox.instrument import instrument, strip
from sandbox.protocol import Job, Limits, Outcome, Result, Sandbox


@dataclasses.dataclass(frozen=True)
class Attempt:
    """What to play: a prompt on a task, and the seed that it is sampled with."""

    run_id: str
    task: Competition
    kind: str  # 'fresh' or 'improve'
    prompt_ids: np.ndarray
    seed: int
    parent: Solution | None = None


@dataclasses.dataclass(frozen=True)
class World:
    """All that an episode needs beside the attempt itself."""

    sampler: Sampler
    sandbox: Sandbox
    grader: Grader
    tokenizer: Tokenizer
    sampling: SamplingParams
    limits: Limits
    pay: Callable[..., Reward]  # `rewards.reward`, its numbers filled in
    phase: Callable[[str], contextlib.AbstractContextManager[None]]  # of the step's clock: 'sample', 'sandbox'


async def play(world: World, attempt: Attempt) -> Episode:
    """A single-turn episode. Its infra faults are masked, never rewarded."""
    with world.phase("sample"):
        completion = await world.sampler.sample(Request(attempt.prompt_ids, world.sampling, attempt.seed))
        text = world.tokenizer.decode(completion.ids)
    with world.phase("sandbox"):
        run = await run_answer(world, attempt, text)
    paid = world.pay(run.result, run.grade, lower_is_better=attempt.task.lower_is_better, planned=run.planned)
    turn = Turn(
        prompt_ids=attempt.prompt_ids,
        action_ids=completion.ids,
        action_logp=completion.logp,
        stop_reason=completion.stop_reason,
        policy_version=completion.version,
        reward=0.0 if paid.value is None else paid.value,
        reward_parts=paid.parts,
        duration_s=run.result.wall_s,
    )
    return Episode(attempt.task.id, attempt.kind, (turn,), masked=paid.masked, info=_info(attempt, text, run))


@dataclasses.dataclass(frozen=True)
class Run:
    program: str | None  # None: the answer held no complete program
    result: Result
    grade: Grade | None
    planned: Collection[str] = ()  # milestones that the instrumenter found a place for


async def run_answer(world: World, attempt: Attempt, text: str) -> Run:
    """Extracts the program of an answer, instruments and runs it, and grades what it left."""
    program = extract_program(text)
    if program is None:
        nothing = Result(attempt.run_id, Outcome.NO_SUBMISSION, detail="the answer holds no complete python block")
        return Run(None, nothing, None)
    nonce = secrets.token_hex(8)
    source, planned = program, ()
    with contextlib.suppress(ValueError):  # no Python, or not safe to instrument: it runs as it is, for its own error
        instrumented = instrument(program, nonce)
        source, planned = instrumented.source, instrumented.planned
    job = Job(attempt.run_id, source, str(attempt.task.public_dir), nonce, world.limits)
    result = await world.sandbox.run(job)
    # A traceback quotes the line that raised, with the print that was planted in it.
    head, tail = (strip(output, nonce) for output in (result.output_head, result.output_tail))
    result = dataclasses.replace(result, output_head=head, output_tail=tail)
    if result.submission is None or result.outcome is Outcome.INFRA:
        return Run(program, result, None, planned)
    grade = await world.grader.grade(result.submission, grade_spec(attempt.task))
    if grade.infra:
        result = dataclasses.replace(result, outcome=Outcome.INFRA, detail=grade.detail)
    elif not grade.valid and result.outcome is Outcome.OK:
        result = dataclasses.replace(result, outcome=Outcome.INVALID_SUBMISSION, detail=str(grade.reason))
    return Run(program, result, grade, planned)


def grade_spec(task: Competition) -> GradeSpec:
    return GradeSpec(str(task.answers), str(task.sample_submission), task.metric, task.grade_fn)


def terminal(result: Result) -> str:
    """What a person at the terminal would have seen, the grader's refusal included."""
    output = result.output_head + (f"\n...\n{result.output_tail}" if result.output_tail else "")
    note = {
        Outcome.TIMEOUT: "Killed: time limit.",
        Outcome.OOM: "Killed: out of memory.",
        Outcome.NO_SUBMISSION: result.detail or "No submission.csv was written.",
        Outcome.INVALID_SUBMISSION: f"Submission refused: {result.detail}",
    }.get(result.outcome, "")
    return "\n".join(part for part in (output.rstrip(), note) if part)


def _info(attempt: Attempt, text: str, run: Run) -> dict:
    score = run.grade.score if run.grade is not None and run.grade.valid else None
    return {
        "run_id": attempt.run_id,
        "answer": text,
        "program": run.program,
        "output": terminal(run.result),
        "detail": run.result.detail,
        "outcome": str(run.result.outcome),
        "score": score,  # the metric's own sign; None without a valid submission
        "wall_s": run.result.wall_s,
        "cpu_s": run.result.cpu_s,
        "queue_s": run.result.queue_s,
        "milestones": [milestone.name for milestone in run.result.milestones],
        "flags": list(run.result.flags) + (list(run.grade.flags) if run.grade is not None else []),
        "parent_reward": None if attempt.parent is None else attempt.parent.reward,
    }
