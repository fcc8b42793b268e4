"""Where the arrays lie, on eight devices; and that where they lie changes no number."""

from __future__ import annotations

import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from jaxrl_code.models.logprob import token_logp_and_entropy
from jaxrl_code.models.qwen2 import Model, Qwen2Config
from jaxrl_code.sharding import batch_sharding, check_divides, constrain, make_mesh, shardings_for, specs_for
from jaxrl_code.types import Params

CONFIG = Qwen2Config(vocab_size=64, width=16, ffw=32, layers=2, heads=4, kv_heads=2, head_dim=8, tied=False, max_len=64)
OPTIMIZER = optax.adam(1e-2)


def init_state(key: jax.Array) -> dict:
    actor, critic = Model(CONFIG).init(key), Model(CONFIG, "value").init(key)
    return {
        "actor": actor,
        "critic": critic,
        "opt": (OPTIMIZER.init(actor), OPTIMIZER.init(critic)),
        "step": jnp.int32(0),
        "key": jax.random.key(0),
    }


STATE = jax.eval_shape(init_state, jax.random.key(0))


def test_every_leaf_of_a_state_has_a_place_and_moments_lie_as_their_params() -> None:
    specs = specs_for(STATE)
    assert specs["actor"]["layers"]["attn"]["k"] == P(None, "fsdp", "tp", None)
    assert specs["actor"]["lm_head"] == P("fsdp", "tp")
    assert specs["actor"]["embed"] == P("tp", "fsdp")
    assert specs["critic"]["value_head"] == {"kernel": P(None), "bias": P()}
    for moments in (specs["opt"][0][0].mu, specs["opt"][0][0].nu):
        assert moments == specs["actor"]
    assert specs["opt"][1][0].mu == specs["critic"]
    assert specs["step"] == specs["key"] == specs["opt"][0][0].count == P()
    large = {"embed", "lm_head", "q", "k", "v", "o", "gate", "up", "down"}
    for path, spec in jax.tree_util.tree_leaves_with_path(specs["actor"], is_leaf=lambda x: isinstance(x, P)):
        assert ("fsdp" in spec) == (path[-1].key in large), path


def test_an_array_without_a_rule_is_an_error() -> None:
    with pytest.raises(ValueError, match=r"no rule in PARAM_RULES for actor/adapter \(3, 4\)"):
        specs_for({"actor": {"adapter": np.zeros((3, 4))}})
    with pytest.raises(ValueError, match="no rule in PARAM_RULES for not_embed"):  # rules match whole names
        specs_for({"not_embed": np.zeros((3, 4))})
    with pytest.raises(ValueError, match=r"embed has shape \(3, 4, 5\), its rule 'embed' is for rank 2"):
        specs_for({"embed": np.zeros((3, 4, 5))})


def test_a_mesh_has_auto_axes_and_takes_all_devices() -> None:
    mesh = make_mesh(tp=2)
    assert dict(mesh.shape) == {"fsdp": 4, "tp": 2}
    assert mesh.axis_types == (AxisType.Auto, AxisType.Auto)
    assert dict(make_mesh(1, 1, devices=jax.devices()[:1]).shape) == {"fsdp": 1, "tp": 1}


def test_numbers_that_do_not_divide_are_refused() -> None:
    with pytest.raises(ValueError, match="fsdp=3 x tp=2 does not cover the 8 devices"):
        make_mesh(3, 2)
    with pytest.raises(ValueError, match="fsdp=-1 x tp=3 does not cover the 8 devices"):
        make_mesh(tp=3)
    with pytest.raises(ValueError, match="fsdp=0, tp=1: both must be at least 1"):
        make_mesh(0, 1)
    mesh = make_mesh(2, 4)
    check_divides(mesh, "fsdp", batch_size=6)
    with pytest.raises(ValueError, match="kv_heads = 2 is not a multiple of the mesh axis tp = 4"):
        check_divides(mesh, "tp", heads=4, kv_heads=2)
    with pytest.raises(ValueError, match=r"attn/k \(2, 16, 2, 8\): 2 is not a multiple of the mesh axis tp = 4"):
        shardings_for(mesh, STATE)


