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
    _check_temperature(temperature)
    B, T, D = hidden_BTD.shape
    steps = max(1, min(T, chunk // B))  # cut along T, so that rows stay on the devices that hold them
    chunks = -(-T // steps)
    padding = chunks * steps - T
    previous_BTD = jnp.pad(hidden_BTD[:, :-1], ((0, 0), (1, padding), (0, 0)))
    padded_BT = jnp.pad(tokens_BT, ((0, 0), (0, padding)))

    @jax.checkpoint
    def one_chunk(args: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        hidden, tokens = args
        return logp_and_entropy(model.logits(params, hidden), tokens, temperature)

    pieces = (
        previous_BTD.reshape(B, chunks, steps, D).swapaxes(0, 1),
        padded_BT.reshape(B, chunks, steps).swapaxes(0, 1),
    )
    logp, entropy = jax.lax.map(one_chunk, pieces)
    has_past_T = jnp.arange(T) > 0

    def align(x: jax.Array) -> jax.Array:
        return jnp.where(has_past_T, x.swapaxes(0, 1).reshape(B, chunks * steps)[:, :T], 0.0)

    return align(logp), align(entropy)


def _check_temperature(temperature: float | jax.Array) -> None:
    if isinstance(temperature, int | float) and temperature <= 0:
        raise ValueError(f"temperature = {temperature} must be above 0 (greedy sampling has no log-probs to train on)")
