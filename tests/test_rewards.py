"""Hand-worked rewards: -10 without a valid submission, 0.1 a milestone, a valid one's signed score, none for infra."""

from __future__ import annotations

import pytest

from jaxrl_code.rewards import floor, reward
from sandbox.grade import Grade, Reason
from sandbox.markers import MILESTONES
from sandbox.protocol import Milestone, Outcome, Result


def run(outcome=Outcome.OK, milestones=()):
    claims = tuple(Milestone(name, 0.5 * i) for i, name in enumerate(milestones))
    return Result("r", outcome, milestones=claims)


def valid(score, **kwargs):
    return Grade(score, True, Reason.OK, **kwargs)


INVALID = Grade(None, False, Reason.WRONG_IDS)
FAULT = Grade(None, False, Reason.OUR_FAULT)


@pytest.mark.parametrize(
    ("score", "lower_is_better", "expected"),
    [(0.75, False, 0.75), (0.75, True, -0.75), (0.0, False, 0.0), (0.0, True, 0.0), (-0.25, False, -0.25)],
)
def test_a_valid_submission_earns_its_signed_score(score, lower_is_better, expected):
    got = reward(run(milestones=MILESTONES), valid(score), lower_is_better=lower_is_better)
    assert got.value == expected and not got.masked
    assert got.parts == {"score": expected, "floor": 0.0}  # a score of exactly 0.0 is there


def test_zero_coefficients_are_numbers_not_unset():
    got = reward(run(Outcome.TIMEOUT, ["imported"]), None, lower_is_better=False, invalid=0.0, milestone=0.0)
    assert got.value == 0.0 and got.parts == {"invalid": 0.0, "milestones": 0.0}


@pytest.mark.parametrize(
    ("outcome", "grade"),
    [(outcome, None) for outcome in Outcome if outcome not in (Outcome.OK, Outcome.INFRA, Outcome.HACK)]
    + [(Outcome.OK, INVALID), (Outcome.USER_ERROR, INVALID), (Outcome.INVALID_SUBMISSION, INVALID)],
)
def test_without_a_valid_submission_milestones_count_each_once(outcome, grade):
    got = reward(run(outcome, ["imported", "loaded_data", "loaded_data"]), grade, lower_is_better=True)
    assert got.value == pytest.approx(-9.8)
    assert got.parts == {"invalid": -10.0, "milestones": pytest.approx(0.2)}


def test_claims_that_were_not_planned_or_have_no_such_name_earn_nothing():
    claims = run(Outcome.USER_ERROR, ["imported", "trained", "won"])
    assert reward(claims, None, lower_is_better=False, planned=("imported",)).value == pytest.approx(-9.9)
    assert reward(claims, None, lower_is_better=False).value == pytest.approx(-9.8)


def test_any_valid_submission_is_above_any_invalid_one():
    best = reward(run(Outcome.TIMEOUT, MILESTONES), None, lower_is_better=True)
    worst = reward(run(), valid(34.5), lower_is_better=True)
    assert best.value == pytest.approx(-9.3)
    assert worst.value == pytest.approx(-9.2) == pytest.approx(floor(-10.0, 0.1))
    assert worst.parts == {"score": -34.5, "floor": pytest.approx(25.3)}


def test_a_crash_after_a_good_file_was_written_keeps_the_file():
    assert reward(run(Outcome.USER_ERROR), valid(0.5), lower_is_better=False).value == 0.5


def test_faults_of_ours_are_masked_and_never_a_number():
    for result, grade in ((run(Outcome.INFRA), None), (run(Outcome.INFRA), valid(0.9)), (run(), FAULT)):
        got = reward(result, grade, lower_is_better=False)
        assert got.value is None and got.masked and got.parts == {}


def test_an_attack_earns_no_milestones_and_no_score():
    got = reward(run(Outcome.HACK, MILESTONES), valid(0.99), lower_is_better=False)
    assert got.value == -10.0 and got.parts == {"invalid": -10.0}


def test_parts_sum_to_the_reward_and_only_those_that_apply_are_there():
    rewards = [
        reward(run(Outcome.TIMEOUT, ["imported"]), None, lower_is_better=False),
        reward(run(), valid(0.25), lower_is_better=False),
        reward(run(), valid(99.0), lower_is_better=True),
    ]
    assert all(sum(r.parts.values()) == pytest.approx(r.value) for r in rewards)
    scores = [r.parts["score"] for r in rewards if "score" in r.parts]
    assert scores == [0.25, -99.0]  # a mean of scores has no zero for the run that had none


def test_our_own_mistakes_are_errors():
    with pytest.raises(ValueError, match="wasn't graded"):
        reward(run(), None, lower_is_better=False)
    for score in (None, float("nan"), float("inf")):
        with pytest.raises(ValueError, match="finite"):
            reward(run(), valid(score), lower_is_better=False)
