"""What the sampler runs on the device: prefill of one prompt, insertion into a slot, decoding of all slots together.

B slots    I decode steps of a chunk    P prompt bucket    X stop ids
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxrl_code.models.cache import KVCache, init_cache
from jaxrl_code.models.qwen2 import Model
from jaxrl_code.types import Params


@struct.dataclass
class Rows:
    """The host's knowledge of each slot, handed to every chunk."""

    token_B: Any  # int32, the last token: not yet in the cache
    count_B: Any  # int32, tokens sampled so far
    max_B: Any  # int32
    stop_BX: Any  # int32, padded with -1
    seed_B2: Any  # uint32, key data
    temperature_B: Any  # float32
    top_p_B: Any  # float32
    top_k_B: Any  # int32
    active_B: Any  # bool


def truncate(logits_V: jax.Array, top_p: jax.Array, top_k: jax.Array) -> jax.Array:
    """Logits [V] with -inf outside the top k, then outside the smallest set of those with probability >= top_p."""
    order_V = jnp.argsort(-logits_V, stable=True)
    ranked_V = logits_V[order_V]
    in_k_V = (top_k == 0) | (jnp.arange(ranked_V.size) < top_k)
    prob_V = jax.nn.softmax(jnp.where(in_k_V, ranked_V, -jnp.inf))
    keep_V = in_k_V & ((top_p >= 1) | (jnp.cumsum(prob_V) - prob_V < top_p))
    return jnp.where(jnp.zeros_like(keep_V).at[order_V].set(keep_V), logits_V, -jnp.inf)


def choose(logits_BV: jax.Array, rows: Rows, truncated: bool) -> tuple[jax.Array, jax.Array]:
    """Sample a token [B], and its log-softmax(logits / temperature) [B] over the whole vocabulary (greedy: at 1)."""

    def one(logits_V: jax.Array, row: Rows) -> tuple[jax.Array, jax.Array]:
        scaled_V = logits_V / jnp.where(row.temperature_B > 0, row.temperature_B, 1.0)
        key = jax.random.fold_in(jax.random.wrap_key_data(row.seed_B2, impl="threefry2x32"), row.count_B)
        allowed_V = truncate(scaled_V, row.top_p_B, row.top_k_B) if truncated else scaled_V
        noisy_V = allowed_V + jax.random.gumbel(key, scaled_V.shape, scaled_V.dtype)
        token = jnp.argmax(jnp.where(row.temperature_B > 0, noisy_V, logits_V)).astype(jnp.int32)
        return token, jax.nn.log_softmax(scaled_V)[token]

    return jax.vmap(one)(logits_BV, rows)


def decode(
    model: Model, length: int, truncated: bool, params: Params, cache: KVCache, rows: Rows
) -> tuple[KVCache, jax.Array, jax.Array, jax.Array]:
    """Up to `length` steps, fewer if every row ends: the cache, tokens [I, B] (-1 once ended), logp [I, B], steps."""

    def step(carry: tuple) -> tuple:
        i, cache, rows, tokens_IB, logp_IB = carry
        hidden_B1D, cache = model.trunk(params, rows.token_B[:, None], rows.active_B[:, None], cache)
        token_B, logp_B = choose(model.logits(params, hidden_B1D[:, 0]), rows, truncated)
        tokens_IB = tokens_IB.at[i].set(jnp.where(rows.active_B, token_B, -1))
        logp_IB = logp_IB.at[i].set(jnp.where(rows.active_B, logp_B, 0.0))
        stopped_B = jnp.any(token_B[:, None] == rows.stop_BX, axis=1)
        count_B = rows.count_B + 1
        active_B = rows.active_B & ~stopped_B & (count_B < rows.max_B)
        return i + 1, cache, rows.replace(token_B=token_B, count_B=count_B, active_B=active_B), tokens_IB, logp_IB

    shape = (length, rows.token_B.shape[0])
    start = (jnp.int32(0), cache, rows, jnp.full(shape, -1, jnp.int32), jnp.zeros(shape, jnp.float32))
    steps, cache, _, tokens_IB, logp_IB = jax.lax.while_loop(
        lambda carry: (carry[0] < length) & jnp.any(carry[2].active_B), step, start
    )
    return cache, tokens_IB, logp_IB, steps


def prefill(model: Model, params: Params, tokens_P: jax.Array, count: jax.Array) -> KVCache:
    """A cache of one row that holds the first `count` tokens."""
    P = tokens_P.shape[0]
    empty = init_cache(model.config, 1, P)
    _, row = model.trunk(params, tokens_P[None], (jnp.arange(P) < count)[None], empty, fresh=True)
    assert row is not None  # it is what was passed
    return row


@dataclasses.dataclass(frozen=True)
class Programs:
    """The jitted functions, shared by all engines of the same shape."""

    new_cache: Any
    copy: Any
    prefill: Any
    insert: Any
    decode: Any
    decode_truncated: Any

    def compiled(self) -> int:
        """How many programs have been compiled: constant once everything is warm."""
        return sum(getattr(self, field.name)._cache_size() for field in dataclasses.fields(self))


@functools.cache
def programs(model: Model, slots: int, max_len: int, chunk: int, mesh: Mesh | None) -> Programs:
    config = model.config
    cache: Any = None
    rest: Any = None
    if mesh is not None:  # slots over fsdp and kv heads over tp, where they divide
        rest = NamedSharding(mesh, PartitionSpec())
        fsdp = "fsdp" if slots % mesh.shape.get("fsdp", slots + 1) == 0 else None
        tp = "tp" if config.kv_heads % mesh.shape.get("tp", config.kv_heads + 1) == 0 else None
        kv = NamedSharding(mesh, PartitionSpec(None, fsdp, tp, None, None))
        shapes = jax.eval_shape(lambda: init_cache(config, slots, max_len))
        cache = jax.tree.map(lambda x: kv if x.ndim == 5 else rest, shapes)

    def jit(f: Callable[..., Any], shardings: Any, **kwargs: Any) -> Any:
        if mesh is None:
            return jax.jit(f, **kwargs)
        abstract = mesh.abstract_mesh

        def under_mesh(*args: Any) -> Any:  # the mesh that the caller has set is its thread's, not the sampler's
            with jax.sharding.use_abstract_mesh(abstract):
                return f(*args)

        return jax.jit(under_mesh, out_shardings=shardings, **kwargs)

    return Programs(
        new_cache=jit(lambda: init_cache(config, slots, max_len), cache),
        # Never aliases its input, which the learner may donate. The model computes in this dtype anyway.
        copy=jax.jit(lambda params: jax.tree.map(lambda x: jnp.array(x, config.dtype, copy=True), params)),
        prefill=jit(functools.partial(prefill, model), rest),
        insert=jit(lambda cache, row, slot: cache.insert(row, slot[None]), cache, donate_argnums=0),
        decode=jit(functools.partial(decode, model, chunk, False), (cache, rest, rest, rest), donate_argnums=1),
        decode_truncated=jit(
            functools.partial(decode, model, chunk, True), (cache, rest, rest, rest), donate_argnums=1
        ),
    )
