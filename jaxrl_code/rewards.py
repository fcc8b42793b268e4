"""From a run to its reward, the parts kept. Pure functions; the numbers come from the config."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Collection

from sandbox.grade import Grade
from sandbox.markers import MILESTONES
from sandbox.protocol import Outcome, Result


@dataclasses.dataclass(frozen=True)
class Reward:
    """`value` is None for a fault of ours: the episode is masked and counted, never trained on. Else the parts sum to
    it: 'score' and 'floor' (what the floor added) of a valid submission, 'invalid' and 'milestones' of an invalid one.
    A part that doesn't apply is absent, so that a mean over runs is over those that have it."""

    value: float | None
    parts: dict[str, float]

    @property
    def masked(self) -> bool:
        return self.value is None


def reward(
    result: Result,
    grade: Grade | None,
    *,
    lower_is_better: bool,
    planned: Collection[str] = MILESTONES,
    invalid: float = -10.0,
    milestone: float = 0.1,
) -> Reward:
    """The paper's reward (arXiv 2509.01684): a valid submission's score, its sign flipped where lower is better; else
    `invalid` plus `milestone` for each distinct milestone reached, of those `planned` by the instrumenter.

    A valid score is floored one milestone above the best that an invalid run can earn, so that no submission, however
    bad, is worse than none: a log loss of 34 would be. A grade decides validity, whatever the exit code: a program that
    crashed after writing a good file wrote a good file. An attempt on the grader or the sandbox earns `invalid` with no
    milestones, even where its file would score. `grade` is None where nothing was graded.

    Raises ValueError where the outcome is OK and no grade is given: our bug must not be the program's -10.
    """
    if result.outcome == Outcome.INFRA or (grade is not None and grade.infra):
        return Reward(None, {})
    if result.outcome == Outcome.HACK:
        return Reward(invalid, {"invalid": invalid})
    if grade is not None and grade.valid:
        if grade.score is None or not math.isfinite(grade.score):
            raise ValueError(f"run {result.run_id}: a valid grade with score {grade.score}; a valid score is finite")
        score = 0.0 - grade.score if lower_is_better else grade.score
        value = max(score, floor(invalid, milestone))
        return Reward(value, {"score": score, "floor": value - score})
    if grade is None and result.outcome == Outcome.OK:
        raise ValueError(f"run {result.run_id} left a submission that wasn't graded; grade it first")
    reached = {claim.name for claim in result.milestones} & set(planned) & set(MILESTONES)
    milestones = milestone * len(reached)
    return Reward(invalid + milestones, {"invalid": invalid, "milestones": milestones})


def floor(invalid: float, milestone: float) -> float:
    """The least reward of a valid submission: one milestone above an invalid run that reached them all."""
    return invalid + milestone * (len(MILESTONES) + 1)
