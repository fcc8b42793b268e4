"""How good a policy is: fresh programs on every task, sampled with seeds that training never uses."""

from __future__ import annotations

import dataclasses
import json
import os
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from jaxrl_code.rollout.episode import World
from jaxrl_code.rollout.pipeline import fresh_attempt, play_all
from jaxrl_code.tasks.competition import Competition
from jaxrl_code.tasks.prompts import PromptLimits


@dataclasses.dataclass(frozen=True)
class Summary:
    """Of one task, or of all. Means over an empty set are None."""

    programs: int
    valid: float  # share of programs with a valid submission
    reward: float | None
    score: float | None  # mean over valid programs, signed so that more is better
    percentile: float | None  # mean share of the leaderboard beaten; 0 for a program without a valid submission
    valid_percentile: float | None  # the same over valid programs: a mean score that tasks of unlike metrics can share
    wall_s: float | None  # mean run time


async def evaluate(
    world: World, tasks: Sequence[Competition], programs: int, seed: int, limits: PromptLimits
) -> list[dict[str, Any]]:
    """One record a program, tasks in turn. The same `seed` gives the same sampling seeds, whatever the policy."""
    seeds = np.random.default_rng(seed).integers(2**31, size=programs)
    attempts = [
        fresh_attempt(world, tasks[i % len(tasks)], f"eval-{i:04d}", int(seeds[i]), limits) for i in range(programs)
    ]
    by_id = {task.id: task for task in tasks}
    records = []
    for episode in await play_all(world, attempts):
        task, info = by_id[episode.task_id], episode.info
        score = info["score"]
        records.append(
            {
                "task": task.id,
                "masked": episode.masked,
                "outcome": info["outcome"],
                "reward": episode.reward,
                "score": score,
                "signed_score": None if score is None else (-score if task.lower_is_better else score),
                "percentile": task.percentile(score),
                "medal": task.medal(score),
                "wall_s": info["wall_s"],
                "program": info["program"],
                "output": info["output"],
            }
        )
    return records


def summarise(records: Sequence[dict[str, Any]]) -> Summary:
    """Infra faults are left out: they say nothing about the policy."""
    kept = [record for record in records if not record["masked"]]
    valid = [record for record in kept if record["score"] is not None]
    return Summary(
        programs=len(kept),
        valid=len(valid) / max(len(kept), 1),
        reward=_mean(record["reward"] for record in kept),
        score=_mean(record["signed_score"] for record in valid),
        percentile=_mean(record["percentile"] for record in kept),
        valid_percentile=_mean(record["percentile"] for record in valid),
        wall_s=_mean(record["wall_s"] for record in kept if record["program"] is not None),
    )


def by_task(records: Sequence[dict[str, Any]]) -> dict[str, Summary]:
    names = sorted({record["task"] for record in records})
    return {name: summarise([record for record in records if record["task"] == name]) for name in names}


def metrics_of(records: Sequence[dict[str, Any]]) -> dict[str, float]:
    """eval/... over all tasks and, where one name a task is needed, eval/<task>/..."""
    rows = {"": summarise(records), **{f"{name}/": summary for name, summary in by_task(records).items()}}
    names = ("valid", "reward", "score", "percentile", "valid_percentile", "wall_s")
    values = {f"eval/{task}{name}": getattr(row, name) for task, row in rows.items() for name in names}
    return {name: value for name, value in values.items() if value is not None}


def save(path: Path, made_with: dict[str, Any], records: Sequence[dict[str, Any]]) -> None:
    """Whole or not at all: a killed evaluation is done again, never half believed."""
    temporary = path.with_suffix(".tmp")
    temporary.write_text(json.dumps({"made_with": made_with, "records": list(records)}))
    os.replace(temporary, path)


def load(path: Path, made_with: dict[str, Any]) -> list[dict[str, Any]] | None:
    """None where there is none, or one of another model, other tasks or other settings."""
    if not path.exists():
        return None
    found = json.loads(path.read_text())
    return found["records"] if found["made_with"] == json.loads(json.dumps(made_with)) else None


def _mean(values: Any) -> float | None:
    values = list(values)
    return statistics.fmean(values) if values else None
