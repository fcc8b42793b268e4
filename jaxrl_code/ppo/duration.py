"""Duration-aware gradients: what the execution time of an action does to its advantage.

Asynchronous actors finish action x about pi(x) / dt_x times in a given window, so fast actions dominate the gradient.
Weighting each by its duration cancels that (arXiv 2509.01684, `linear`). A synchronous batch has no such bias (`none`).
`inverse_log` goes the other way and favours fast actions; `reward_rate` charges each second its price in reward.

Means are over actions (turns), never over tokens: a long program is one action.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from flax import struct

from jaxrl_code.ppo.advantages import masked_mean

MODES = ("none", "linear", "inverse_log", "reward_rate")


@struct.dataclass
class RateState:
    """The reward rates (reward a second) of the last N batches, newest last; only the last `count` are real."""

    rates_N: jax.Array
    count: jax.Array

    @classmethod
    def init(cls, length: int) -> RateState:
        return cls(rates_N=jnp.zeros(length, jnp.float32), count=jnp.zeros((), jnp.int32))


def reward_rate(rates: RateState, percentile: float | jax.Array) -> jax.Array:
    """The price rho of a second: a high percentile of recent rates, never negative, 0 before the first batch.

    Negative it would pay for being slow, which is what early batches full of failures ask for.
    """
    length = rates.rates_N.shape[0]
    known_N = jnp.arange(length) >= length - rates.count
    rho = jnp.nanpercentile(jnp.where(known_N, rates.rates_N, jnp.nan), percentile)
    return jnp.where(rates.count > 0, jnp.maximum(rho, 0.0), 0.0)


@functools.partial(jax.jit, static_argnames="mode")
def duration_aware(
    mode: str,
    reward_BT: jax.Array,
    duration_BT: jax.Array,
    turn_end_BT: jax.Array,
    action_BT: jax.Array,
    rates: RateState,
    floor_s: float | jax.Array,
    cap: float | jax.Array,
    percentile: float | jax.Array,
) -> tuple[jax.Array, jax.Array, RateState, dict[str, jax.Array]]:
    """Returns (reward_BT, weight_BT, rates, info): multiply the advantages of `reward_BT` by `weight_BT`.

    Durations are in seconds, raised to floor_s and cut at `cap` times their mean over actions (inf: no cut). Weights
    have mean 1 over the actions of the batch and are 0 off action tokens.

        linear       w = dt / mean(dt)
        inverse_log  w = 1 / log(1 + dt), rescaled to mean 1
        reward_rate  r' = r - rho * dt on the last token of an action, w = 1

    rho comes from earlier batches only: a price that depends on the batch that it judges is no baseline.
    """
    if mode not in MODES:
        raise ValueError(f"duration.mode={mode!r} is none of {MODES}")
    dt_BT = jnp.maximum(jnp.where(action_BT, duration_BT, 1.0), floor_s)
    dt_BT = jnp.minimum(dt_BT, cap * masked_mean(dt_BT, turn_end_BT))
    mean_dt = masked_mean(dt_BT, turn_end_BT)
    rho = reward_rate(rates, percentile)

    raw_BT = jnp.ones_like(dt_BT)
    if mode == "linear":
        raw_BT = dt_BT
    elif mode == "inverse_log":
        raw_BT = 1.0 / jnp.log1p(dt_BT)
    # A batch without actions has mean 0; its weights are masked anyway.
    mean_raw = masked_mean(raw_BT, turn_end_BT)
    weight_BT = jnp.where(action_BT, raw_BT / jnp.where(mean_raw > 0, mean_raw, 1.0), 0.0)

    own_BT = jnp.where(action_BT, reward_BT, 0.0)
    price_BT = jnp.where(turn_end_BT, rho * dt_BT, 0.0) if mode == "reward_rate" else 0.0

    some = turn_end_BT.any()
    rate = own_BT.sum() / jnp.where(some, jnp.where(turn_end_BT, dt_BT, 0.0).sum(), 1.0)
    pushed = RateState(
        rates_N=jnp.concatenate([rates.rates_N[1:], rate[None]]),
        count=jnp.minimum(rates.count + 1, rates.rates_N.shape[0]),
    )
    rates = jax.tree.map(lambda new, old: jnp.where(some, new, old), pushed, rates)
    info = {
        "rollout/duration_clipped_mean_s": mean_dt,
        "rollout/duration_weight_max": weight_BT.max(),
        "rollout/reward_per_s": rate,
        "rollout/reward_rate_price": rho,
    }
    return own_BT - price_BT, weight_BT, rates, info
