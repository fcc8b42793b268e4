from __future__ import annotations

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import reference_numpy as reference

from jaxrl_code.ppo import losses

INF = float("inf")


def case(seed: int = 0, shape=(4, 6)):
    rng = np.random.default_rng(seed)
    logp, old, adv = (rng.normal(size=shape).astype(np.float32) for _ in range(3))
    return logp, old, adv, rng.random(shape) < 0.6


def test_policy_loss_by_hand():
    # Ratios 2 and 0.5, clip 0.2: min(2, 1.2) = 1.2 and min(-0.5, -0.8) = -0.8.
    logp, old, adv = np.log([2.0, 0.5]), np.zeros(2), np.array([1.0, -1.0])
    loss, info = losses.policy_loss(logp, old, adv, np.ones(2, bool), 2, 0.2, 0.2)
    np.testing.assert_allclose(loss, -(1.2 - 0.8) / 2, rtol=1e-6)
    assert info["actor/clip_frac"] == 1.0
    np.testing.assert_allclose(info["actor/ratio_mean"], 1.25, rtol=1e-6)


@pytest.mark.parametrize("low, high", [(0.2, 0.2), (0.1, 0.3), (0.0, 0.0)])
def test_policy_loss_equals_the_slow_version(low, high):
    logp, old, adv, mask = case()
    loss, _ = losses.policy_loss(logp, old, adv, mask, mask.sum(), low, high)
    np.testing.assert_allclose(loss, reference.policy_loss(logp, old, adv, mask, low, high), rtol=1e-5)


def test_zero_clip_is_respected():
    grad = jax.grad(lambda lp: losses.policy_loss(lp, jnp.zeros(1), jnp.ones(1), jnp.ones(1, bool), 1, 0.0, 0.0)[0])
    assert grad(jnp.array([0.1])) == 0.0  # above 1 + 0: clipped


@pytest.mark.parametrize("garbage", [1e30, -np.inf, np.nan])
def test_masked_slots_touch_neither_loss_nor_gradient(garbage):
    logp, old, adv, mask = case()
    dirty = [np.where(mask, x, garbage) for x in (logp, old, adv)]
    functions = {
        "policy": lambda lp, o, a: losses.policy_loss(lp, o, a, mask, mask.sum(), 0.2, 0.2)[0],
        "value": lambda v, o, r: losses.value_loss(v, o, r, mask, mask.sum(), 0.5)[0],
        "kl": lambda lp, ref, _: losses.kl_loss(lp, ref, mask, mask.sum())[0],
        "entropy": lambda h, *_: losses.entropy_loss(h, mask, mask.sum())[0],
    }
    for name, fn in functions.items():
        want, want_grad = jax.value_and_grad(fn)(logp, old, adv)
        got, got_grad = jax.value_and_grad(fn)(*dirty)
        np.testing.assert_array_equal(got, want, err_msg=name)
        np.testing.assert_array_equal(got_grad, want_grad, err_msg=name)
        assert not np.asarray(got_grad)[~mask].any() and np.asarray(got_grad)[mask].any(), name


def test_unknown_old_logp_is_ratio_one_with_a_gradient_and_is_counted():
    logp, old = jnp.array([-1e-4, -2.0]), jnp.array([jnp.nan, -2.0])
    mask, adv = jnp.ones(2, bool), jnp.array([1.0, 1.0])
    (loss, info), grad = jax.value_and_grad(
        lambda lp: losses.policy_loss(lp, old, adv, mask, 2, 0.2, 0.2), has_aux=True
    )(logp)
    assert info["actor/ratio_mean"] == 1.0 and loss == -1.0
    np.testing.assert_allclose(grad, [-0.5, -0.5])
    np.testing.assert_allclose(losses.behaviour_weight(logp, old, mask, 2.0), [1.0, 1.0])
    info = losses.mismatch(logp, old, mask)
    assert info["rollout/logp_unknown"] == 1 and info["rollout/logp_diff_max"] == 0


