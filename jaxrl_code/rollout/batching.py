"""Episodes to one right-padded Batch of a few static shapes. Masks come from the turns, never from token values."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from jaxrl_code.types import Batch, Episode, Turn


def make_batch(
    episodes: Sequence[Episode], buckets: Sequence[int], rows: int, pad_id: int
) -> tuple[Batch, dict[str, float]]:
    """A Batch of numpy arrays [rows, T] and its statistics; T is the shortest of `buckets` that holds every episode.

    Row b holds episodes[b]. Masked episodes and rows beyond the last episode are wholly invalid, so that the shape
    doesn't depend on how many rollouts survived.
    """
    if len(episodes) > rows:
        raise ValueError(f"{len(episodes)} episodes do not fit a batch of rows={rows}; raise rows or pass fewer")
    if not buckets or any(b <= 0 for b in buckets) or list(buckets) != sorted(set(buckets)):
        raise ValueError(f"buckets={tuple(buckets)} must be positive lengths in increasing order")
    for episode in episodes:
        _check(episode)
    kept = [(b, episode) for b, episode in enumerate(episodes) if not episode.masked]
    lengths = {b: sum(len(t.prompt_ids) + len(t.action_ids) for t in episode.turns) for b, episode in kept}
    longest = max(lengths.values(), default=0)
    if longest > buckets[-1]:
        task_id = next(episode.task_id for b, episode in kept if lengths[b] == longest)
        raise ValueError(
            f"episode of task {task_id!r} has {longest} tokens, the largest bucket holds {buckets[-1]}: "
            "raise buckets or lower the prompt and response lengths"
        )
    time = next(bucket for bucket in buckets if bucket >= longest)

    tokens_BT = np.full((rows, time), pad_id, np.int32)
    valid_BT, action_BT, turn_end_BT = (np.zeros((rows, time), bool) for _ in range(3))
    old_logp_BT, reward_BT, duration_BT = (np.zeros((rows, time), np.float32) for _ in range(3))
    truncated_B = np.zeros(rows, bool)
    for b, episode in kept:
        truncated_B[b] = episode.truncated
        start = 0
        for turn in episode.turns:
            action = start + len(turn.prompt_ids)
            end = action + len(turn.action_ids)
            tokens_BT[b, start:action] = turn.prompt_ids
            tokens_BT[b, action:end] = turn.action_ids
            valid_BT[b, start:end] = True
            action_BT[b, action:end] = True
            old_logp_BT[b, action:end] = turn.action_logp
            duration_BT[b, action:end] = turn.duration_s
            reward_BT[b, end - 1] = turn.reward
            turn_end_BT[b, end - 1] = True
            start = end
    arrays: dict[str, Any] = {  # numpy: the trainer decides when and where they go to a device
        "tokens_BT": tokens_BT,
        "valid_BT": valid_BT,
        "action_BT": action_BT,
        "old_logp_BT": old_logp_BT,
        "reward_BT": reward_BT,
        "turn_end_BT": turn_end_BT,
        "duration_BT": duration_BT,
        "truncated_B": truncated_B,
    }

    tokens, actions = int(valid_BT.sum()), int(action_BT.sum())
    n = max(len(kept), 1)
    stats = {
        "rollout/episodes": float(len(kept)),
        "rollout/masked": float(len(episodes) - len(kept)),
        "rollout/turns": float(sum(len(episode.turns) for _, episode in kept)),
        "rollout/tokens": float(tokens),
        "rollout/action_tokens": float(actions),
        "rollout/action_tokens_mean": actions / n,
        "rollout/prompt_tokens_mean": (tokens - actions) / n,
        "rollout/padding_share": 1.0 - tokens / (rows * time),
    }
    return Batch(**arrays), stats


def _check(episode: Episode) -> None:
    """ValueError for what would silently poison a batch."""
    name = f"episode of task {episode.task_id!r}"
    if episode.masked:
        return
    if not episode.turns or not len(episode.turns[0].prompt_ids):
        raise ValueError(f"{name} has no prompt: the first sampled token needs a token before it; mask the episode")
    for turn in episode.turns:
        _check_turn(name, turn)


def _check_turn(name: str, turn: Turn) -> None:
    if not len(turn.action_ids):
        raise ValueError(f"{name} has a turn without sampled tokens, so its reward has no place; mask the episode")
    if len(turn.action_logp) != len(turn.action_ids):
        raise ValueError(f"{name}: {len(turn.action_ids)} action_ids but {len(turn.action_logp)} action_logp")
    if not math.isfinite(turn.reward):
        raise ValueError(f"{name}: reward={turn.reward} is not finite; mask the episode or mend the reward")
    if not (math.isfinite(turn.duration_s) and turn.duration_s >= 0):
        raise ValueError(f"{name}: duration_s={turn.duration_s} must be finite and not negative")
