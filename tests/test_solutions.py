"""The solution buffer: what it keeps, how it chooses, and that a resumed one goes on the same way."""

from __future__ import annotations

import collections
import json

import numpy as np
import pytest

from jaxrl_code.tasks.solutions import Solution, SolutionBuffer


def good(name: str, reward: float = 0.5) -> Solution:
    return Solution(name, "out", "ok", reward, score=reward)


def bad(name: str, reward: float = -10.0) -> Solution:
    return Solution(name, "out", "user_error", reward)


def names(buffer: SolutionBuffer, task: str = "t") -> list[str]:
    return [solution.program for solution in buffer.solutions(task)]


def test_the_oldest_or_the_worst_goes():
    oldest, worst = SolutionBuffer(2), SolutionBuffer(2, evict="worst")
    for name, reward in (("a", 0.5), ("b", 0.1), ("c", 0.3), ("d", 0.2)):
        oldest.add("t", good(name, reward))
        worst.add("t", good(name, reward))
    assert names(oldest) == ["c", "d"] and names(worst) == ["a", "c"]
    assert oldest.best("t") == good("c", 0.3) and oldest.best("u") is None


def test_tasks_do_not_share_and_a_program_is_kept_once():
    buffer = SolutionBuffer(3)
    buffer.add("t", good("a", 0.1))
    buffer.add("u", good("a"))
    buffer.add("t", good("b"))
    buffer.add("t", good("a", 0.2))
    assert names(buffer) == ["b", "a"] and buffer.solutions("t")[1].reward == 0.2 and len(buffer) == 3


def test_failures_never_crowd_out_what_works():
    buffer = SolutionBuffer(4, failed_share=0.5)
    buffer.add("t", good("a"))
    for i in range(6):
        buffer.add("t", bad(f"f{i}"))
    assert names(buffer) == ["a", "f4", "f5"]
    none = SolutionBuffer(4, failed_share=0.0)
    none.add("t", bad("f"))
    assert len(none) == 0 and none.state_dict() == {}


def test_a_score_of_zero_is_valid():
    buffer = SolutionBuffer(4, failed_share=0.0)
    buffer.add("t", good("a", 0.0))
    assert names(buffer) == ["a"] and buffer.choose("t", np.random.default_rng(0)) == good("a", 0.0)


def draws(buffer: SolutionBuffer, count: int = 6000) -> dict[str | None, float]:
    rng = np.random.default_rng(0)
    chosen = [buffer.choose("t", rng) for _ in range(count)]
    return {name: n / count for name, n in collections.Counter(s and s.program for s in chosen).items()}


def test_reward_weighs_by_rank_and_equals_alike():
    buffer = SolutionBuffer(8, choice="reward", failed_share=0.0)
    for name, reward in (("a", -5.0), ("b", 0.7), ("c", 0.7), ("d", 1000.0)):
        buffer.add("t", good(name, reward))
    shares = draws(buffer)  # ranks 1, 2.5, 2.5, 4 of 10
    assert shares == pytest.approx({"a": 0.1, "b": 0.25, "c": 0.25, "d": 0.4}, abs=0.03)


def test_uniform_choice_and_the_share_of_failures():
    buffer = SolutionBuffer(10, choice="uniform", failed_share=0.2)
    buffer.add("t", good("a", 0.1))
    buffer.add("t", good("b", 0.9))
    assert draws(buffer) == pytest.approx({"a": 0.4, "b": 0.4, None: 0.2}, abs=0.03)  # no failure to show: ask afresh
    buffer.add("t", bad("f"))
    assert draws(buffer) == pytest.approx({"a": 0.4, "b": 0.4, "f": 0.2}, abs=0.03)
    assert SolutionBuffer(1).choose("t", np.random.default_rng(0)) is None


def test_resumes_exactly_through_json():
    buffer = SolutionBuffer(4)
    for i in range(7):
        buffer.add("tu"[i % 2], good(f"p{i}", i / 3))
    buffer.add("t", bad("f"))
    other = SolutionBuffer(4)
    other.load_state_dict(json.loads(json.dumps(buffer.state_dict())))
    assert other.state_dict() == buffer.state_dict()
    for each in (buffer, other):
        each.add("t", good("new", 0.4))
    one, two = np.random.default_rng(3), np.random.default_rng(3)
    assert [buffer.choose("t", one) for _ in range(50)] == [other.choose("t", two) for _ in range(50)]


def test_output_is_cut_head_and_tail():
    buffer = SolutionBuffer(1, output_chars=10)
    buffer.add("t", Solution("a", "HEAD." + "x" * 1000 + ".TAIL", "ok", 0.5, 0.5))
    assert buffer.solutions("t")[0].output == "HEAD.\n...\n.TAIL"


@pytest.mark.parametrize(
    "wrong", [{"capacity": 0}, {"evict": "best"}, {"choice": "greedy"}, {"failed_share": 1.5}, {"failed_share": -0.1}]
)
def test_bad_settings_are_refused(wrong: dict):
    with pytest.raises(ValueError, match=f"^buffer.{next(iter(wrong))}: "):
        SolutionBuffer(**({"capacity": 1} | wrong))