def test_an_enormous_ratio_has_a_finite_gradient():
    one = jnp.ones(1, bool)
    for adv in (jnp.ones(1), -jnp.ones(1)):
        grad = jax.grad(lambda lp, adv=adv: losses.policy_loss(lp, jnp.zeros(1), adv, one, 1, 0.2, 0.2)[0])
        assert np.isfinite(grad(jnp.array([500.0]))).all()


def test_value_loss_by_hand_and_slow():
    # Off by 2 and moved 1 from its old value, held at 0.5: the worse error is 2.5.
    value, old, ret, one = np.array([1.0]), np.array([0.0]), np.array([3.0]), np.ones(1, bool)
    assert losses.value_loss(value, old, ret, one, 1, 0.5)[0] == 0.5 * 2.5**2
    assert losses.value_loss(value, old, ret, one, 1, INF)[0] == 0.5 * 2.0**2
    assert losses.value_loss(value, old, ret, one, 1, 0.0)[0] == 0.5 * 3.0**2
    value, old, ret, mask = case(3)
    for clip in (0.0, 0.2, INF):
        loss, _ = losses.value_loss(value, old, ret, mask, mask.sum(), clip)
        np.testing.assert_allclose(loss, reference.value_loss(value, old, ret, mask, clip), rtol=1e-5)


def test_kl_by_hand_and_has_a_gradient():
    logp, ref, mask = jnp.log(jnp.array([0.5])), jnp.log(jnp.array([0.25])), jnp.ones(1, bool)
    (kl, _), grad = jax.value_and_grad(lambda lp: losses.kl_loss(lp, ref, mask, 1), has_aux=True)(logp)
    np.testing.assert_allclose(kl, 0.5 - np.log(0.5) - 1.0, rtol=1e-6)
    np.testing.assert_allclose(grad, [1.0 - 0.5], rtol=1e-6)  # d/dlogp of exp(ref - logp) + logp


def test_behaviour_weight_is_truncated():
    prox, old = jnp.log(jnp.array([0.9, 0.1, 0.5])), jnp.log(jnp.array([0.1, 0.2, 0.5]))
    weight = losses.behaviour_weight(prox, old, jnp.array([True, True, False]), 2.0)
    np.testing.assert_allclose(weight, [2.0, 0.5, 0.0], rtol=1e-6)
    loss, _ = losses.policy_loss(prox, prox, jnp.ones(3), jnp.array([True, True, False]), 2, 0.2, 0.2, weight)
    np.testing.assert_allclose(loss, -(2.0 + 0.5) / 2, rtol=1e-6)


def test_gradients_and_infos_of_any_split_add_up():
    logp, old, adv, mask = case(1, (8, 6))
    count = mask.sum()

    def policy(lp, rows):
        return losses.policy_loss(lp[rows], old[rows], adv[rows], mask[rows], count, 0.2, 0.2)

    def value(v, rows):
        return losses.value_loss(v[rows], old[rows], adv[rows], mask[rows], count, 0.5)

    for fn in (policy, value):
        (_, info), grad = jax.value_and_grad(fn, has_aux=True)(jnp.asarray(logp), slice(None))
        for splits in ([1, 3, 4], [2, 2, 2, 2]):
            edges = np.cumsum([0, *splits])
            parts = [
                jax.value_and_grad(fn, has_aux=True)(jnp.asarray(logp), slice(a, b))
                for a, b in itertools.pairwise(edges)
            ]
            np.testing.assert_allclose(sum(g for _, g in parts), grad, atol=1e-7)
            for name, want in info.items():
                np.testing.assert_allclose(sum(i[name] for (_, i), _ in parts), want, atol=1e-6)


def test_mismatch_by_hand():
    logp, old = np.log([0.5, 0.25, 0.9]), np.log([0.25, 0.25, 0.1])
    info = losses.mismatch(logp, old, np.array([True, True, False]))
    np.testing.assert_allclose(info["rollout/logp_diff_mean"], np.log(2) / 2, rtol=1e-5)
    np.testing.assert_allclose(info["rollout/logp_diff_max"], np.log(2), rtol=1e-5)
    np.testing.assert_allclose(info["rollout/logp_diff_k3"], (2 - np.log(2) - 1) / 2, rtol=1e-5)
