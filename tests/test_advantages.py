from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import reference_numpy as reference

from jaxrl_code.ppo.advantages import gae, masked_mean, whiten


def random_case(seed: int, B: int = 5, T: int = 13):
    rng = np.random.default_rng(seed)
    action_BT = rng.random((B, T)) < 0.6
    action_BT[:, 0] = False
    action_BT[-1] = False  # a row of padding
    reward_BT = rng.normal(size=(B, T)).astype(np.float32)
    value_BT = rng.normal(size=(B, T)).astype(np.float32)
    return reward_BT, value_BT, rng.normal(size=B).astype(np.float32), action_BT, rng.random(B) < 0.5


def test_gae_by_hand():
    # Prompt, a1, a2, observation, a3; reward 1 on the last. gamma 0.5, lambda 0.5.
    action = np.array([[False, True, True, False, True]])
    reward = np.array([[0, 0, 0, 0, 1.0]])
    value = np.array([[0, 0.2, 0.4, 9.0, 0.6]])
    adv, ret = gae(reward, value, np.array([7.0]), action, np.array([False]), 0.5, 0.5)
    # delta3 = 1 - .6 = .4; delta2 = .5 * .6 - .4 = -.1; delta1 = .5 * .4 - .2 = 0
    np.testing.assert_allclose(adv, [[0, 0.25 * (-0.1 + 0.25 * 0.4), -0.1 + 0.25 * 0.4, 0, 0.4]], atol=1e-6)
    np.testing.assert_allclose(ret, [[0, 0.2, 0.4, 0, 1.0]], atol=1e-6)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("gamma, lam", [(1.0, 1.0), (0.99, 0.95), (0.9, 0.0), (0.0, 1.0)])
def test_gae_equals_the_slow_version(seed, gamma, lam):
    case = random_case(seed)
    for fast, slow in zip(gae(*case, gamma, lam), reference.gae(*case, gamma, lam), strict=True):
        np.testing.assert_allclose(fast, slow, atol=1e-5)


@pytest.mark.parametrize("garbage", [100.0, -1e30, np.inf, np.nan])
def test_gae_is_blind_at_masked_slots(garbage):
    reward, value, last, action, truncated = random_case(0)
    want = gae(reward, value, last, action, truncated, 0.9, 0.8)
    reward, value = np.where(action, reward, garbage), np.where(action, value, garbage)
    last = np.where(truncated, last, garbage)
    got = gae(reward, value, last, action, truncated, 0.9, 0.8)
    np.testing.assert_array_equal(got, want)


def test_observations_cost_no_discount_and_lose_no_reward():
    # The same two actions, with and without ten observation tokens between; gamma = 0 keeps each reward too.
    near, far = np.zeros((1, 13), bool), np.zeros((1, 13), bool)
    near[0, 1:3], far[0, [1, 12]] = True, True
    for gamma in (0.5, 0.0):
        got = []
        for action in (near, far):
            reward = np.zeros((1, 13))
            reward[action] = [0.25, 1.0]
            adv, _ = gae(reward, np.zeros((1, 13)), np.zeros(1), action, np.zeros(1, bool), gamma, 1.0)
            got.append(np.asarray(adv)[action])
        np.testing.assert_allclose(got[0], got[1])
        np.testing.assert_allclose(got[0], [0.25 + gamma, 1.0])


def test_truncation_bootstraps_with_the_state_after_the_last_action_and_termination_does_not():
    action = np.array([[False, True]] * 2)
    value = np.full((2, 2), 3.0)
    adv, ret = gae(np.zeros((2, 2)), value, np.full(2, 5.0), action, np.array([True, False]), 0.9, 1.0)
    np.testing.assert_allclose(ret[:, 1], [0.9 * 5.0, 0.0], atol=1e-6)
    np.testing.assert_allclose(adv[:, 1], [0.9 * 5.0 - 3.0, -3.0], atol=1e-6)


def test_partial_reward_is_kept():
    action = np.array([[False, True]])
    _, ret = gae(np.array([[0, 0.75]], np.float32), np.zeros((1, 2), int), np.zeros(1), action, np.zeros(1, bool), 1, 1)
    assert ret.dtype == jnp.float32 and float(ret[0, 1]) == 0.75


def test_whiten():
    mask = np.array([[True, True, False], [True, False, False]])
    x = np.array([[1.0, 2.0, np.nan], [6.0, np.inf, -5.0]])
    got = np.asarray(whiten(x, mask))
    np.testing.assert_allclose(got[mask], (np.array([1, 2, 6]) - 3) / np.sqrt(14 / 3), rtol=1e-5)
    assert (got[~mask] == 0).all()


@pytest.mark.parametrize("mask", [[True, False], [False, False]])
def test_whiten_one_token_or_none_is_zero(mask):
    np.testing.assert_array_equal(whiten(np.array([[5.0, np.nan]]), np.array([mask])), [[0, 0]])


def test_whiten_does_not_blow_up_equal_values():
    x = np.float32(0.1) + np.float32(1e-8) * np.arange(6, dtype=np.float32)[None]
    assert np.abs(whiten(x, np.ones((1, 6), bool))).max() < 1e-3


def test_masked_mean_gradient_is_finite():
    grad = jax.grad(lambda x: masked_mean(x**2, jnp.array([True, False])))(jnp.array([2.0, jnp.nan]))
    assert grad[0] == 4.0
    assert masked_mean(jnp.array([jnp.nan]), jnp.array([False])) == 0.0
