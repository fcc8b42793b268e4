"""Passes over a batch: rows sorted by length, cut into micro-batches, and fitted by epochs of minibatches."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import PartitionSpec

from jaxrl_code.ppo.config import PPOConfig
from jaxrl_code.types import Params

Info = dict[str, jax.Array]
Rows = dict[str, jax.Array]  # what a loss needs of a batch, rows first: shuffled, sorted and cut together


def _by_length(rows: Rows, micro_rows: int) -> tuple[Rows, jax.Array]:
    """Rows sorted by length and split into micro-batches [n, micro_rows, ...], spread over the mesh; and the order."""
    order_B = jnp.argsort(rows["valid_BT"].sum(axis=1), stable=True)

    def split(x: jax.Array) -> jax.Array:
        x = x[order_B].reshape(-1, micro_rows, *x.shape[1:])
        if "fsdp" in jax.sharding.get_abstract_mesh().axis_names:
            x = jax.lax.with_sharding_constraint(x, PartitionSpec(None, "fsdp"))
        return x

    return jax.tree.map(split, rows), order_B


def _cut(function: Callable[[Rows], Any], lengths: tuple[int, ...], micro: Rows) -> Any:
    """function(micro cut to the shortest of `lengths` that holds it, or left at T); one branch is run."""
    T = micro["valid_BT"].shape[1]
    lengths = (*(n for n in lengths if n < T), T)

    def at(length: int, micro: Rows) -> Any:
        return function({name: x[:, :length] if name.endswith("_BT") else x for name, x in micro.items()})

    longest = micro["valid_BT"].sum(axis=1).max()
    branch = jnp.searchsorted(jnp.array(lengths), longest)
    return jax.lax.switch(branch, [functools.partial(at, length) for length in lengths], micro)


def map_rows(function: Callable[[Rows], dict[str, jax.Array]], rows: Rows, config: PPOConfig) -> dict[str, jax.Array]:
    """A forward pass over all rows by micro-batches; outputs [B] or, padded back with zeros, [B, T]."""
    T = rows["valid_BT"].shape[1]

    def padded(micro: Rows) -> dict[str, jax.Array]:
        outs = function(micro)
        return {k: jnp.pad(x, ((0, 0), (0, T - x.shape[1]))) if k.endswith("_BT") else x for k, x in outs.items()}

    micros, order_B = _by_length(rows, config.micro_rows)
    outs = jax.lax.map(lambda micro: _cut(padded, config.lengths, micro), micros)
    back_B = jnp.argsort(order_B)
    return jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:])[back_B], outs)


def fit(
    loss_fn: Callable[[Params, Rows, jax.Array], tuple[jax.Array, Info]],
    optimizer: optax.GradientTransformation,
    epochs: int,
    config: PPOConfig,
    params: Params,
    opt: optax.OptState,
    rows: Rows,
    key: jax.Array,
) -> tuple[Params, optax.OptState, Info]:
    """Epochs of minibatches over `rows`; each optimizer step adds up its micro-batches' gradients.

    loss_fn(params, rows, count) divides by the action tokens `count` of the whole minibatch, so the way rows fall into
    micro-batches changes nothing. A step without action tokens or with a non-finite gradient is not taken.
    """
    B = rows["valid_BT"].shape[0]
    order_EB = jax.vmap(lambda k: jax.random.permutation(k, B))(jax.random.split(key, epochs))

    def minibatch(carry: tuple, index_R: jax.Array) -> tuple[tuple, Info]:
        params, opt = carry
        micros, _ = _by_length(jax.tree.map(lambda x: x[index_R], rows), config.micro_rows)
        tokens = micros["action_BT"].sum()
        count = jnp.maximum(tokens, 1)
        grad_fn = jax.grad(lambda p, m: loss_fn(p, m, count), has_aux=True)

        def add(total: Any, micro: Rows) -> tuple[Any, None]:
            part = _cut(functools.partial(grad_fn, params), config.lengths, micro)
            return jax.tree.map(jnp.add, total, part), None

        shapes = jax.eval_shape(grad_fn, params, jax.tree.map(lambda x: x[0], micros))
        (grads, info), _ = jax.lax.scan(add, jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), shapes), micros)
        norm = optax.tree.norm(grads)
        taken = jnp.isfinite(norm) & (tokens > 0)
        updates, new_opt = optimizer.update(grads, opt, params)
        new = optax.apply_updates(params, updates), new_opt
        new = jax.tree.map(lambda a, b: jnp.where(taken, a, b), new, carry)
        return new, {**info, "grad_norm": norm, "skipped": 1.0 - taken}

    (params, opt), infos = jax.lax.scan(minibatch, (params, opt), order_EB.reshape(epochs * config.minibatches, -1))
    info = {name: x.mean() for name, x in infos.items()}
    return params, opt, {**info, "skipped": infos["skipped"].sum()}
