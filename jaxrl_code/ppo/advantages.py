"""Advantages over the policy's own tokens.

GAE runs on the compressed sequence of actions: a token that the policy did not sample is no step, so it neither
decays anything nor lends its value. Every function gives the same result whatever stands at masked slots, NaN included.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp


@jax.jit
def gae(
    reward_BT: jax.Array,
    value_BT: jax.Array,
    last_value_B: jax.Array,
    action_BT: jax.Array,
    truncated_B: jax.Array,
    gamma: float | jax.Array,
    lam: float | jax.Array,
) -> tuple[jax.Array, jax.Array]:
    """Generalised advantages and returns (arXiv 1506.02438), both [B, T], zero off actions.

    value_BT[b, t] is the critic's value of the state before token t. last_value_B is its value of the state after the
    last token of the episode: the bootstrap of a truncated episode, and not read for a terminated one, whose future
    is worth 0. With a_1..a_n the action slots of a row in order:

        delta_i = r_i + gamma * v_{i+1} - v_i,    v_{n+1} = last_value if truncated else 0
        adv_i = delta_i + gamma * lam * adv_{i+1},    ret_i = adv_i + v_i
    """
    reward_BT = jnp.where(action_BT, reward_BT, 0.0).astype(jnp.float32)
    value_BT = jnp.where(action_BT, value_BT, 0.0).astype(jnp.float32)
    after_B = jnp.where(truncated_B, last_value_B, 0.0).astype(jnp.float32)

    def step(carry: tuple[jax.Array, jax.Array], slot: tuple[jax.Array, ...]) -> tuple[tuple, jax.Array]:
        next_value_B, next_adv_B = carry
        reward_B, value_B, action_B = slot
        adv_B = reward_B + gamma * next_value_B - value_B + gamma * lam * next_adv_B
        carry = jnp.where(action_B, value_B, next_value_B), jnp.where(action_B, adv_B, next_adv_B)
        return carry, jnp.where(action_B, adv_B, 0.0)

    slots = (reward_BT.T, value_BT.T, action_BT.T)
    _, adv_TB = jax.lax.scan(step, (after_B, jnp.zeros_like(after_B)), slots, reverse=True)
    return adv_TB.T, adv_TB.T + value_BT


def masked_mean(x: jax.Array, mask: jax.Array) -> jax.Array:
    """Mean over the true slots of mask, 0 if there are none; safe to differentiate."""
    return jnp.where(mask, x, 0.0).sum() / jnp.maximum(mask.sum(), 1)


@jax.jit
def whiten(x_BT: jax.Array, mask_BT: jax.Array) -> jax.Array:
    """Mean 0 and variance 1 over all true slots of the batch, zero elsewhere.

    The variance is the biased one, so a single slot gives 0 and not NaN; the 1e-6 keeps the rounding noise of equal
    values from being blown up to advantages.
    """
    centred_BT = x_BT - masked_mean(x_BT, mask_BT)
    scale = jax.lax.rsqrt(masked_mean(centred_BT**2, mask_BT) + 1e-6)
    return jnp.where(mask_BT, centred_BT * scale, 0.0)
