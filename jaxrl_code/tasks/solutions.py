"""Earlier solutions of each task, from which the self-improvement prompts draw (arXiv 2509.01684, section 4.3)."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

EVICTIONS = ("oldest", "worst")
CHOICES = ("uniform", "reward")


@dataclasses.dataclass(frozen=True)
class Solution:
    """A program that was run, and what came of it."""

    program: str
    output: str  # what its terminal showed
    outcome: str  # a sandbox Outcome: 'ok', 'user_error', 'invalid_submission'...
    reward: float
    score: float | None = None  # the grader's, sign as the metric has it; None without a valid submission
    step: int = 0  # the training step that made it

    @property
    def valid(self) -> bool:
        return self.score is not None  # 0.0 is a score


class SolutionBuffer:
    """At most `capacity` solutions a task, in order of arrival; `failed_share` bounds those without a valid submission.

    It bounds them twice: in what is kept, so that failures never crowd out what works, and in what is chosen.
    """

    def __init__(
        self,
        capacity: int,
        *,
        evict: str = "oldest",
        choice: str = "reward",
        failed_share: float = 0.2,
        output_chars: int = 4000,
    ) -> None:
        if capacity < 1:
            raise ValueError(f"buffer.capacity: {capacity} keeps nothing; use 1 or more")
        if evict not in EVICTIONS:
            raise ValueError(f"buffer.evict: no {evict!r}; use one of {EVICTIONS}")
        if choice not in CHOICES:
            raise ValueError(f"buffer.choice: no {choice!r}; use one of {CHOICES}")
        if not 0 <= failed_share <= 1:
            raise ValueError(f"buffer.failed_share: {failed_share} is no share; use 0 to 1")
        self.capacity = capacity
        self.evict = evict
        self.choice = choice
        self.failed_share = failed_share
        self.output_chars = output_chars  # of the terminal output, head and tail: checkpoints hold it
        self._tasks: dict[str, list[Solution]] = {}

    def __len__(self) -> int:
        return sum(len(solutions) for solutions in self._tasks.values())

    def solutions(self, task_id: str) -> tuple[Solution, ...]:
        """Oldest first."""
        return tuple(self._tasks.get(task_id, ()))

    def best(self, task_id: str) -> Solution | None:
        """The valid solution of highest reward, the earliest of equals."""
        return max((s for s in self.solutions(task_id) if s.valid), key=lambda s: s.reward, default=None)

    def add(self, task_id: str, solution: Solution) -> None:
        """Keeps a solution, in place of one with the same program if there is one, and evicts what is too much."""
        half = self.output_chars // 2
        if len(solution.output) > 2 * half:
            output = f"{solution.output[:half]}\n...\n{solution.output[len(solution.output) - half :]}"
            solution = dataclasses.replace(solution, output=output)
        kept = [s for s in self._tasks.get(task_id, ()) if s.program != solution.program]
        kept.append(solution)
        failed = [s for s in kept if not s.valid]
        if len(failed) > int(self.capacity * self.failed_share):
            kept.remove(self._victim(failed))
        if len(kept) > self.capacity:
            kept.remove(self._victim(kept))
        if kept:
            self._tasks[task_id] = kept

    def choose(self, task_id: str, rng: np.random.Generator) -> Solution | None:
        """A parent to revise, or None when the draw finds none of its kind: then ask for a fresh solution.

        A failed one with probability failed_share, else a valid one. 'reward' weights by rank (the worst of n counts 1,
        the best n, equals the same), which no scale of scores can make greedy or blind.
        """
        solutions = self._tasks.get(task_id, ())
        want_valid = bool(rng.random() >= self.failed_share)
        pool = [s for s in solutions if s.valid == want_valid]
        if not pool:
            return None
        if self.choice == "uniform":
            return pool[int(rng.integers(len(pool)))]
        rewards = np.array([s.reward for s in pool])
        below = (rewards[:, None] > rewards).sum(axis=1)
        equal = (rewards[:, None] == rewards).sum(axis=1)
        ranks = below + (equal + 1) / 2
        return pool[int(rng.choice(len(pool), p=ranks / ranks.sum()))]

    def state_dict(self) -> dict[str, list[dict[str, Any]]]:
        """Everything that choices depend on, as plain JSON."""
        return {task: [dataclasses.asdict(s) for s in solutions] for task, solutions in self._tasks.items()}

    def load_state_dict(self, state: dict[str, list[dict[str, Any]]]) -> None:
        self._tasks = {task: [Solution(**fields) for fields in solutions] for task, solutions in state.items()}

    def _victim(self, solutions: list[Solution]) -> Solution:
        """'oldest': the first that came; 'worst': the lowest reward, the oldest of equals."""
        return solutions[0] if self.evict == "oldest" else min(solutions, key=lambda s: s.reward)
