from __future__ import annotations

import numpy as np
import pytest
import reference_numpy as reference

from jaxrl_code.ppo.duration import MODES, RateState, duration_aware, reward_rate

INF = float("inf")


def turns(*lengths_durations_rewards: tuple[int, float, float]):
    """One row a turn: a prompt token, `length` action tokens, padding."""
    B, T = len(lengths_durations_rewards), 2 + max(n for n, _, _ in lengths_durations_rewards)
    action, end = np.zeros((B, T), bool), np.zeros((B, T), bool)
    duration, reward = np.zeros((B, T), np.float32), np.zeros((B, T), np.float32)
    for b, (n, seconds, r) in enumerate(lengths_durations_rewards):
        action[b, 1 : 1 + n], end[b, n] = True, True
        duration[b, 1 : 1 + n], reward[b, n] = seconds, r
    return reward, duration, end, action


def apply(mode, case, rates=None, floor_s=0.1, cap=INF, percentile=95.0):
    return duration_aware(mode, *case, rates if rates is not None else RateState.init(4), floor_s, cap, percentile)


def test_linear_by_hand_and_means_over_actions_not_tokens():
    # The long program has eight tokens, the short one: the mean of 1 s and 3 s is 2 s all the same.
    case = turns((1, 1.0, 0.5), (8, 3.0, 0.5))
    reward, weight, _, info = apply("linear", case)
    np.testing.assert_allclose(weight[0, 1], 0.5)
    np.testing.assert_allclose(weight[1, 1:9], 1.5)
    np.testing.assert_array_equal(reward, case[0])
    assert info["rollout/duration_clipped_mean_s"] == 2.0


@pytest.mark.parametrize("mode", ["none", "linear", "inverse_log"])
@pytest.mark.parametrize("cap", [INF, 2.0, 1.0])
def test_weights_equal_the_slow_version_and_have_mean_one(mode, cap):
    seconds = [0.0, 0.5, 2.0, 40.0, 3.0]
    case = turns(*[(1 + i, s, 0.0) for i, s in enumerate(seconds)])
    _, weight, _, _ = apply(mode, case, cap=cap)
    got = np.asarray(weight)[case[2]]
    np.testing.assert_allclose(got, reference.duration_weights(mode, seconds, 0.1, cap), rtol=1e-5)
    np.testing.assert_allclose(got.mean(), 1.0, rtol=1e-6)
    assert (np.asarray(weight)[~case[3]] == 0).all()


def test_inverse_log_favours_fast_actions_and_linear_slow_ones():
    case = turns((1, 1.0, 0.0), (1, 10.0, 0.0))
    fast, slow = np.asarray(apply("inverse_log", case)[1])[case[2]]
    assert fast > 1 > slow
    fast, slow = np.asarray(apply("linear", case)[1])[case[2]]
    assert fast < 1 < slow


def test_floor_holds():
    _, weight, _, _ = apply("linear", turns((1, 0.0, 0.0), (1, 0.3, 0.0)))
    np.testing.assert_allclose(np.asarray(weight)[:, 1], [0.5, 1.5], rtol=1e-6)


def test_reward_rate_charges_each_second_once_on_the_last_token():
    rates = RateState.init(4)
    case = turns((3, 2.0, 1.0), (1, 6.0, 3.0))
    reward, weight, rates, info = apply("reward_rate", case, rates)
    np.testing.assert_array_equal(reward, case[0])  # no earlier batch: no price yet
    assert info["rollout/reward_rate_price"] == 0 and int(rates.count) == 1
    np.testing.assert_allclose(rates.rates_N, [0, 0, 0, 0.5])  # (1 + 3) / (2 + 6)
    reward, weight, rates, info = apply("reward_rate", case, rates)
    np.testing.assert_allclose(info["rollout/reward_rate_price"], 0.5)
    np.testing.assert_allclose(reward[0], [0, 0, 0, 1.0 - 0.5 * 2.0, 0], atol=1e-6)
    np.testing.assert_allclose(reward[1], [0, 3.0 - 0.5 * 6.0, 0, 0, 0], atol=1e-6)
    np.testing.assert_allclose(np.asarray(weight)[case[3]], 1.0)


def test_price_is_a_percentile_of_recent_rates_and_forgets_the_oldest():
    rates = RateState.init(3)
    for rate in (9.0, 1.0, 2.0, 3.0):
        _, _, rates, _ = apply("none", turns((1, 1.0, rate)), rates)
    np.testing.assert_allclose(rates.rates_N, [1.0, 2.0, 3.0])
    np.testing.assert_allclose(reward_rate(rates, 50.0), 2.0)
    np.testing.assert_allclose(reward_rate(rates, 95.0), np.percentile([1, 2, 3], 95), rtol=1e-6)


def test_failures_never_make_a_second_worth_having():
    _, _, rates, _ = apply("reward_rate", turns((1, 1.0, -10.0)))
    reward, _, _, _ = apply("reward_rate", turns((1, 5.0, -9.9)), rates)
    np.testing.assert_allclose(np.asarray(reward).sum(), -9.9, rtol=1e-6)


@pytest.mark.parametrize("mode", MODES)
def test_blind_at_masked_slots_and_to_padding(mode):
    reward, duration, end, action = turns((2, 1.0, 0.5), (4, 3.0, -1.0))
    rates = RateState.init(4).replace(rates_N=np.float32([0, 0, 0, 0.1]), count=np.int32(1))
    want = apply(mode, (reward, duration, end, action), rates)
    dirty = np.where(action, reward, np.nan), np.where(action, duration, np.nan), end, action
    dirty = tuple(np.pad(x, ((0, 2), (0, 3))) for x in dirty)
    got = apply(mode, dirty, rates)
    for i in (0, 1):
        np.testing.assert_allclose(np.asarray(got[i])[:2, :6], want[i], rtol=1e-6)
    np.testing.assert_allclose(got[2].rates_N, want[2].rates_N, rtol=1e-6)


@pytest.mark.parametrize("mode", MODES)
def test_a_batch_without_actions_changes_nothing(mode):
    rates = RateState.init(4).replace(rates_N=np.float32([0, 0, 0, 0.1]), count=np.int32(1))
    empty = np.zeros((2, 3), np.float32), np.zeros((2, 3), np.float32), np.zeros((2, 3), bool), np.zeros((2, 3), bool)
    reward, weight, after, info = apply(mode, empty, rates)
    assert not np.asarray(reward).any() and not np.asarray(weight).any()
    np.testing.assert_array_equal(after.rates_N, rates.rates_N)
    assert all(np.isfinite(v) for v in info.values())


def test_unknown_mode_is_named():
    with pytest.raises(ValueError, match="quadratic"):
        apply("quadratic", turns((1, 1.0, 0.0)))
