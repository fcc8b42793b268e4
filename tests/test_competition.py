"""Competitions from disk: what is read, what is refused in one line, and medals as MLE-bench computes them."""

from __future__ import annotations

import dataclasses
import shutil
from pathlib import Path

import pytest
import yaml

from jaxrl_code.tasks.competition import Competition, check_invalid_reward, load, load_all, medal_ranks

CONFIG = {
    "id": "toy",
    "name": "Toy",
    "dataset": {
        "answers": "toy/prepared/private/test.csv",
        "sample_submission": "toy/prepared/public/sample_submission.csv",
    },
    "grader": {"name": "accuracy"},
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    public, private = tmp_path / "toy/prepared/public", tmp_path / "toy/prepared/private"
    public.mkdir(parents=True)
    private.mkdir()
    (public / "train.csv").write_text("id,size,color,note,kind\n1,1.5,red,hello,a\n2,,blue,,b\n3,2,red,x y,a\n")
    (public / "test.csv").write_text("id,size,color,note\n4,2.5,red,z\n5,1,blue,w\n")
    (public / "sample_submission.csv").write_text("id,kind\n4,a\n5,a\n")
    (public / "description.md").write_text("# Toy\n\nTell the kind.\n")
    (private / "test.csv").write_text("id,kind\n4,a\n5,b\n")
    (tmp_path / "toy/leaderboard.csv").write_text("score\n0.9\n0.5\n0.1\n")
    write_config(tmp_path / "toy", CONFIG)
    return tmp_path / "toy"


def write_config(folder: Path, config: dict) -> None:
    (folder / "config.yaml").write_text(yaml.safe_dump(config))


def with_leaderboard(*scores: float) -> Competition:
    none = Path("/")
    return Competition("t", "T", "", "accuracy", "", none, none, none, scores, (), (), "id", ("id", "y"), ("y",))


def test_reads_what_is_there(folder: Path):
    task = load(folder.parent, "toy")
    assert (task.id, task.name, task.metric, task.grade_fn) == ("toy", "Toy", "accuracy", "")
    assert task.id_column == "id" and task.submission_columns == ("id", "kind") and task.target_columns == ("kind",)
    assert task.answers == (folder / "prepared/private/test.csv").resolve()
    assert [(table.file, table.rows) for table in task.tables] == [
        ("train.csv", 3), ("test.csv", 2), ("sample_submission.csv", 2)
    ]  # fmt: skip
    kinds = {column.name: (column.kind, column.missing) for column in task.tables[0].columns}
    assert kinds["size"] == ("float", True) and kinds["color"] == ("category", False) and kinds["id"][0] == "int"
    assert not task.lower_is_better and task.median == 0.5


def test_paths_may_be_relative_to_the_task_and_train_csv_may_be_missing(folder: Path):
    dataset = {"answers": "prepared/private/test.csv", "sample_submission": "prepared/public/sample_submission.csv"}
    write_config(folder, CONFIG | {"dataset": dataset})
    (folder / "prepared/public/train.csv").unlink()
    (folder / "prepared/public/images").mkdir()
    task = load(folder.parent, "toy")
    assert task.target_columns == () and task.other_files == ("images",)


def test_an_import_path_goes_before_a_name(folder: Path):
    write_config(folder, CONFIG | {"grader": {"name": "odd", "grade_fn": "pkg.odd:grade"}})
    task = load(folder.parent, "toy")
    assert (task.metric, task.grade_fn, task.metric_label) == ("", "pkg.odd:grade", "odd")


@pytest.mark.parametrize(
    ("gone", "says"),
    [
        ("config.yaml", "config.yaml is missing"),
        ("leaderboard.csv", "leaderboard.csv is missing"),
        ("prepared/public/description.md", "description.md is missing"),
        ("prepared/public/sample_submission.csv", "sample_submission.csv (dataset.sample_submission) is missing"),
        ("prepared/private/test.csv", "test.csv (dataset.answers) is missing"),
    ],
)
def test_a_missing_file_is_one_line_with_folder_file_and_fix(folder: Path, gone: str, says: str):
    (folder / gone).unlink()
    with pytest.raises(ValueError) as error:
        load(folder.parent, "toy")
    message = str(error.value)
    assert message.startswith(f"task folder {folder}: ") and says in message and "; " in message and "\n" not in message


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"id": "other"}, "config.yaml says id: 'other'"),
        ({"grader": {}}, "no grader"),
        ({"grader": {"name": "acuracy"}}, "unknown metric 'acuracy'"),
        ({"grader": {"name": "rmse"}}, "the highest score is best, which rmse is not"),
        ({"dataset": {"answers": "toy/prepared/private/test.csv"}}, "no dataset.sample_submission"),
        ({"dataset": CONFIG["dataset"] | {"answers": "../secret.csv"}}, "outside"),
        ({"dataset": CONFIG["dataset"] | {"answers": "toy/prepared/public/test.csv"}}, "lie in prepared/public"),
    ],
)
def test_a_bad_config_is_refused(folder: Path, change: dict, says: str):
    (folder.parent.parent / "secret.csv").write_text("id,kind\n")
    write_config(folder, CONFIG | change)
    with pytest.raises(ValueError, match=f"^task folder .*{says}"):
        load(folder.parent, "toy")


