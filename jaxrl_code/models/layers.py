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


def attention(
    q_BTNH: jax.Array,
    new: tuple[jax.Array, jax.Array, jax.Array],
    cached: tuple[jax.Array, jax.Array, jax.Array] | None = None,
) -> jax.Array:
    """Grouped-query attention over new keys and those of a cache at once -> [B, T, N, H].

    `new` is (k_BTKH, v_BTKH, mask_BTT) and `cached` (k_BKHS, v_BKSH, mask_BTS), the mask true where a query may look;
    one softmax runs over both, so that a cache is attended where it lies and never copied beside the new keys.
    """
    B, T, N, H = q_BTNH.shape
    k_BTKH, v_BTKH, mask_BTT = new
    K = k_BTKH.shape[2]
    one_device = jax.sharding.get_abstract_mesh().size <= 1
    if T > 1 and one_device and jax.default_backend() == "cpu":
        if cached is None:
            return attention_by_head(q_BTNH, *new)
        k_BSKH = jnp.concatenate([cached[0].transpose(0, 3, 1, 2), k_BTKH], axis=1)
        v_BSKH = jnp.concatenate([cached[1].transpose(0, 2, 1, 3), v_BTKH], axis=1)
        return attention_by_head(q_BTNH, k_BSKH, v_BSKH, jnp.concatenate([cached[2], mask_BTT], axis=-1))
    # One axis X for all queries of a kv head, then plain batched products over [B, K]: XLA's CPU emitter makes copies
    # of the whole cache for any other form.
    q_BKXH = q_BTNH.reshape(B, T, K, N // K, H).transpose(0, 2, 1, 3, 4).reshape(B, K, -1, H)

    def scores(subscripts: str, k: jax.Array, mask: jax.Array) -> jax.Array:
        products = jnp.einsum(subscripts, q_BKXH, k, preferred_element_type=jnp.float32) * H**-0.5
        return jnp.where(jnp.repeat(mask, N // K, axis=1)[:, None], products, MASKED)

    scores_BKXS = scores("BKXH,BSKH->BKXS", k_BTKH, mask_BTT)
    if cached is not None:
        scores_BKXS = jnp.concatenate([scores("BKXH,BKHS->BKXS", cached[0], cached[2]), scores_BKXS], axis=-1)
    weights_BKXS = jax.nn.softmax(scores_BKXS, axis=-1).astype(q_BTNH.dtype)
    out_BKXH = jnp.einsum("BKXS,BSKH->BKXH", weights_BKXS[..., -v_BTKH.shape[1] :], v_BTKH)
    if cached is not None:
        out_BKXH += jnp.einsum("BKXS,BKSH->BKXH", weights_BKXS[..., : -v_BTKH.shape[1]], cached[1])
    return out_BKXH.reshape(B, K, T, N // K, H).transpose(0, 2, 1, 3, 4).reshape(B, T, N, H)


def attention_by_head(q_BTNH: jax.Array, k_BSKH: jax.Array, v_BSKH: jax.Array, mask_BTS: jax.Array) -> jax.Array:
    """`attention` over all stores as one, a row and a head at a time.

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
