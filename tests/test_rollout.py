"""Episodes and the synchronous pipeline, with a scripted sampler and sandbox: no process is started."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jaxrl_code.evaluation import evaluate, metrics_of, summarise
from jaxrl_code.rewards import reward
from jaxrl_code.rollout.episode import Attempt, World, play
from jaxrl_code.rollout.pipeline import Pipeline
from jaxrl_code.rollout.stats import rollout_metrics
from jaxrl_code.sampling.base import Completion, Request, SamplingParams
from jaxrl_code.tasks.competition import Competition
from jaxrl_code.tasks.prompts import PromptLimits
from jaxrl_code.tasks.solutions import SolutionBuffer
from sandbox.grade import Grade, Reason
from sandbox.instrument import strip
from sandbox.protocol import Job, Limits, Milestone, Outcome, Result

GOOD = "Plan.\n```python\nimport os\nprint('hi')\n```"


class Text:
    """A tokenizer of characters."""

    def encode_chat(self, messages: list[dict[str, str]], add_generation_prompt: bool = True) -> np.ndarray:
        return np.array([ord(c) for message in messages for c in message["content"]], np.int32)

    def decode(self, ids: np.ndarray) -> str:
        return "".join(chr(i) for i in ids)


@dataclasses.dataclass
class Script:
    """Sampler, sandbox and grader in one: answers by the seed of a request, and remembers what it was asked."""

    answer: str = GOOD
    outcome: Outcome = Outcome.OK
    grade_: Grade | None = None
    requests: list[Request] = dataclasses.field(default_factory=list)
    jobs: list[Job] = dataclasses.field(default_factory=list)

    async def sample(self, request: Request) -> Completion:
        self.requests.append(request)
        await asyncio.sleep(0.001 * (request.seed % 5))  # episodes end in another order than they began
        ids = np.array([ord(c) for c in self.answer], np.int32)
        return Completion(ids, np.full(len(ids), -0.5, np.float32), "stop", 3)

    async def run(self, job: Job) -> Result:
        self.jobs.append(job)
        submission = b"id,y\n1,2\n" if self.outcome is Outcome.OK else None
        marks = (Milestone("imported", 0.1), Milestone("trained", 0.3))
        return Result(job.run_id, self.outcome, 0, wall_s=2.5, cpu_s=2.0, queue_s=9.0, milestones=marks,
                      output_head="hello\n", submission=submission, detail="why")  # fmt: skip

    async def grade(self, submission: bytes | None, spec: Any) -> Grade:
        assert submission is not None
        return self.grade_ if self.grade_ is not None else Grade(0.25, True, Reason.OK)


def task(name: str = "a", lower: bool = False) -> Competition:
    board = (0.1, 0.5) if lower else (0.5, 0.1)
    return Competition(
        id=name, name=name, description="Predict y.", metric="rmse" if lower else "accuracy", grade_fn="",
        public_dir=Path("/"), sample_submission=Path("/s.csv"), answers=Path("/a.csv"), leaderboard=board, tables=(),
        other_files=(), id_column="id", submission_columns=("id", "y"), target_columns=("y",),
    )  # fmt: skip


def world(script: Script) -> World:
    any_: Any = script
    return World(any_, any_, any_, Text(), SamplingParams(50, (0,)), Limits(), reward,  # type: ignore
                 lambda name: contextlib.nullcontext())  # fmt: skip


def attempt(t: Competition) -> Attempt:
    return Attempt("r", t, "fresh", np.array([1, 2, 3], np.int32), 7)


async def test_an_episode_keeps_what_was_sampled_and_what_came_of_it() -> None:
    script = Script()
    episode = await play(world(script), attempt(task()))
    (turn,) = episode.turns
    assert turn.prompt_ids.tolist() == [1, 2, 3]
    assert "".join(map(chr, turn.action_ids)) == GOOD
    assert turn.policy_version == 3
    assert turn.reward == episode.reward == 0.25
    assert turn.duration_s == 2.5  # run time alone, not the 9 s in the queue
    (job,) = script.jobs
    assert job.nonce and job.nonce in job.program
    assert strip(job.program, job.nonce) == "import os\nprint('hi')\n"
    assert episode.info["program"] == "import os\nprint('hi')\n"


async def test_lower_is_better_flips_the_score() -> None:
    episode = await play(world(Script()), attempt(task(lower=True)))
    assert episode.reward == -0.25


async def test_no_planted_print_shows_in_the_output() -> None:
    class Quotes(Script):
        async def run(self, job: Job) -> Result:
            result = await super().run(job)
            return dataclasses.replace(result, output_tail=f"line 1\n    {job.program.splitlines()[0]}\n")

    script = Quotes(outcome=Outcome.USER_ERROR)
    episode = await play(world(script), attempt(task()))
    assert script.jobs[0].nonce not in episode.info["output"]
    assert "    import os\n" in episode.info["output"] + "\n"


async def test_a_score_of_zero_is_valid() -> None:
    episode = await play(world(Script(grade_=Grade(0.0, True, Reason.OK))), attempt(task()))
    assert episode.reward == 0.0
    assert episode.info["score"] == 0.0


async def test_a_failed_program_earns_the_milestones_that_were_instrumented() -> None:
    episode = await play(world(Script(outcome=Outcome.USER_ERROR)), attempt(task()))
    assert episode.reward == pytest.approx(-9.9)  # it claims two, but only one print was planted
    assert episode.info["score"] is None


async def test_a_refused_submission_says_why_and_is_invalid() -> None:
    refused = Grade(None, False, Reason.REPEATED_ID)
    episode = await play(world(Script(grade_=refused)), attempt(task()))
    assert episode.info["outcome"] == "invalid_submission"
    assert str(Reason.REPEATED_ID) in episode.info["output"]
    assert episode.reward < -9


async def test_an_answer_without_a_program_never_runs() -> None:
    script = Script(answer="I cannot.")
    episode = await play(world(script), attempt(task()))
    assert not script.jobs
    assert episode.reward == -10
    assert episode.info["program"] is None


async def test_code_that_is_no_python_runs_as_it_is_for_its_error() -> None:
    script = Script(answer="```python\nprint(\n```", outcome=Outcome.USER_ERROR)
    await play(world(script), attempt(task()))
    assert script.jobs[0].program == "print(\n"


async def test_our_own_fault_is_masked() -> None:
    episode = await play(world(Script(outcome=Outcome.INFRA)), attempt(task()))
    assert episode.masked
    metrics = rollout_metrics([episode])
    assert metrics == {"env/infra_share": 1.0}


def pipeline(script: Script, improve: float = 0.5, prompt_tokens: int = 10_000) -> Pipeline:
    return Pipeline(
        world(script), (task("a"), task("b"), task("c")), SolutionBuffer(8), PromptLimits(), prompt_tokens, improve, 0
    )


async def test_tasks_take_turns_across_steps() -> None:
    pipe = pipeline(Script())
    first = await pipe.collect(0, 4)
    second = await pipe.collect(1, 4)
    assert [e.task_id for e in first + second] == ["a", "b", "c", "a", "b", "c", "a", "b"]


async def test_about_half_of_the_prompts_revise_once_there_is_something_to_revise() -> None:
    script = Script()
    pipe = pipeline(script)
    assert {e.kind for e in await pipe.collect(0, 30)} == {"fresh"}
    episodes = await pipe.collect(1, 200)
    share = np.mean([e.kind == "improve" for e in episodes])
    assert 0.4 < share < 0.6
    shown = next(r for r, e in zip(script.requests[30:], episodes, strict=True) if e.kind == "improve")
    prompt = "".join(map(chr, shown.prompt_ids))
    assert "print('hi')" in prompt and "hello" in prompt
    assert rollout_metrics(episodes)["rollout/improve_share"] == pytest.approx(share)


async def test_a_parent_too_long_to_show_is_not_shown() -> None:
    pipe = pipeline(Script(), improve=1.0, prompt_tokens=10)
    await pipe.collect(0, 6)
    assert {e.kind for e in await pipe.collect(1, 6)} == {"fresh"}


async def test_a_resumed_pipeline_asks_what_an_uninterrupted_one_asks() -> None:
    whole, script = pipeline(Script()), Script()
    for step in range(2):
        await whole.collect(step, 7)
    resumed = pipeline(script)
    resumed.load_state_dict(whole.state_dict())
    whole.world.sampler.requests.clear()  # type: ignore
    await whole.collect(2, 7)
    await resumed.collect(2, 7)
    ours, theirs = script.requests, whole.world.sampler.requests  # type: ignore
    assert [r.seed for r in ours] == [r.seed for r in theirs]
    for a, b in zip(ours, theirs, strict=True):
        np.testing.assert_array_equal(a.prompt_ids, b.prompt_ids)


async def test_seeds_differ_within_and_between_steps() -> None:
    script = Script()
    pipe = pipeline(script)
    for step in range(3):
        await pipe.collect(step, 50)
    assert len({r.seed for r in script.requests}) == 150


async def test_a_fault_in_one_episode_ends_the_step_and_leaves_no_task() -> None:
    class Broken(Script):
        async def run(self, job: Job) -> Result:
            raise RuntimeError("bug")

    before = asyncio.all_tasks()
    with pytest.raises(ExceptionGroup):
        await pipeline(Broken()).collect(0, 5)
    assert asyncio.all_tasks() == before


async def test_evaluation_uses_the_same_seeds_each_time_and_counts_failures() -> None:
    one, two = Script(), Script(outcome=Outcome.TIMEOUT)
    tasks = (task("a"), task("b", lower=True))
    good = await evaluate(world(one), tasks, 6, 10_000, PromptLimits())
    bad = await evaluate(world(two), tasks, 6, 10_000, PromptLimits())
    assert sorted(r.seed for r in one.requests) == sorted(r.seed for r in two.requests)
    assert len({r.seed for r in one.requests}) == 6
    assert summarise(good).valid == 1 and summarise(bad).valid == 0
    assert summarise(bad).score is None
    assert metrics_of(good)["eval/b/score"] == -0.25
    assert "eval/score" not in metrics_of(bad)
    assert metrics_of(bad)["eval/percentile"] == 0


def test_rollout_metrics_by_hand() -> None:
    async def both() -> list[Any]:
        return [
            await play(world(Script()), attempt(task())),
            await play(world(Script(outcome=Outcome.TIMEOUT)), attempt(task())),
            await play(world(Script(answer="no")), attempt(task())),
            await play(world(Script(outcome=Outcome.INFRA)), attempt(task())),
        ]

    metrics = rollout_metrics(asyncio.run(both()))
    assert metrics["env/infra_share"] == 0.25
    assert metrics["rollout/valid_share"] == pytest.approx(1 / 3)
    assert metrics["rollout/reward_mean"] == pytest.approx((0.25 - 9.9 - 10) / 3)
    assert metrics["rollout/program_share"] == pytest.approx(2 / 3)
    assert metrics["env/outcome_timeout"] == pytest.approx(1 / 3)
    assert metrics["env/milestone_trained"] == 1.0  # of the two that ran
    assert metrics["rollout/valid_reward_mean"] == 0.25
