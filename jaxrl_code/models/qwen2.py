"""Qwen2 (https://arxiv.org/abs/2407.10671): the trunk in Linen, and `Model`, pure functions of a nested dict of params.

Params, with the layers stacked along axis 0 (value_head instead of lm_head in a critic; no lm_head when tied):

    embed [V, D]    final_norm [D]    lm_head [D, V]    value_head/{kernel [D], bias []}
    layers/attn/{q [L, D, N, H], k, v [L, D, K, H], o [L, N, H, D], q_bias [L, N, H], k_bias, v_bias [L, K, H]}
    layers/mlp/{gate, up [L, D, F], down [L, F, D]}    layers/{attn_norm, mlp_norm} [L, D]
"""

from __future__ import annotations

import dataclasses
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from jaxrl_code.models.cache import KVCache
from jaxrl_code.models.layers import apply_rope, attention, rms_norm, rope_tables, swiglu
from jaxrl_code.sharding import constrain
from jaxrl_code.types import Params

REMAT = {
    "none": None,
    "full": jax.checkpoint_policies.nothing_saveable,  # keep only each layer's input
    "dots": jax.checkpoint_policies.dots_with_no_batch_dims_saveable,  # keep the projections, redo attention
}
HEADS = ("lm", "value")
INIT_STD = 0.02  # Qwen2's initializer_range


@dataclasses.dataclass(frozen=True)
class Qwen2Config:
    vocab_size: int
    width: int
    ffw: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    rope_theta: float = 1e6
    rms_eps: float = 1e-6
    tied: bool = True  # the lm head is the embedding transposed
    max_len: int = 32768
    dtype: str = "float32"  # of the computation; norms, softmax and logits are float32 regardless
    param_dtype: str = "float32"
    remat: str = "none"

    def __post_init__(self) -> None:
        for name in ("vocab_size", "width", "ffw", "layers", "heads", "kv_heads", "head_dim", "max_len"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} = {getattr(self, name)} must be at least 1")
        if self.heads % self.kv_heads:
            raise ValueError(f"heads = {self.heads} must be a multiple of kv_heads = {self.kv_heads}")
        if self.head_dim % 2:
            raise ValueError(f"head_dim = {self.head_dim} must be even for rotary positions")
        for name in ("dtype", "param_dtype"):
            if getattr(self, name) not in ("float32", "bfloat16"):
                raise ValueError(f"{name} = {getattr(self, name)!r} must be 'float32' or 'bfloat16'")
        if self.remat not in REMAT:
            raise ValueError(f"remat = {self.remat!r} must be one of {tuple(REMAT)}")


Cached = tuple[jax.Array, jax.Array, jax.Array] | None  # (k_BKHS, v_BKSH, mask_BTS), see layers.attention


def _param(module: nn.Module, config: Qwen2Config, name: str, *shape: int) -> jax.Array:
    """Declare a weight, and return it in the compute dtype; biases start at 0 and norms at 1."""
    kinds = {"bias": nn.initializers.zeros, "norm": nn.initializers.ones}
    init = kinds.get(name.rsplit("_", 1)[-1], nn.initializers.normal(INIT_STD))
    return module.param(name, init, shape, jnp.dtype(config.param_dtype)).astype(config.dtype)


class Attention(nn.Module):
    config: Qwen2Config

    @nn.compact
    def __call__(
        self, x_BTD: jax.Array, cached: Cached, mask_BTT: jax.Array, rope: tuple[jax.Array, jax.Array]
    ) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
        c = self.config
        D, N, K, H = c.width, c.heads, c.kv_heads, c.head_dim
        q_BTNH = jnp.einsum("BTD,DNH->BTNH", x_BTD, _param(self, c, "q", D, N, H)) + _param(self, c, "q_bias", N, H)
        k_BTKH = jnp.einsum("BTD,DKH->BTKH", x_BTD, _param(self, c, "k", D, K, H)) + _param(self, c, "k_bias", K, H)
        v_BTKH = jnp.einsum("BTD,DKH->BTKH", x_BTD, _param(self, c, "v", D, K, H)) + _param(self, c, "v_bias", K, H)
        k_BTKH = apply_rope(k_BTKH, *rope)
        out_BTNH = attention(apply_rope(q_BTNH, *rope), (k_BTKH, v_BTKH, mask_BTT), cached)
        return jnp.einsum("BTNH,NHD->BTD", out_BTNH, _param(self, c, "o", N, H, D)), (k_BTKH, v_BTKH)


class Mlp(nn.Module):
    config: Qwen2Config

    @nn.compact
    def __call__(self, x_BTD: jax.Array) -> jax.Array:
        c = self.config
        gate_DF, up_DF = _param(self, c, "gate", c.width, c.ffw), _param(self, c, "up", c.width, c.ffw)
        return swiglu(x_BTD, gate_DF, up_DF, _param(self, c, "down", c.ffw, c.width))


class Block(nn.Module):
    """One decoder layer: the residual stream, and this layer's new keys and values if there is a cache to fill."""

    config: Qwen2Config
    keep: bool

    @nn.compact
    def __call__(self, x_BTD, cache, mask_BTS, mask_BTT, rope):
        c = self.config
        cached = None if cache is None else (*cache, mask_BTS)
        h_BTD = rms_norm(x_BTD, _param(self, c, "attn_norm", c.width), c.rms_eps)
        h_BTD, new_kv = Attention(c, name="attn")(h_BTD, cached, mask_BTT, rope)
        x_BTD = constrain(x_BTD + h_BTD, "fsdp")
        h_BTD = rms_norm(x_BTD, _param(self, c, "mlp_norm", c.width), c.rms_eps)
        return constrain(x_BTD + Mlp(c, name="mlp")(h_BTD), "fsdp"), new_kv if self.keep else None


