"""The device mesh, and one table that says how every array of the training state lies on it."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import jax
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

AXES = ("fsdp", "tp")  # fsdp splits the batch and every weight; tp splits heads, ffw and vocabulary

# Matched at the end of a leaf's path, so that a gradient or an Adam moment lies as its param does.
PARAM_RULES: tuple[tuple[str, P], ...] = (
    (r"embed", P("tp", "fsdp")),  # [V, D]
    (r"lm_head", P("fsdp", "tp")),  # [D, V]
    (r"value_head/kernel", P(None)),  # [D]: too small to be worth a collective, as are norms
    (r"value_head/bias", P()),
    (r"final_norm", P(None)),
    (r"layers/(attn|mlp)_norm", P(None, None)),  # [L, D]
    (r"layers/attn/[qkv]", P(None, "fsdp", "tp", None)),  # [L, D, N or K, H]
    (r"layers/attn/[qkv]_bias", P(None, "tp", None)),  # [L, N or K, H]
    (r"layers/attn/o", P(None, "tp", None, "fsdp")),  # [L, N, H, D]
    (r"layers/mlp/(gate|up)", P(None, "fsdp", "tp")),  # [L, D, F]
    (r"layers/mlp/down", P(None, "tp", "fsdp")),  # [L, F, D]
)


def make_mesh(fsdp: int = -1, tp: int = 1, devices: Sequence[Any] | None = None) -> Mesh:
    """A mesh over all devices; fsdp = -1 takes what tp leaves. ValueError when they don't multiply to the devices."""
    devices = jax.devices() if devices is None else devices
    if tp < 1 or fsdp == 0 or fsdp < -1:
        raise ValueError(f"mesh fsdp={fsdp}, tp={tp}: both must be at least 1 (or fsdp=-1 for the rest of the devices)")
    rows = len(devices) // tp if fsdp == -1 else fsdp
    if rows * tp != len(devices):
        raise ValueError(f"mesh fsdp={fsdp} x tp={tp} does not cover the {len(devices)} devices: set fsdp * tp to that")
    # Auto must be written out: jax's default became Explicit, under which einsum needs out_sharding.
    return jax.make_mesh((rows, tp), AXES, axis_types=(AxisType.Auto, AxisType.Auto), devices=devices)


def check_divides(mesh: Mesh, axis: str, **sizes: int) -> None:
    """ValueError with the numbers unless the mesh axis divides every size, e.g. ('tp', heads=14, kv_heads=2)."""
    ways = mesh.shape[axis]
    for name, size in sizes.items():
        if size % ways:
            raise ValueError(f"{name} = {size} is not a multiple of the mesh axis {axis} = {ways}")


def specs_for(tree: Any) -> Any:
    """The same tree with a PartitionSpec an array; scalars are replicated, an array without a rule is a ValueError."""
    return jax.tree_util.tree_map_with_path(lambda path, leaf: _spec(_name(path), leaf), tree)


def shardings_for(mesh: Mesh, tree: Any) -> Any:
    """The same tree with NamedShardings, for in_shardings, out_shardings and device_put; arrays or ShapeDtypeStructs.

    ValueError when an axis of the mesh doesn't divide the dimension that it splits.
    """

    def sharding(path: Any, leaf: Any) -> NamedSharding:
        name = _name(path)
        spec = _spec(name, leaf)
        for size, axis in zip(leaf.shape, spec, strict=True):
            if axis is not None and size % mesh.shape[axis]:
                raise ValueError(
                    f"{name} {tuple(leaf.shape)}: {size} is not a multiple of the mesh axis {axis} = {mesh.shape[axis]}"
                )
        return NamedSharding(mesh, spec)

    return jax.tree_util.tree_map_with_path(sharding, tree)


def batch_sharding(mesh: Mesh) -> NamedSharding:
    """Rows over fsdp, whole along every other axis; check_divides(mesh, 'fsdp', batch_size=B) first."""
    return NamedSharding(mesh, P("fsdp"))


def constrain(x: jax.Array, *spec: str | None) -> jax.Array:
    """Hold an intermediate to a layout under jax.set_mesh, where the axes divide it; without a mesh nothing happens.

    Left alone, the partitioner keeps the split weights where they are and moves activations of the whole batch.
    """
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty or any(axis and size % mesh.shape[axis] for size, axis in zip(x.shape, spec, strict=False)):
        return x
    return jax.lax.with_sharding_constraint(x, P(*spec))


def replicated(mesh: Mesh) -> NamedSharding:
    return NamedSharding(mesh, P())


def _name(path: Any) -> str:
    return jax.tree_util.keystr(path, simple=True, separator="/")


def _spec(name: str, leaf: Any) -> P:
    if not leaf.shape:
        return P()
    for rule, spec in PARAM_RULES:
        if re.search(rf"(^|/){rule}$", name):
            if len(spec) != len(leaf.shape):
                raise ValueError(f"{name} has shape {tuple(leaf.shape)}, its rule {rule!r} is for rank {len(spec)}")
            return spec
    raise ValueError(f"no rule in PARAM_RULES for {name} {tuple(leaf.shape)}: add one in jaxrl_code/sharding.py")
