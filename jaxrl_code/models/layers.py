"""The arithmetic of a decoder layer as plain functions: norm, rotary positions, attention, SwiGLU.

Norms, rotary tables and softmax are computed in float32 whatever the compute dtype is.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

MASKED = -1e30  # finite: a row with nothing to attend to gives a uniform average, never NaN


def rms_norm(x: jax.Array, scale_D: jax.Array, eps: float) -> jax.Array:
    """x / rms(x) * scale over the last axis (https://arxiv.org/abs/1910.07467); returns x's dtype."""
    x32 = x.astype(jnp.float32)
    x32 = x32 * jax.lax.rsqrt(jnp.mean(jnp.square(x32), axis=-1, keepdims=True) + eps)
    return (x32 * scale_D.astype(jnp.float32)).astype(x.dtype)


def rope_tables(positions_BT: jax.Array, head_dim: int, theta: float) -> tuple[jax.Array, jax.Array]:
    """Float32 cos and sin [B, T, 1, H/2] of position * theta^(-2i/H) (https://arxiv.org/abs/2104.09864)."""
    frequency = theta ** (-jnp.arange(0, head_dim, 2, dtype=jnp.float32) / head_dim)
    angle = positions_BT.astype(jnp.float32)[:, :, None, None] * frequency
    return jnp.cos(angle), jnp.sin(angle)


def apply_rope(x_BTNH: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
    """Rotate the pairs (i, i + H/2), the pairing of the Hugging Face weights."""
    first, second = jnp.split(x_BTNH.astype(jnp.float32), 2, axis=-1)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1).astype(x_BTNH.dtype)


def attention(q_BTNH: jax.Array, keys_values: tuple[tuple[jax.Array, jax.Array, jax.Array], ...]) -> jax.Array:
    """Grouped-query attention over several stores of keys at once -> [B, T, N, H].

    A store is (k_BSKH, v_BSKH, mask_BTS, true where a query may look); the softmax runs over all of them together, so
    that a cache is attended where it lies and never copied beside the new keys.
    """
    B, T, N, H = q_BTNH.shape
    K = keys_values[0][0].shape[2]
    one_device = jax.sharding.get_abstract_mesh().size <= 1
    if T > 1 and len(keys_values) == 1 and one_device and jax.default_backend() == "cpu":
        return attention_by_head(q_BTNH, *keys_values[0])
    q_BTKGH = q_BTNH.reshape(B, T, K, N // K, H)
    scores = [
        jnp.where(
            mask_BTS[:, None, None],
            jnp.einsum("BTKGH,BSKH->BKGTS", q_BTKGH, k_BSKH, preferred_element_type=jnp.float32) * H**-0.5,
            MASKED,
        )
        for k_BSKH, _, mask_BTS in keys_values
    ]
    weights_BKGTS = jax.nn.softmax(jnp.concatenate(scores, axis=-1), axis=-1).astype(q_BTNH.dtype)
    out_BTKGH, start = jnp.zeros((), q_BTNH.dtype), 0
    for _, v_BSKH, _ in keys_values:
        stop = start + v_BSKH.shape[1]
        out_BTKGH += jnp.einsum("BKGTS,BSKH->BTKGH", weights_BKGTS[..., start:stop], v_BSKH)
        start = stop
    return out_BTKGH.reshape(B, T, N, H)


def attention_by_head(q_BTNH: jax.Array, k_BSKH: jax.Array, v_BSKH: jax.Array, mask_BTS: jax.Array) -> jax.Array:
    """`attention` over one store, a row and a head at a time.

    For CPUs: XLA's batched products there are several times slower than plain ones, and the scores of one head stay in
    the processor's cache, forward and (recomputed) backward.
    """
    N, H = q_BTNH.shape[2:]
    groups = N // k_BSKH.shape[2]

    @jax.checkpoint
    def head(q_TH: jax.Array, k_SH: jax.Array, v_SH: jax.Array, mask_TS: jax.Array) -> jax.Array:
        scores_TS = jnp.einsum("TH,SH->TS", q_TH, k_SH, preferred_element_type=jnp.float32) * H**-0.5
        scores_TS = jnp.where(mask_TS, scores_TS, MASKED)
        weights_TS = jnp.exp(scores_TS - jax.lax.stop_gradient(scores_TS.max(axis=-1, keepdims=True)))
        out_TH = jnp.einsum("TS,SH->TH", weights_TS.astype(q_TH.dtype), v_SH, preferred_element_type=jnp.float32)
        return (out_TH / weights_TS.sum(axis=-1, keepdims=True)).astype(q_TH.dtype)

    def row(arrays: tuple[jax.Array, ...]) -> jax.Array:
        q_NTH, k_NSH, v_NSH, mask_TS = arrays
        return jax.lax.map(lambda qkv: head(*qkv, mask_TS), (q_NTH, k_NSH, v_NSH))

    k_BSNH, v_BSNH = jnp.repeat(k_BSKH, groups, axis=2), jnp.repeat(v_BSKH, groups, axis=2)
    out_BNTH = jax.lax.map(row, (*(x.swapaxes(1, 2) for x in (q_BTNH, k_BSNH, v_BSNH)), mask_BTS))
    return out_BNTH.swapaxes(1, 2)


def swiglu(x_BTD: jax.Array, gate_DF: jax.Array, up_DF: jax.Array, down_FD: jax.Array) -> jax.Array:
    """(silu(x gate) * x up) down (https://arxiv.org/abs/2002.05202)."""
    # One row axis: the weight gradients then are plain matrix products, three times faster on a CPU.
    x_RD = x_BTD.reshape(-1, x_BTD.shape[-1])
    hidden_RF = jax.nn.silu(jnp.einsum("RD,DF->RF", x_RD, gate_DF)) * jnp.einsum("RD,DF->RF", x_RD, up_DF)
    return jnp.einsum("RF,FD->RD", hidden_RF, down_FD).reshape(x_BTD.shape)
