"""Earlier solutions of each task, from which the self-improvement prompts draw (arXiv 2509.01684, section 4.3)."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class Solution:
    """A program that was run, and what came of it."""

    program: str
    output: str  # what its terminal showed
    outcome: str  # a sandbox Outcome: 'ok', 'user_error', 'invalid_submission'...
    reward: float
    score: float | None = None  # the grader's, sign as the metric has it; None without a valid submission
    step: int = 0  # the training step that made it
