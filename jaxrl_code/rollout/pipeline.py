"""Fills a synchronous step: chooses prompts, plays all episodes at once, keeps what the programs taught."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np

from jaxrl_code.rollout.episode import Attempt, World, play
from jaxrl_code.tasks.competition import Competition
from jaxrl_code.tasks.prompts import PromptLimits, fresh_messages, improve_messages
from jaxrl_code.tasks.solutions import Solution, SolutionBuffer
from jaxrl_code.types import Episode


@dataclasses.dataclass
class Pipeline:
    """Everything random here is drawn from (seed, step), so that a resumed run repeats an uninterrupted one."""

    world: World
    tasks: Sequence[Competition]
    buffer: SolutionBuffer
    prompt_limits: PromptLimits
    prompt_tokens: int
    improve_share: float
    seed: int
    cursor: int = 0  # the task that the next step begins with

    async def collect(self, step: int, count: int) -> list[Episode]:
        """`count` episodes in the order in which they were chosen, whatever the order in which they ended."""
        rng = np.random.default_rng((self.seed, step))
        attempts = [self._attempt(rng, step, self.tasks[(self.cursor + i) % len(self.tasks)], i) for i in range(count)]
        self.cursor = (self.cursor + count) % len(self.tasks)
        episodes = await play_all(self.world, attempts)
        for episode in episodes:
            if not episode.masked and episode.info["program"] is not None:
                self.buffer.add(episode.task_id, _solution(episode, step))
        return episodes

    def _attempt(self, rng: np.random.Generator, step: int, task: Competition, index: int) -> Attempt:
        parent = self.buffer.choose(task.id, rng) if rng.random() < self.improve_share else None
        seed = int(rng.integers(2**31))
        run_id = f"{step:05d}-{index:04d}"
        if parent is not None:
            ids = self.world.tokenizer.encode_chat(improve_messages(task, parent, self.prompt_limits))
            if len(ids) <= self.prompt_tokens:  # else the parent is too long to show: ask afresh
                return Attempt(run_id, task, "improve", ids, seed, parent)
        return fresh_attempt(self.world, task, run_id, seed, self.prompt_limits)

    def state_dict(self) -> dict[str, Any]:
        return {"cursor": self.cursor, "buffer": self.buffer.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.cursor = state["cursor"]
        self.buffer.load_state_dict(state["buffer"])


async def play_all(world: World, attempts: Sequence[Attempt]) -> list[Episode]:
    """All at once: sampling, running and grading of different episodes overlap. The first fault cancels the rest."""
    async with asyncio.TaskGroup() as group:
        games = [group.create_task(play(world, attempt)) for attempt in attempts]
    return [game.result() for game in games]


def fresh_attempt(world: World, task: Competition, run_id: str, seed: int, limits: PromptLimits) -> Attempt:
    return Attempt(run_id, task, "fresh", world.tokenizer.encode_chat(fresh_messages(task, limits)), seed)


def _solution(episode: Episode, step: int) -> Solution:
    info = episode.info
    return Solution(info["program"], info["output"], info["outcome"], episode.reward, info["score"], step)
