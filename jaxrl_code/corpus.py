"""The corpus of the shipped policy: demonstrations on tasks and on variants of them, fresh ones and revisions.

A revision answers a prompt that shows an earlier demonstration with its real output and score: those are run here.
"""

from __future__ import annotations

import asyncio
import dataclasses
import random
from collections.abc import Sequence
from pathlib import Path

from jaxrl_code.rollout.episode import grade_spec, terminal
from jaxrl_code.tasks.competition import Competition
from jaxrl_code.tasks.demo_programs import Facts, Recipe
from jaxrl_code.tasks.demo_runs import run_all
from jaxrl_code.tasks.demo_tasks import variant
from jaxrl_code.tasks.demonstrations import Demonstration, facts_of, fresh, improve
from jaxrl_code.tasks.prompts import PromptLimits
from jaxrl_code.tasks.solutions import Solution
from sandbox.grader import Grader
from sandbox.protocol import Outcome, Result


@dataclasses.dataclass(frozen=True)
class Group:
    """Answers to one prompt."""

    messages: tuple[dict[str, str], ...]
    answers: tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class Earlier:
    """A demonstration that was run, for others to revise."""

    task: Competition
    facts: Facts
    recipe: Recipe
    solution: Solution


def variants(tasks: Sequence[Competition], number: int, root: Path, seed: int) -> list[Competition]:
    """`number` variants of the tasks, taken in turn, written to `root`."""
    return [variant(random.Random(f"{seed}:{i}"), tasks[i % len(tasks)], root, i) for i in range(number)]


def run_earlier(
    tasks: Sequence[Competition], each: int, seed: int, limits: PromptLimits, workers: int
) -> list[Earlier]:
    """`each` fresh demonstrations a task, run and graded."""
    demos: list[tuple[Competition, Facts, Demonstration]] = []
    for task in tasks:
        rng, facts = random.Random(f"{seed}:{task.id}"), facts_of(task, limits)
        demos += [(task, facts, fresh(rng, task, facts, limits)) for _ in range(each)]
    results = run_all([(demo.program, task.public_dir) for task, _, demo in demos], workers)
    graded = asyncio.run(grade_all([task for task, _, _ in demos], results, workers))
    return [
        Earlier(task, facts, demo.recipe, Solution(demo.program, terminal(result), str(result.outcome), 0.0, score))
        for (task, facts, demo), (result, score) in zip(demos, graded, strict=True)
    ]


async def grade_all(
    tasks: Sequence[Competition], results: Sequence[Result], workers: int
) -> list[tuple[Result, float | None]]:
    grader = Grader(workers=workers)

    async def one(task: Competition, result: Result) -> tuple[Result, float | None]:
        grade = await grader.grade(result.submission, grade_spec(task))
        if grade.infra:
            raise ValueError(f"task {task.id}: {grade.detail}")
        if result.outcome is Outcome.OK and not grade.valid:
            result = dataclasses.replace(result, outcome=Outcome.INVALID_SUBMISSION, detail=str(grade.reason))
        return result, grade.score if grade.valid else None

    try:
        return list(await asyncio.gather(*(one(*pair) for pair in zip(tasks, results, strict=True))))
    finally:
        await grader.close()


def fresh_groups(tasks: Sequence[Competition], each: int, answers: int, seed: int, limits: PromptLimits) -> list[Group]:
    """`each` groups a task, of answers of like length: less padding."""
    groups = []
    for task in tasks:
        rng, facts = random.Random(f"{seed}:fresh:{task.id}"), facts_of(task, limits)
        demos = sorted((fresh(rng, task, facts, limits) for _ in range(each * answers)), key=lambda d: len(d.answer))
        texts = [demo.answer for demo in demos]
        groups += [Group(demos[0].messages, tuple(texts[i : i + answers])) for i in range(0, len(texts), answers)]
    return groups


def improve_groups(earlier: Sequence[Earlier], answers: int, seed: int, limits: PromptLimits) -> list[Group]:
    """A group for each earlier demonstration."""
    groups = []
    for i, e in enumerate(earlier):
        rng = random.Random(f"{seed}:improve:{i}")
        demos = [improve(rng, e.task, e.facts, e.recipe, e.solution, limits) for _ in range(answers)]
        groups.append(Group(demos[0].messages, tuple(demo.answer for demo in demos)))
    return groups