@pytest.mark.parametrize("lines", ["place 1 2", "score abc def", "score 0.5", "score 0.5 0.5", "score 0.5 inf"])
def test_a_leaderboard_must_tell_a_direction(folder: Path, lines: str):
    (folder / "leaderboard.csv").write_text(lines.replace(" ", "\n"))
    with pytest.raises(ValueError, match=r"leaderboard.csv .* give it a 'score' column, best score first"):
        load(folder.parent, "toy")


def test_a_root_names_its_tasks(folder: Path, tmp_path: Path):
    shutil.copytree(folder, tmp_path / "also")
    write_config(tmp_path / "also", yaml.safe_load(yaml.safe_dump(CONFIG).replace("toy", "also")))
    assert [task.id for task in load_all(tmp_path)] == ["also", "toy"]
    assert [task.id for task in load_all(tmp_path, ("toy",))] == ["toy"]
    with pytest.raises(ValueError, match=r"tasks under .*: also, toy"):
        load_all(tmp_path, ("nope",))
    with pytest.raises(ValueError, match=r"launch/prepare.py"):
        load_all(tmp_path / "nowhere")
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match="holds no task"):
        load_all(tmp_path / "empty")


# By hand, from MLE-bench's rules for gold / silver / bronze: < 100 teams 10 / 20 / 40 %; < 250: 10th, 20 %, 40 %;
# < 1000: 10 + 0.2 %, 50th, 100th; else 10 + 0.2 %, 5 %, 10 %.
@pytest.mark.parametrize(
    ("teams", "ranks"),
    [
        (1, (1, 1, 1)), (9, (1, 1, 3)), (10, (1, 2, 4)), (99, (9, 19, 39)), (100, (10, 20, 40)), (249, (10, 49, 99)),
        (250, (10, 50, 100)), (999, (11, 50, 100)), (1000, (12, 50, 100)), (4263, (18, 213, 426)),
    ],
)  # fmt: skip
def test_medal_ranks(teams: int, ranks: tuple[int, int, int]):
    assert medal_ranks(teams) == ranks


def test_medals_median_and_percentile_where_higher_is_better():
    task = with_leaderboard(*(1 - i / 10 for i in range(10)))  # 1.0, 0.9, ... 0.1: gold 1st, silver 2nd, bronze 4th
    assert [task.medal(s) for s in (1.0, 0.95, 0.9, 0.75, 0.7, 0.69, None)] == [
        "gold", "silver", "silver", "bronze", "bronze", "", ""
    ]  # fmt: skip
    assert task.median == pytest.approx(0.55)
    assert task.above_median(0.56) and not task.above_median(0.55) and not task.above_median(None)
    assert [task.percentile(s) for s in (1.5, 1.0, 0.05, None)] == [1.0, 0.95, 0.0, 0.0]


def test_medals_where_lower_is_better_and_zero_is_a_score():
    task = with_leaderboard(0.0, 0.2, 0.4, 0.6, 0.8)  # gold 1st, silver 1st, bronze 2nd
    assert task.lower_is_better
    assert [task.medal(s) for s in (0.0, 0.1, 0.2, 0.3)] == ["gold", "bronze", "bronze", ""]
    assert task.above_median(0.0) and not task.above_median(0.4)
    assert task.percentile(0.3) == pytest.approx(0.6) and task.percentile(0.8) == pytest.approx(0.1)


def test_a_valid_score_must_be_able_to_beat_an_invalid_one():
    check_invalid_reward([with_leaderboard(0.1, 9.9), with_leaderboard(0.9, -9.9)], -10.0)
    with pytest.raises(ValueError, match=r"task t: .* -10, not above the reward of an invalid submission"):
        check_invalid_reward([with_leaderboard(0.1, 10.0)], -10.0)
    with pytest.raises(ValueError, match="counts as -12"):
        check_invalid_reward([with_leaderboard(0.9, -12.0)], -10.0)


def test_is_frozen():
    with pytest.raises(dataclasses.FrozenInstanceError):
        with_leaderboard(0.1, 0.2).id = "x"  # type: ignore[misc]