class Network(nn.Module):
    """Embedding, blocks and final norm. The heads are declared here and used by `Model`."""

    config: Qwen2Config
    head: str

    @nn.compact
    def __call__(
        self, tokens_BT: jax.Array, valid_BT: jax.Array, cache: KVCache | None, fresh: bool = False
    ) -> tuple[jax.Array, KVCache | None]:
        c, T = self.config, tokens_BT.shape[1]
        if self.head == "value":
            ValueHead(c, name="value_head")()
        elif not c.tied:
            _param(self, c, "lm_head", c.width, c.vocab_size)

        # A token's position is the number of valid tokens before it, so padding on either side shifts nothing.
        positions_BT = jnp.maximum(jnp.cumsum(valid_BT, axis=1) - 1, 0)
        mask_BTT = jnp.tril(jnp.ones((T, T), bool)) & valid_BT[:, None, :]
        mask_BTS, stores = None, None
        if cache is not None and not fresh:
            positions_BT = positions_BT + cache.length_B[:, None]
            seen_BS = jnp.arange(cache.v_LBKSH.shape[3]) < cache.length_B[:, None]
            mask_BTS = jnp.broadcast_to(seen_BS[:, None, :], (*tokens_BT.shape, seen_BS.shape[1]))
            stores = (cache.k_LBKHS, cache.v_LBKSH)

        block, policy = Block, REMAT[c.remat]
        if policy is not None:
            block = nn.remat(Block, policy=policy, prevent_cse=False)  # a scan needs no barrier against CSE
        in_axes: Any = (0, nn.broadcast, nn.broadcast, nn.broadcast)  # flax's annotation knows only one axis
        blocks: Any = nn.scan(
            block, variable_axes={"params": 0}, split_rngs={"params": True}, in_axes=in_axes, length=c.layers
        )(c, cache is not None, name="layers")
        embed_VD = constrain(_param(self, c, "embed", c.vocab_size, c.width), "tp", None)
        x_BTD = constrain(embed_VD[tokens_BT], "fsdp")
        rope = rope_tables(positions_BT, c.head_dim, c.rope_theta)
        x_BTD, new_kv = blocks(x_BTD, stores, mask_BTS, mask_BTT, rope)
        x_BTD = rms_norm(x_BTD, _param(self, c, "final_norm", c.width), c.rms_eps)
        return x_BTD, None if cache is None else cache.append(new_kv[0], new_kv[1], valid_BT)


class ValueHead(nn.Module):
    """A scalar a position. It starts at 0, so that a new critic says nothing until it has learned something."""

    config: Qwen2Config

    @nn.compact
    def __call__(self) -> None:
        self.param("kernel", nn.initializers.zeros, (self.config.width,), jnp.dtype(self.config.param_dtype))
        self.param("bias", nn.initializers.zeros, (), jnp.dtype(self.config.param_dtype))


@dataclasses.dataclass(frozen=True)
class Model:
    """A policy (`head='lm'`) or a critic (`head='value'`): hashable, so that it can be a static argument of jit."""

    config: Qwen2Config
    head: str = "lm"

    def __post_init__(self) -> None:
        if self.head not in HEADS:
            raise ValueError(f"head = {self.head!r} must be one of {HEADS}")

    def init(self, key: jax.Array) -> Params:
        """Random params in param_dtype; jit it with out_shardings for a large model."""
        tokens_BT = jnp.zeros((1, 1), jnp.int32)
        variables: Any = Network(self.config, self.head).init(key, tokens_BT, jnp.ones((1, 1), bool), None)
        return variables["params"]

    def trunk(
        self,
        params: Params,
        tokens_BT: jax.Array,
        valid_BT: jax.Array,
        cache: KVCache | None = None,
        fresh: bool = False,
    ) -> tuple[jax.Array, KVCache | None]:
        """Final hidden states [B, T, D] in the compute dtype, and the cache with the valid tokens appended.

        A token sees the cache of its row, and the valid tokens of `tokens_BT` up to itself. Prefill and decode are
        the same call: T = prompt bucket or T = 1, padding on any side, a row without a valid token left as it was.
        `fresh`: the cache is empty, so no time is spent looking into it.
        """
        out: Any = Network(self.config, self.head).apply({"params": params}, tokens_BT, valid_BT, cache, fresh)
        return out

    def logits(self, params: Params, hidden: jax.Array) -> jax.Array:
        """Float32 [..., V] of the next token, from hidden states [..., D]."""
        head_DV = params["embed"].T if self.config.tied else params["lm_head"]
        head_DV = head_DV.astype(self.config.dtype)
        return jnp.einsum("...D,DV->...V", hidden, head_DV, preferred_element_type=jnp.float32)

    def values(self, params: Params, hidden: jax.Array) -> jax.Array:
        """Float32 [...]: the value of the state in which everything up to and including this token was read."""
        head = params["value_head"]
        kernel_D = head["kernel"].astype(jnp.float32)
        return jnp.einsum("...D,D->...", hidden.astype(jnp.float32), kernel_D) + head["bias"].astype(jnp.float32)

    def apply(self, params: Params, tokens_BT: jax.Array, valid_BT: jax.Array) -> jax.Array:
        """Logits [B, T, V] of the token after each, or values [B, T] of the state after each."""
        hidden_BTD, _ = self.trunk(params, tokens_BT, valid_BT)
        return self.logits(params, hidden_BTD) if self.head == "lm" else self.values(params, hidden_BTD)
