"""Shape legend and the structs that everything passes around.

Arrays of rank two and more carry their shape in their name:

    B sequences    T query time   S key time     D model width   F feed-forward width   N query heads   K kv heads
    G = N / K      H head width   V vocabulary   L layers        C turns

Everything indexed by T is aligned with the *token*: `x_BT[b, t]` belongs to token t. So `logp_BT[b, t]` is the
log-probability of token t given the tokens before it (it comes from the logits at t - 1, and is 0 at t = 0), and
`value_BT[b, t]` is the critic's estimate of the state *before* token t was chosen.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import numpy as np
from flax import struct

Params = dict[str, Any]  # nested dict of arrays, layers stacked along axis 0


@dataclasses.dataclass(frozen=True)
class Turn:
    """What the policy read, what it wrote, and what came of it.

    prompt_ids [P] are the tokens that the policy read and did not sample since its last action; action_ids [A] are
    exactly the tokens that it sampled, the stop token included. Text is never tokenised again.
    """

    prompt_ids: np.ndarray  # int32 [P]
    action_ids: np.ndarray  # int32 [A]
    action_logp: np.ndarray  # float32 [A], the sampler's, at the sampling temperature
    stop_reason: str  # 'stop' or 'length'
    policy_version: int
    reward: float = 0.0
    reward_parts: dict[str, float] = dataclasses.field(default_factory=dict)
    duration_s: float = 0.0  # execution time of the action; never queueing or box start


@dataclasses.dataclass(frozen=True)
class Episode:
    """Turns on one task. `truncated`: it was cut short by us (bootstrap), not ended by the environment."""

    task_id: str
    kind: str  # 'fresh' or 'improve'
    turns: tuple[Turn, ...]
    truncated: bool = False
    masked: bool = False  # an infra fault: in the metrics, never in the loss
    info: dict[str, Any] = dataclasses.field(default_factory=dict)  # program, output, outcome, score... for people

    @property
    def reward(self) -> float:
        return float(sum(turn.reward for turn in self.turns))


@struct.dataclass
class Batch:
    """Episodes as right-padded arrays. `action_BT` is the one truth about what the policy sampled."""

    tokens_BT: jax.Array  # int32
    valid_BT: jax.Array  # bool, false on padding
    action_BT: jax.Array  # bool, true on tokens that the policy sampled and that are trained on
    old_logp_BT: jax.Array  # float32, the sampler's; 0 off actions
    reward_BT: jax.Array  # float32, a turn's reward on its last action token
    turn_end_BT: jax.Array  # bool, the last action token of each turn
    duration_BT: jax.Array  # float32, seconds of the turn that an action token belongs to; 0 off actions
    truncated_B: jax.Array  # bool
