"""Writes the built-in tasks to disk as competitions in MLE-bench's layout."""

from __future__ import annotations

import filecmp
import os
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import yaml
from sklearn.model_selection import train_test_split

from jaxrl_code.tasks.builtin import CLASSIFICATION, PROBABILITIES, Builtin
from jaxrl_code.tasks.leaderboards import LEADERBOARDS

PREPARER = "jaxrl_code.tasks.prepared:prepare"  # marks a folder as ours to write again
MAX_TRAIN, MAX_TEST = 1500, 600
_FIRST_ID = 1000


def prepare(task: Builtin, root: Path) -> str:
    """Writes <root>/<id> as a whole or not at all; returns 'written', 'unchanged' or 'replaced'.

    A folder of that name that this function did not make is left alone, and a ValueError.
    """
    root.mkdir(parents=True, exist_ok=True)
    folder = root / task.id
    if folder.exists() and not _is_ours(folder):
        raise ValueError(f"task folder {folder} was not made by this command; move it away or choose another --root")
    with tempfile.TemporaryDirectory(prefix=f".{task.id}.", dir=root) as scratch:
        fresh, old = Path(scratch) / "new", Path(scratch) / "old"
        _write(task, fresh)
        if not folder.exists():
            os.rename(fresh, folder)
            return "written"
        if _same(fresh, folder):
            return "unchanged"
        os.rename(folder, old)
        os.rename(fresh, folder)
        return "replaced"


def tables(task: Builtin) -> tuple[pd.DataFrame, pd.DataFrame, pd.DataFrame, pd.DataFrame]:
    """train, test, answers, sample submission; the same on every call."""
    frame = task.frame()
    frame[task.target] = frame.pop(task.target)  # last, where people look for it
    classes = sorted(frame[task.target].unique()) if task.metric in CLASSIFICATION else []
    test_rows = min(MAX_TEST, len(frame) // 3)
    parts: Any = train_test_split(
        frame,
        test_size=test_rows,
        train_size=min(MAX_TRAIN, len(frame) - test_rows),
        stratify=frame[task.target] if classes else None,
        random_state=0,
    )
    # Ids are given after shuffling, so that neither they nor the order of rows say anything about the target.
    rows = pd.concat(parts, ignore_index=True)
    ids = np.random.default_rng(0).permutation(len(rows)) + _FIRST_ID
    rows.insert(0, task.id_column, ids)
    train, test = rows.head(len(rows) - test_rows), rows.tail(test_rows)
    answers = test.filter(items=[task.id_column, task.target])
    if task.metric == PROBABILITIES:
        answers = test.filter(items=[task.id_column]).assign(
            **{str(c): (test[task.target] == c).astype(int) for c in classes}
        )
        sample = answers.assign(**{str(c): round(1 / len(classes), 4) for c in classes})
    elif task.metric in ("auc", "log_loss"):
        sample = answers.assign(**{task.target: 0.5})
    else:
        sample = answers.assign(**{task.target: classes[0] if classes else 0.0})
    return train, test.drop(columns=task.target), answers, sample


def _write(task: Builtin, folder: Path) -> None:
    public, private = folder / "prepared" / "public", folder / "prepared" / "private"
    public.mkdir(parents=True)
    private.mkdir()
    train, test, answers, sample = tables(task)
    train.to_csv(public / "train.csv", index=False)
    test.to_csv(public / "test.csv", index=False)
    sample.to_csv(public / "sample_submission.csv", index=False)
    answers.to_csv(private / "test.csv", index=False)
    (public / "description.md").write_text(_description(task, train, test, sample), encoding="utf-8")
    pd.DataFrame({"score": LEADERBOARDS[task.id]}).to_csv(folder / "leaderboard.csv", index=False)
    config = {
        "id": task.id,
        "name": task.name,
        "competition_type": "simple",
        "awards_medals": False,
        "prizes": None,
        "description": f"{task.id}/prepared/public/description.md",
        "dataset": {
            "answers": f"{task.id}/prepared/private/test.csv",
            "sample_submission": f"{task.id}/prepared/public/sample_submission.csv",
        },
        "grader": {"name": task.metric},
        "preparer": PREPARER,
    }
    (folder / "config.yaml").write_text(yaml.safe_dump(config, sort_keys=False), encoding="utf-8")


def _description(task: Builtin, train: pd.DataFrame, test: pd.DataFrame, sample: pd.DataFrame) -> str:
    columns = "\n".join(f"- `{name}`" for name in test.columns if name != task.id_column)
    return f"""# {task.name}

{task.summary}

## Evaluation

Submissions are scored by {task.metric} on the rows of test.csv.

## Files

- train.csv: {len(train)} rows with the target `{task.target}`
- test.csv: {len(test)} rows without it
- sample_submission.csv: a submission in the right format, with the columns {", ".join(sample.columns)}

## Columns

{columns}

## Source

{task.source}
"""


def _is_ours(folder: Path) -> bool:
    config = folder / "config.yaml"
    return config.is_file() and PREPARER in config.read_text(encoding="utf-8", errors="replace")


def _same(one: Path, other: Path) -> bool:
    files = {path.relative_to(one) for path in one.rglob("*") if path.is_file()}
    if files != {path.relative_to(other) for path in other.rglob("*") if path.is_file()}:
        return False
    return all(filecmp.cmp(one / file, other / file, shallow=False) for file in files)
