"""What a person sees: lines, bar, table and picture, from made-up metrics and evaluation records."""

from __future__ import annotations

import io
import math

import matplotlib.image
import pytest
from rich.console import Console

from jaxrl_code import display
from jaxrl_code.metrics import Metrics

ROW = {
    "rollout/reward_mean": -3.456,
    "rollout/valid_share": 0.75,
    "env/duration_mean_s": 1.26,
    "time/sample_s": 2.0,
    "time/update_s": 4.04,
    "actor/loss": 9.9,
}


def console(**settings) -> Console:
    return Console(file=io.StringIO(), highlight=False, width=200, **settings)


def test_a_line_a_step_where_there_is_no_terminal():
    out = console()
    with display.Display(4, first=1, console=out) as screen:
        screen.step(1, ROW)
        screen.step(2, {})  # a step whose programs were all lost has no numbers
    first, second = out.file.getvalue().splitlines()
    assert first.startswith("step 2/4  reward -3.46  valid 75%  run 1.3s  (sample 2.0 update 4.0 s)  eta 0:0")
    assert second.startswith("step 3/4")
    assert "\x1b" not in first


def test_a_bar_with_the_time_left_on_a_terminal():
    out = console(force_terminal=True, legacy_windows=False)
    with display.Display(4, console=out) as screen:
        screen.step(0, ROW)
        screen.note("saved [a]")
    shown = out.file.getvalue()
    assert "1/4" in shown and "eta" in shown and "valid 75%" in shown and "saved [a]" in shown
    assert shown.endswith("\x1b[?25h")  # the cursor is given back


def test_the_bar_ends_with_the_last_step():
    out = console(force_terminal=True, legacy_windows=False)
    screen = display.Display(1, console=out)
    screen.step(0, ROW)
    assert out.file.getvalue().endswith("\x1b[?25h")  # what is printed next stands below it


@pytest.mark.parametrize(("seconds", "text"), [(0, "0:00"), (59.6, "1:00"), (3725, "1:02:05")])
def test_clock(seconds, text):
    assert display.clock(seconds) == text


def record(task: str, score: float | None, lower: bool = False, masked: bool = False) -> dict:
    signed = None if score is None else (-score if lower else score)
    return {
        "task": task, "masked": masked, "score": score, "signed_score": signed, "program": "x",
        "reward": -10.0 if signed is None else signed, "percentile": 0.0 if score is None else 0.5, "wall_s": 2.0,
    }  # fmt: skip


def test_the_table_compares_by_task_in_the_tasks_own_metric():
    before = [record("auc", None), record("auc", 0.6), record("rmse", None, True)]
    before.append(record("rmse", None, True, masked=True))
    after = [record("auc", 0.8), record("auc", 0.9), record("rmse", 0.25, True), record("new", None)]
    out = console()
    out.print(display.comparison(before, after))
    rows = {line.split("│")[1].strip(): line for line in out.file.getvalue().splitlines() if line.startswith("│")}
    assert "50% → 100%" in rows["auc"] and "0.6 → 0.85" in rows["auc"] and "25% → 50%" in rows["auc"]
    assert "0% → 100%" in rows["rmse"] and "- → 0.25" in rows["rmse"] and "-10.00 → -0.25" in rows["rmse"]
    assert "- → 0%" in rows["new"]
    assert "33% → 75%" in rows["all"]  # the masked one counts nowhere
    assert "17% → 38%" in rows["all"] and "50% → 50%" in rows["all"]  # of the leaderboard: of all, of valid programs


def test_the_end_of_a_run_leaves_a_picture(tmp_path):
    metrics = Metrics(tmp_path)
    for step in range(5):
        metrics.log(step, ROW | {"rollout/reward_mean": math.nan if step == 2 else step - 5.0})
    metrics.close()
    out = Console(file=io.StringIO(), highlight=False, width=40)  # as narrow as a file may pass for
    display.finish(tmp_path, [record("auc", 0.5)], [record("auc", 0.75)], out)
    assert "0.5 → 0.75" in out.file.getvalue() and str(tmp_path / "learning_curve.png") in out.file.getvalue()
    picture = matplotlib.image.imread(tmp_path / "learning_curve.png")
    assert picture.shape[:2] == (720, 1080) and picture[..., :3].std() > 0.05
