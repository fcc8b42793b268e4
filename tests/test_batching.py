from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from jaxrl_code.rollout.batching import make_batch
from jaxrl_code.types import Episode, Turn

PAD = 0  # also a token id that the policy samples, below: masks must not come from token values


def turn(prompt, action, reward=0.0, duration=1.0, **kw) -> Turn:
    action = np.array(action, np.int32)
    logp = -0.1 * np.arange(1, len(action) + 1, dtype=np.float32)
    return Turn(np.array(prompt, np.int32), action, logp, "stop", 0, reward=reward, duration_s=duration, **kw)


def episode(*turns: Turn, **kw) -> Episode:
    return Episode("titanic", "fresh", turns, **kw)


TWO_TURNS = episode(turn([5, 6], [7, PAD], 0.25, 2.0), turn([8], [9, PAD, PAD], 0.75, 4.0), truncated=True)


def test_by_hand():
    batch, stats = make_batch([TWO_TURNS], (4, 10), rows=2, pad_id=PAD)
    assert batch.tokens_BT.shape == (2, 10)
    np.testing.assert_array_equal(batch.tokens_BT[0], [5, 6, 7, 0, 8, 9, 0, 0, 0, 0])
    np.testing.assert_array_equal(batch.valid_BT[0], [1] * 8 + [0] * 2)
    np.testing.assert_array_equal(batch.action_BT[0], [0, 0, 1, 1, 0, 1, 1, 1, 0, 0])
    np.testing.assert_allclose(batch.old_logp_BT[0], [0, 0, -0.1, -0.2, 0, -0.1, -0.2, -0.3, 0, 0], rtol=1e-6)
    np.testing.assert_array_equal(batch.reward_BT[0], [0, 0, 0, 0.25, 0, 0, 0, 0.75, 0, 0])
    np.testing.assert_array_equal(batch.turn_end_BT[0], [0, 0, 0, 1, 0, 0, 0, 1, 0, 0])
    np.testing.assert_array_equal(batch.duration_BT[0], [0, 0, 2, 2, 0, 4, 4, 4, 0, 0])
    np.testing.assert_array_equal(batch.truncated_B, [True, False])
    assert stats["rollout/action_tokens"] == 5 and stats["rollout/turns"] == 2
    assert stats["rollout/padding_share"] == 1 - 8 / 20


def test_each_sampled_token_is_trained_once():
    episodes = [TWO_TURNS, episode(turn([1], [2, 3]))]
    batch, _ = make_batch(episodes, (16,), rows=4, pad_id=PAD)
    want = np.concatenate([t.action_ids for e in episodes for t in e.turns])
    np.testing.assert_array_equal(batch.tokens_BT[batch.action_BT], want)


def test_masked_and_missing_episodes_are_invalid_rows_of_the_same_shape():
    masked = dataclasses.replace(TWO_TURNS, masked=True)
    broken = Episode("iris", "fresh", (), masked=True)  # a fault of ours may leave nothing at all
    batch, stats = make_batch([masked, broken, episode(turn([1], [2]))], (10,), rows=4, pad_id=3)
    np.testing.assert_array_equal(batch.valid_BT.any(axis=1), [False, False, True, False])
    for name in ("action_BT", "reward_BT", "turn_end_BT", "duration_BT", "old_logp_BT", "truncated_B"):
        assert not np.asarray(getattr(batch, name))[[0, 1, 3]].any(), name
    assert stats["rollout/masked"] == 2 and stats["rollout/episodes"] == 1
    batch, stats = make_batch([masked], (10,), rows=4, pad_id=3)
    assert not batch.valid_BT.any() and batch.tokens_BT.shape == (4, 10)


def test_a_masked_episode_may_be_longer_than_every_bucket():
    batch, _ = make_batch([dataclasses.replace(TWO_TURNS, masked=True)], (4,), rows=1, pad_id=PAD)
    assert batch.tokens_BT.shape == (1, 4)


def test_the_shortest_bucket_is_chosen():
    assert make_batch([TWO_TURNS], (4, 8, 16), 1, PAD)[0].tokens_BT.shape[1] == 8


def test_unknown_logp_passes_through():
    odd = dataclasses.replace(turn([1], [2, 3]), action_logp=np.float32([np.nan, -1.0]))
    batch, _ = make_batch([episode(odd)], (4,), 1, PAD)
    assert np.isnan(batch.old_logp_BT[0, 1])


@pytest.mark.parametrize(
    "episodes, buckets, rows, message",
    [
        ([TWO_TURNS], (4, 7), 1, "'titanic' has 8 tokens.*holds 7"),
        ([TWO_TURNS] * 2, (8,), 1, "2 episodes.*rows=1"),
        ([TWO_TURNS], (8, 4), 1, "buckets"),
        ([TWO_TURNS], (), 1, "buckets"),
        ([episode(turn([], [1]))], (8,), 1, "no prompt"),
        ([episode()], (8,), 1, "no prompt"),
        ([episode(turn([1], []))], (8,), 1, "without sampled tokens"),
        ([episode(turn([1], [2], reward=float("nan")))], (8,), 1, "reward=nan"),
        ([episode(turn([1], [2], duration=-1.0))], (8,), 1, "duration_s=-1.0"),
        ([episode(dataclasses.replace(turn([1], [2]), action_logp=np.zeros(2)))], (8,), 1, "1 action_ids but 2"),
    ],
)
def test_bad_input_is_named(episodes, buckets, rows, message):
    with pytest.raises(ValueError, match=message):
        make_batch(episodes, buckets, rows, PAD)
