"""The built-in tasks on disk: honest splits, valid samples, and a command that can be run again."""

from __future__ import annotations

import math
import subprocess
import sys
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from jaxrl_code.tasks import builtin, prepared
from jaxrl_code.tasks.builtin import BUILTINS, CLASSIFICATION
from jaxrl_code.tasks.competition import Competition, check_invalid_reward, load_all
from jaxrl_code.tasks.prompts import fresh_messages
from launch import prepare
from sandbox import metrics

BY_ID = {task.id: task for task in BUILTINS}


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("data")
    prepare.main([f"--root={root}"])
    return root


@pytest.fixture(scope="module")
def tasks(root: Path) -> dict[str, Competition]:
    return {task.id: task for task in load_all(root)}


def test_all_load_and_are_as_varied_as_they_should_be(tasks: dict[str, Competition]):
    assert set(tasks) == set(BY_ID) and len(tasks) >= 8
    assert {task.lower_is_better for task in tasks.values()} == {True, False}
    assert {"auc", "accuracy", "log_loss", "rmse", "rmsle"} <= {task.metric for task in tasks.values()}
    columns = [column for task in tasks.values() for column in task.tables[1].columns]
    assert {"category", "text", "int", "float"} <= {column.kind for column in columns}
    assert any(column.missing for column in columns)
    check_invalid_reward(list(tasks.values()), -10.0)
    for task in tasks.values():
        assert 30 <= len(task.leaderboard) <= 100
        assert len(set(task.leaderboard)) > 20


@pytest.mark.parametrize("name", BY_ID)
def test_split_is_honest(tasks: dict[str, Competition], name: str):
    task, made = tasks[name], BY_ID[name]
    train, test = (pd.read_csv(task.public_dir / f"{part}.csv") for part in ("train", "test"))
    answers, sample = pd.read_csv(task.answers), pd.read_csv(task.sample_submission)
    assert len(train) <= prepared.MAX_TRAIN and len(test) <= prepared.MAX_TEST and len(test) >= 50
    assert made.target not in test.columns and task.target_columns == (made.target,)
    assert list(sample.columns) == list(answers.columns) == list(task.submission_columns)
    ids = np.concatenate([train[task.id_column], test[task.id_column]])
    assert len(set(ids)) == len(ids)
    assert list(test[task.id_column]) == list(sample[task.id_column]) == list(answers[task.id_column])
    # Neither the id nor the place of a row may tell the target.
    target = pd.Series(pd.factorize(train[made.target], sort=True)[0])
    for clue in (train[task.id_column], pd.Series(range(len(train)))):
        assert abs(clue.corr(target, method="spearman")) < 4 / math.sqrt(len(train))
    if made.metric in CLASSIFICATION:
        assert set(train[made.target]) >= set(answers.get(made.target, ()))


@pytest.mark.parametrize("name", BY_ID)
def test_the_sample_submission_is_valid_and_bad(tasks: dict[str, Competition], name: str):
    task = tasks[name]
    metric = metrics.find(task.metric)
    answers, sample = (pd.read_csv(path).iloc[:, 1:] for path in (task.answers, task.sample_submission))
    if metric.takes == "label":
        score = metric.score(answers.iloc[:, 0].to_numpy(str), sample.iloc[:, 0].to_numpy(str))
    else:
        score = metric.score(answers.to_numpy(float), sample.to_numpy(float))
    assert (-score if task.lower_is_better else score) > -10.0
    assert not task.above_median(score) and task.medal(score) == ""


@pytest.mark.parametrize("name", BY_ID)
def test_prompts_are_compact(tasks: dict[str, Competition], name: str):
    text = " ".join(message["content"] for message in fresh_messages(tasks[name]))
    assert len(text.split()) < 150
    assert BY_ID[name].summary in text  # not cut: it says what to submit


def test_again_changes_nothing_and_damage_is_mended(tmp_path: Path):
    task = BY_ID["wine-cultivar"]
    assert prepared.prepare(task, tmp_path) == "written"
    before = (tmp_path / task.id).stat().st_ino
    assert prepared.prepare(task, tmp_path) == "unchanged" and (tmp_path / task.id).stat().st_ino == before
    (tmp_path / task.id / "prepared/public/train.csv").unlink()
    assert prepared.prepare(task, tmp_path) == "replaced"
    assert (tmp_path / task.id / "prepared/public/train.csv").exists()
    assert [path.name for path in tmp_path.iterdir()] == [task.id]  # no scratch left


def test_a_failure_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def full(*_: object) -> str:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(prepared, "_description", full)
    with pytest.raises(OSError):
        prepared.prepare(BY_ID["wine-cultivar"], tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_is_not_ours_is_left_alone(tmp_path: Path):
    task = BY_ID["wine-cultivar"]
    (tmp_path / task.id).mkdir()
    (tmp_path / task.id / "mine.txt").write_text("mine")
    with pytest.raises(ValueError, match="was not made by this command"):
        prepared.prepare(task, tmp_path)
    assert (tmp_path / task.id / "mine.txt").read_text() == "mine"


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setattr(builtin.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(SystemExit) as stop:
        prepare.main([f"--root={tmp_path}", "--ids=auto-mpg"])
    assert str(stop.value) == (
        "prepare: the package bokeh-sampledata is missing; install it with: pip install 'bokeh-sampledata>=2026.1'"
    )


def test_an_unknown_id_is_one_line_and_a_code(tmp_path: Path):
    command = [sys.executable, "-m", "launch.prepare", f"--root={tmp_path}", "--ids=digits,nope"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 1 and done.stderr.count("\n") == 1 and "no built-in task 'nope'" in done.stderr
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_leaderboards_are_what_the_reference_models_score():
    from jaxrl_code.tasks import baselines
    from jaxrl_code.tasks.leaderboards import LEADERBOARDS

    name = "penguin-mass"
    # Another CPU or release of scikit-learn rounds otherwise, and a tree may then split elsewhere.
    assert np.allclose(baselines.leaderboard(BY_ID[name]), LEADERBOARDS[name], rtol=0.05, atol=1e-2)
