"""One loss, one small pure function that returns (loss, info).

Each is a sum over the true slots of `mask` divided by `count`, which the caller takes over the whole batch of one
optimizer step: then the gradients and infos of its micro-batches, in any split, add up to those of the whole.
Inputs are replaced at masked slots before anything is computed, so that a NaN there reaches neither the value nor the
gradient.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

Info = dict[str, jax.Array]
Scalar = float | jax.Array

MAX_LOG_RATIO = 20.0  # exp of it is still finite in float32; beyond it the backward pass of exp gives inf * 0


def _mean(x: jax.Array, mask: jax.Array, count: Scalar) -> jax.Array:
    return jnp.where(mask, x, 0.0).sum() / count


def fill_unknown(old_logp: jax.Array, logp: jax.Array) -> jax.Array:
    """Puts the detached logp where old_logp is not finite (vLLM reports some near-certain tokens so): ratio 1."""
    return jnp.where(jnp.isfinite(old_logp), old_logp, jax.lax.stop_gradient(logp))


def policy_loss(
    logp: jax.Array,
    old_logp: jax.Array,
    adv: jax.Array,
    mask: jax.Array,
    count: Scalar,
    clip_low: Scalar,
    clip_high: Scalar,
    weight: jax.Array | None = None,
) -> tuple[jax.Array, Info]:
    """PPO's clipped surrogate: -mean(weight * min(ratio * adv, clip(ratio, 1 - clip_low, 1 + clip_high) * adv)).

    `old_logp` is what the ratio is taken against (the proximal policy); `weight`, if given, corrects a behaviour
    policy that differs from it (`behaviour_weight`).
    """
    logp, adv = jnp.where(mask, logp, 0.0), jnp.where(mask, adv, 0.0)
    old_logp = fill_unknown(jnp.where(mask, old_logp, 0.0), logp)
    log_ratio = jnp.clip(logp - old_logp, -MAX_LOG_RATIO, MAX_LOG_RATIO)
    ratio = jnp.exp(log_ratio)
    plain = ratio * adv
    clipped = jnp.clip(ratio, 1.0 - clip_low, 1.0 + clip_high) * adv
    gain = jnp.minimum(plain, clipped)
    if weight is not None:
        gain = gain * jnp.where(mask, weight, 0.0)
    loss = -_mean(gain, mask, count)
    return loss, {
        "actor/policy_loss": loss,
        "actor/clip_frac": _mean(clipped < plain, mask, count),
        "actor/ratio_mean": _mean(ratio, mask, count),
        "actor/kl_old": _mean(ratio - 1.0 - log_ratio, mask, count),
    }


def behaviour_weight(prox_logp: jax.Array, old_logp: jax.Array, mask: jax.Array, cap: Scalar) -> jax.Array:
    """min(pi_prox / pi_behaviour, cap), the weight of decoupled PPO (arXiv 2505.24298); 1 where unknown."""
    prox_logp = jnp.where(mask, prox_logp, 0.0)
    log_ratio = prox_logp - fill_unknown(jnp.where(mask, old_logp, 0.0), prox_logp)
    return jnp.where(mask, jnp.minimum(jnp.exp(jnp.clip(log_ratio, -MAX_LOG_RATIO, MAX_LOG_RATIO)), cap), 0.0)


def value_loss(
    value: jax.Array, old_value: jax.Array, ret: jax.Array, mask: jax.Array, count: Scalar, clip: Scalar
) -> tuple[jax.Array, Info]:
    """Half squared error, the worse of value and value held within `clip` of old_value (inf: plain regression)."""
    value, old_value, ret = (jnp.where(mask, x, 0.0) for x in (value, old_value, ret))
    held = old_value + jnp.clip(value - old_value, -clip, clip)
    plain, clipped = (value - ret) ** 2, (held - ret) ** 2
    loss = 0.5 * _mean(jnp.maximum(plain, clipped), mask, count)
    return loss, {
        "critic/value_loss": loss,
        "critic/clip_frac": _mean(clipped > plain, mask, count),
    }


def entropy_loss(entropy: jax.Array, mask: jax.Array, count: Scalar) -> tuple[jax.Array, Info]:
    """Minus the mean entropy in nats, to be multiplied by its coefficient."""
    mean = _mean(entropy, mask, count)
    return -mean, {"actor/entropy": mean}


def kl_loss(logp: jax.Array, ref_logp: jax.Array, mask: jax.Array, count: Scalar) -> tuple[jax.Array, Info]:
    """KL(policy || reference) by the k3 estimator, exp(d) - d - 1 with d = ref - logp; non-negative, has a gradient."""
    delta = jnp.clip(jnp.where(mask, ref_logp, 0.0) - jnp.where(mask, logp, 0.0), -MAX_LOG_RATIO, MAX_LOG_RATIO)
    kl = _mean(jnp.exp(delta) - delta - 1.0, mask, count)
    return kl, {"actor/kl_ref": kl}


def mismatch(logp: jax.Array, old_logp: jax.Array, mask: jax.Array) -> Info:
    """How far the trainer's log-probs of sampled tokens are from the sampler's, in nats; unknown ones are counted."""
    unknown = mask & ~jnp.isfinite(old_logp)
    known = mask & ~unknown
    count = jnp.maximum(known.sum(), 1)
    delta = jnp.where(known, logp, 0.0) - jnp.where(known, old_logp, 0.0)
    bounded = jnp.clip(delta, -MAX_LOG_RATIO, MAX_LOG_RATIO)
    return {
        "rollout/logp_diff_mean": jnp.abs(delta).sum() / count,
        "rollout/logp_diff_max": jnp.abs(delta).max(),
        "rollout/logp_diff_k3": (jnp.exp(bounded) - bounded - 1.0).sum() / count,
        "rollout/logp_unknown": unknown.sum(),
    }