def test_constrain_without_a_mesh_or_where_it_does_not_divide_does_nothing() -> None:
    x = jnp.ones((3, 2))
    assert constrain(x, "fsdp") is x
    with jax.set_mesh(make_mesh(8, 1)):
        assert constrain(x, "fsdp") is x
        assert constrain(jnp.ones((16, 2)), "fsdp").sharding.spec == P("fsdp")


def loss_of(params: Params, tokens_BT: jax.Array) -> jax.Array:
    model = Model(CONFIG)
    hidden_BTD, _ = model.trunk(params, tokens_BT, jnp.ones(tokens_BT.shape, bool))
    logp_BT, entropy_BT = token_logp_and_entropy(model, params, hidden_BTD, tokens_BT, 1.0, chunk=32)
    return -(logp_BT + 0.1 * entropy_BT).mean()


def step(state: dict, tokens_BT: jax.Array) -> tuple[dict, jax.Array]:
    loss, grads = jax.value_and_grad(loss_of)(state["actor"], tokens_BT)
    updates, opt = OPTIMIZER.update(grads, state["opt"])
    return {"actor": optax.apply_updates(state["actor"], updates), "opt": opt, "step": state["step"] + 1}, loss


@pytest.mark.slow
def test_two_steps_on_4x2_devices_equal_one_device_and_compile_once() -> None:
    tokens_BT = np.random.default_rng(0).integers(0, CONFIG.vocab_size, (8, 12)).astype(np.int32)
    normal = np.random.default_rng(1).standard_normal
    params = jax.tree.map(lambda leaf: jnp.asarray(0.3 * normal(leaf.shape), leaf.dtype), STATE["actor"])
    start = {"actor": params, "opt": OPTIMIZER.init(params), "step": jnp.int32(0)}
    alone, losses = start, []
    single = jax.jit(step)
    for _ in range(2):
        alone, loss = single(alone, tokens_BT)
        losses.append(float(loss))

    mesh = make_mesh(4, 2)
    shardings = shardings_for(mesh, start)
    with jax.set_mesh(mesh):
        state = jax.device_put(start, shardings)
        tokens = jax.device_put(tokens_BT, batch_sharding(mesh))
        split = jax.jit(step, out_shardings=(shardings, None), donate_argnums=0)
        for expected in losses:
            state, loss = split(state, tokens)
            np.testing.assert_allclose(loss, expected, rtol=1e-5)
    assert split._cache_size() == 1
    in_place = jax.tree.map(
        lambda leaf, sharding: leaf.sharding.is_equivalent_to(sharding, leaf.ndim), state, shardings
    )
    assert all(jax.tree.leaves(in_place))
    gate = state["opt"][0].mu["layers"]["mlp"]["gate"]
    assert gate.addressable_shards[0].data.size == gate.size // 8
    # Adam's first steps are near sign(grad): where the gradient is rounding error, the sign is anyone's.
    close = [
        np.isclose(a, b, atol=1e-4).mean()
        for a, b in zip(jax.tree.leaves(state["actor"]), jax.tree.leaves(alone["actor"]), strict=True)
    ]
    assert min(close) > 0.99


def test_activations_stay_with_their_rows() -> None:
    """Left alone, the partitioner moves activations and logits of the whole batch, not the weights."""
    mesh = make_mesh(8, 1)
    actor, B, T = STATE["actor"], 16, 24
    with jax.set_mesh(mesh):
        tokens = jax.ShapeDtypeStruct((B, T), jnp.int32)
        run = jax.jit(loss_of, in_shardings=(shardings_for(mesh, actor), batch_sharding(mesh)))
        text = run.lower(actor, tokens).compile().as_text()
    moved = re.findall(r"f32\[([\d,]+)\]\S* (?:all-reduce|all-gather|all-to-all|collective-permute)\(", text)
    assert moved  # weights are gathered
    rows = [shape for shape in moved if shape.startswith((f"{B},{T}", f"{B // 8},{T}"))]
    assert not rows, rows
