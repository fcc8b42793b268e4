"""A competition as it lies on disk, in MLE-bench's layout (github.com/openai/mle-bench), read into one frozen struct.

<root>/<id>/config.yaml              id, name, description, dataset.answers, dataset.sample_submission, grader
<root>/<id>/leaderboard.csv          a 'score' column, best first
<root>/<id>/prepared/public/         description.md, sample_submission.csv and the data that programs may read
<root>/<id>/prepared/private/        the answers; never shown to a program
"""

from __future__ import annotations

import dataclasses
import functools
import math
import os
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pandas as pd
import yaml

from jaxrl_code.tasks import tables
from jaxrl_code.tasks.tables import Table
from sandbox.metrics import find

PREPARE = "python launch/prepare.py"
_OR_PREPARE = f", or for a built-in task run: {PREPARE} --ids ID"


@dataclasses.dataclass(frozen=True)
class Competition:
    id: str
    name: str
    description: str  # the text of description.md
    metric: str  # a name of sandbox.metrics, or '' where grade_fn decides
    grade_fn: str  # 'package.module:function', or ''
    public_dir: Path  # absolute; what a program sees as data/
    sample_submission: Path
    answers: Path
    leaderboard: tuple[float, ...]  # best first
    tables: tuple[Table, ...]  # of public_dir: train.csv, test.csv, then others by name
    other_files: tuple[str, ...]  # of public_dir, by name: no CSV
    id_column: str
    submission_columns: tuple[str, ...]  # exactly those that a submission has, the id first
    target_columns: tuple[str, ...]  # of train.csv, absent from test.csv
    metric_label: str = ""  # the metric's name for people

    @property
    def lower_is_better(self) -> bool:
        """As MLE-bench decides it: the best score comes first."""
        return self.leaderboard[0] < self.leaderboard[-1]

    @property
    def median(self) -> float:
        return float(statistics.median(self.leaderboard))

    @functools.cached_property
    def medal_scores(self) -> tuple[float, float, float]:
        """The scores that earn gold, silver and bronze: those at MLE-bench's ranks."""
        gold, silver, bronze = (self.leaderboard[rank - 1] for rank in medal_ranks(len(self.leaderboard)))
        return gold, silver, bronze

    def at_least(self, score: float, bar: float) -> bool:
        return score <= bar if self.lower_is_better else score >= bar

    def medal(self, score: float | None) -> str:
        """'gold', 'silver', 'bronze' or ''."""
        if score is None:
            return ""
        for name, bar in zip(("gold", "silver", "bronze"), self.medal_scores, strict=True):
            if self.at_least(score, bar):
                return name
        return ""

    def above_median(self, score: float | None) -> bool:
        return score is not None and (score < self.median if self.lower_is_better else score > self.median)

    def percentile(self, score: float | None) -> float:
        """The share of the leaderboard that a score beats, ties counted half; 0 without a score."""
        if score is None:
            return 0.0
        ties = sum(entry == score for entry in self.leaderboard)
        not_beaten = sum(self.at_least(entry, score) for entry in self.leaderboard)
        return (len(self.leaderboard) - not_beaten + ties / 2) / len(self.leaderboard)


def medal_ranks(teams: int) -> tuple[int, int, int]:
    """The worst rank (from 1) that still gets gold, silver and bronze, by the number of teams: MLE-bench's table."""
    if teams < 1:
        raise ValueError("a leaderboard needs at least one score")
    if teams < 100:
        return max(1, int(teams * 0.1)), max(1, int(teams * 0.2)), max(1, int(teams * 0.4))
    if teams < 250:
        return 10, int(teams * 0.2), int(teams * 0.4)
    if teams < 1000:
        return 10 + int(teams * 0.002), 50, 100
    return 10 + int(teams * 0.002), int(teams * 0.05), int(teams * 0.1)


def check_invalid_reward(tasks: Sequence[Competition], invalid_reward: float) -> None:
    """Refuses tasks on which a bad but valid submission could earn no more than an invalid one."""
    for task in tasks:
        worst = -task.leaderboard[-1] if task.lower_is_better else task.leaderboard[-1]
        if worst <= invalid_reward:
            raise ValueError(
                f"task {task.id}: its leaderboard's worst score counts as {worst:g}, not above the reward of an "
                f"invalid submission ({invalid_reward:g}); lower that reward or scale the task's target"
            )


def load_all(root: str | Path, ids: Sequence[str] = ()) -> tuple[Competition, ...]:
    """The competitions of `ids`, or all under `root` in order of their ids."""
    root = Path(root).expanduser()
    if not root.is_dir():
        raise ValueError(f"data root {root} does not exist; make it with: {PREPARE} --root {root}")
    found = tuple(sorted(path.parent.name for path in root.glob("*/config.yaml")))
    if not found:
        raise ValueError(f"data root {root} holds no task (<id>/config.yaml); write some with: {PREPARE} --root {root}")
    return tuple(load(root, name) for name in (ids or found))


