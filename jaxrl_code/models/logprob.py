"""Log-probability of each token and entropy of its distribution, in float32, without [B, T, V] ever existing."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jaxrl_code.models.qwen2 import Model
from jaxrl_code.types import Params

FLOOR = -1e30  # a logit of -inf (a forbidden token) becomes this, so that 0 * log 0 and its gradient are 0, not NaN


def logp_and_entropy(
    logits: jax.Array, tokens: jax.Array, temperature: float | jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Of softmax(logits / temperature): log-prob of `tokens` [...] and entropy [...] in nats, from logits [..., V]."""
    _check_temperature(temperature)
    scaled = jnp.maximum(logits.astype(jnp.float32) / temperature, FLOOR)
    scaled -= jax.lax.stop_gradient(scaled.max(axis=-1, keepdims=True))
    log_z = jax.nn.logsumexp(scaled, axis=-1)
    # A select and a sum fuse, and need no communication when V is sharded; a gather does.
    chosen = jnp.arange(logits.shape[-1]) == tokens[..., None]
    logp = jnp.where(chosen, scaled, 0.0).sum(axis=-1) - log_z
    entropy = log_z - (jnp.exp(scaled - log_z[..., None]) * scaled).sum(axis=-1)
    return logp, entropy


def token_logp_and_entropy(
    model: Model,
    params: Params,
    hidden_BTD: jax.Array,
    tokens_BT: jax.Array,
    temperature: float | jax.Array,
    *,
    chunk: int = 2048,
) -> tuple[jax.Array, jax.Array]:
    """Log-prob of token t given those before it, and the entropy it was drawn from: both [B, T], 0 at t = 0.

    `chunk` tokens (over all rows) go through the lm head at a time, and again in the backward pass; float32 logits of
    Qwen2.5 take 0.6 MB a token. A value is meaningful where the token before is valid, and finite everywhere.
    """
    previous_BTD = jnp.pad(hidden_BTD[:, :-1], ((0, 0), (1, 0), (0, 0)))
    logp_BT, entropy_BT = _chunked(model, params, previous_BTD, tokens_BT, None, temperature, chunk)
    return logp_BT.at[:, 0].set(0.0), entropy_BT.at[:, 0].set(0.0)


def action_logp_and_entropy(
    model: Model,
    params: Params,
    hidden_BTD: jax.Array,
    tokens_BT: jax.Array,
    action_BT: jax.Array,
    temperature: float | jax.Array,
    *,
    chunk: int = 1024,
) -> tuple[jax.Array, jax.Array]:
    """`token_logp_and_entropy` where action_BT is true (never at t = 0), 0 elsewhere: only actions meet the lm head.

    Each row's actions are moved to its front, and the chunks behind the last one are skipped. Prompts are most of a
    batch, and the head is a good part of a small model and of one with a vocabulary of 150,000.
    """
    action_BT = action_BT & (jnp.arange(tokens_BT.shape[1]) > 0)
    order_BT = jnp.argsort(~action_BT, axis=1, stable=True)
    previous_BTD = jnp.take_along_axis(hidden_BTD, jnp.maximum(order_BT - 1, 0)[..., None], axis=1)
    front_BT, wanted_BT = (jnp.take_along_axis(x, order_BT, axis=1) for x in (tokens_BT, action_BT))
    packed = _chunked(model, params, previous_BTD, front_BT, wanted_BT, temperature, chunk)
    back_BT = jnp.argsort(order_BT, axis=1)
    logp_BT, entropy_BT = (jnp.take_along_axis(x, back_BT, axis=1) for x in packed)
    return logp_BT, entropy_BT


def _chunked(
    model: Model,
    params: Params,
    previous_BTD: jax.Array,
    tokens_BT: jax.Array,
    wanted_BT: jax.Array | None,
    temperature: float | jax.Array,
    chunk: int,
) -> tuple[jax.Array, jax.Array]:
    """Log-probs and entropies from the hidden states beside the tokens; where not wanted 0, whole chunks uncomputed."""
    _check_temperature(temperature)
    B, T = tokens_BT.shape
    steps = max(1, min(T, chunk // B))  # cut along T, so that rows stay on the devices that hold them
    chunks = -(-T // steps)

    def split(x: jax.Array) -> jax.Array:
        x = jnp.pad(x, ((0, 0), (0, chunks * steps - T), *((0, 0) for _ in x.shape[2:])))
        return x.reshape(B, chunks, steps, *x.shape[2:]).swapaxes(0, 1)

    def compute(hidden: jax.Array, tokens: jax.Array) -> tuple[jax.Array, jax.Array]:
        return logp_and_entropy(model.logits(params, hidden), tokens, temperature)

    def skip(hidden: jax.Array, tokens: jax.Array) -> tuple[jax.Array, jax.Array]:
        return jnp.zeros(tokens.shape), jnp.zeros(tokens.shape)

    @jax.checkpoint  # around the branch: inside it, the head's weights would be kept once a chunk
    def one_chunk(args: tuple[jax.Array, ...]) -> tuple[jax.Array, jax.Array]:
        if wanted_BT is None:
            return compute(*args)
        hidden, tokens, wanted = args
        return jax.lax.cond(wanted.any(), compute, skip, hidden, tokens)

    arrays = (previous_BTD, tokens_BT) if wanted_BT is None else (previous_BTD, tokens_BT, wanted_BT)
    outs = jax.lax.map(one_chunk, tuple(split(x) for x in arrays))

    def join(x: jax.Array) -> jax.Array:
        x_BT = x.swapaxes(0, 1).reshape(B, chunks * steps)[:, :T]
        return x_BT if wanted_BT is None else jnp.where(wanted_BT, x_BT, 0.0)

    return join(outs[0]), join(outs[1])


def _check_temperature(temperature: float | jax.Array) -> None:
    if isinstance(temperature, int | float) and temperature <= 0:
        raise ValueError(f"temperature = {temperature} must be above 0 (greedy sampling has no log-probs to train on)")