def load(root: str | Path, task_id: str) -> Competition:
    """Reads <root>/<task_id>. Raises ValueError in one line: the folder, what is wrong with it, what to do."""
    root = Path(root).expanduser().resolve()
    folder = root / task_id
    if not folder.is_dir():
        there = ", ".join(sorted(path.parent.name for path in root.glob("*/config.yaml"))) or "none"
        raise ValueError(f"task folder {folder} does not exist; tasks under {root}: {there}")
    config = _config(folder)
    public = folder / "prepared" / "public"
    sample = _file(folder, config, "sample_submission", "public/sample_submission.csv")
    answers = _file(folder, config, "answers", "private/<answers>.csv")
    description = public / "description.md"
    if not description.is_file():
        raise _bad(folder, "prepared/public/description.md is missing", "write what the task asks for there")
    if answers.is_relative_to(public):
        raise _bad(folder, f"the answers {answers.name} lie in prepared/public", "move them to prepared/private")
    grader = config.get("grader")
    if not isinstance(grader, dict) or not (grader.get("name") or grader.get("grade_fn")):
        raise _bad(
            folder, "config.yaml has no grader", "set grader.name (a metric) or grader.grade_fn (module:function)"
        )
    public_tables = _tables(folder, public)
    columns = tuple(column.name for column in _table(folder, sample).columns)
    leaderboard = _leaderboard(folder)
    metric, grade_fn = str(grader.get("name") or ""), str(grader.get("grade_fn") or "")
    if not grade_fn:
        _check_metric(folder, metric, lower_is_better=leaderboard[0] < leaderboard[-1])
    if len(columns) < 2:
        raise _bad(folder, f"{sample.name} has no column beside the id", "give it the id and the columns to predict")
    by_file = {table.file: table for table in public_tables}
    targets: tuple[str, ...] = ()
    if "train.csv" in by_file and "test.csv" in by_file:
        test = by_file["test.csv"]
        targets = tuple(column.name for column in by_file["train.csv"].columns if not test.has(column.name))
    return Competition(
        id=task_id,
        name=str(config.get("name") or task_id),
        description=description.read_text(encoding="utf-8"),
        metric="" if grade_fn else metric,
        grade_fn=grade_fn,
        public_dir=public,
        sample_submission=sample,
        answers=answers,
        leaderboard=leaderboard,
        tables=public_tables,
        other_files=tuple(
            sorted(p.name for p in public.iterdir() if p.suffix != ".csv" and p.name != "description.md")
        ),
        id_column=columns[0],
        submission_columns=columns,
        target_columns=targets,
        metric_label=metric or grade_fn.rpartition(":")[2],
    )


def _bad(folder: Path, what: str, fix: str) -> ValueError:
    return ValueError(f"task folder {folder}: {what}; {fix}")


def _line(error: Exception) -> str:
    return " ".join(str(error).split())[:200]


def _config(folder: Path) -> dict[str, Any]:
    path = folder / "config.yaml"
    if not path.is_file():
        raise _bad(folder, "config.yaml is missing", "write it as MLE-bench has it" + _OR_PREPARE)
    try:
        config = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise _bad(folder, f"config.yaml is not YAML ({_line(error)})", "mend it") from None
    if not isinstance(config, dict):
        raise _bad(folder, "config.yaml holds no fields", "give it id, name, dataset and grader")
    if config.get("id") != folder.name:
        raise _bad(folder, f"config.yaml says id: {config.get('id')!r}", f"set it to {folder.name!r}, as the folder")
    return config


def _file(folder: Path, config: dict[str, Any], field: str, example: str) -> Path:
    """A path of config.yaml's dataset: relative to the data root as in MLE-bench, or to the task's folder."""
    dataset = config.get("dataset")
    given = dataset.get(field) if isinstance(dataset, dict) else None
    if not given or not isinstance(given, str):
        fix = f"set it to e.g. {folder.name}/prepared/{example}"
        raise _bad(folder, f"config.yaml has no dataset.{field}", fix)
    for base in (folder.parent, folder):
        path = Path(os.path.normpath(base / given))  # a link stays where it lies
        if path.is_file():
            if not path.is_relative_to(folder):
                raise _bad(folder, f"dataset.{field} {given!r} lies outside it", "keep a task's files together")
            return path
    raise _bad(folder, f"{given} (dataset.{field}) is missing", "put the file there" + _OR_PREPARE)


def _check_metric(folder: Path, name: str, *, lower_is_better: bool) -> None:
    """A leaderboard the wrong way round would train the policy to be bad."""
    try:
        metric = find(name)
    except ValueError as error:
        raise _bad(folder, f"grader.name: {error}", "mend config.yaml") from None
    if metric.lower_is_better != lower_is_better:
        says = "the lowest score is best" if lower_is_better else "the highest score is best"
        raise _bad(folder, f"leaderboard.csv says that {says}, which {name} is not", "put the best score first")


def _leaderboard(folder: Path) -> tuple[float, ...]:
    path = folder / "leaderboard.csv"
    fix = "give it a 'score' column, best score first"
    if not path.is_file():
        raise _bad(folder, "leaderboard.csv is missing", fix)
    try:
        frame = pd.read_csv(path)
        scores = tuple(float(score) for score in frame["score"])
    except (KeyError, ValueError):
        raise _bad(folder, "leaderboard.csv has no numeric 'score' column", fix) from None
    if len(scores) < 2 or not all(math.isfinite(score) for score in scores):
        raise _bad(folder, "leaderboard.csv needs two finite scores or more", fix)
    if scores[0] == scores[-1]:
        raise _bad(folder, "leaderboard.csv begins and ends with the same score, so no direction is better", fix)
    return scores


def _tables(folder: Path, public: Path) -> tuple[Table, ...]:
    first = {"train.csv": 0, "test.csv": 1}
    paths = sorted(public.glob("*.csv"), key=lambda path: (first.get(path.name, 2), path.name))
    return tuple(_table(folder, path) for path in paths)


def _table(folder: Path, path: Path) -> Table:
    try:
        return tables.read(path)
    except (ValueError, OSError) as error:  # pandas' parser errors are ValueErrors
        raise _bad(folder, f"{path.name} cannot be read ({_line(error)})", "mend the file") from None
