"""Variants of tasks for the demonstrations: the same data under other names, columns, sizes and metrics.

They teach the policy to read names in the prompt, where the few real tasks alone would teach it to know them by heart.
"""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import pandas as pd
import yaml

from jaxrl_code.tasks.competition import Competition, load

_NOUNS = (
    "age", "height", "weight", "income", "score", "price", "rooms", "area", "speed", "depth", "length", "width",
    "rate", "count", "level", "temp", "pressure", "city", "region", "type", "brand", "color", "gender", "grade",
    "group", "code", "status", "year", "month", "duration", "distance", "volume", "balance", "visits", "clicks",
    "power", "energy", "load", "mass", "signal", "noise", "angle", "size", "sales", "stock", "demand",
    "humidity", "wind", "tenure", "plan", "device", "channel", "quality", "sugar", "acid", "density", "fuel",
    "engine", "floor", "garden", "school", "job", "education",
)  # fmt: skip
_ADJECTIVES = (
    "mean",
    "max",
    "min",
    "total",
    "avg",
    "last",
    "first",
    "num",
    "is",
    "has",
    "net",
    "base",
    "raw",
    "log",
    "rel",
)
_SYLLABLES = (
    "ba",
    "ko",
    "ri",
    "ze",
    "tu",
    "mo",
    "la",
    "xi",
    "ven",
    "dor",
    "pi",
    "sa",
    "quo",
    "ne",
    "gra",
    "fi",
    "ul",
    "he",
)
_TARGETS = (
    "target", "label", "outcome", "churn", "survived", "default", "price", "quality", "response", "clicked",
    "class", "y", "rating", "sold", "fraud", "diagnosis", "cost", "demand", "value", "yield", "passed",
    "category", "kind", "count",
)  # fmt: skip
_IDS = (
    "id",
    "Id",
    "ID",
    "row_id",
    "row",
    "case_id",
    "record",
    "key",
    "sample_id",
    "index",
    "item",
    "user_id",
    "passenger",
)
_THINGS = (
    "customers",
    "houses",
    "patients",
    "flights",
    "plants",
    "songs",
    "loans",
    "machines",
    "orders",
    "students",
    "cars",
)
_CLASSES = (
    "low",
    "mid",
    "high",
    "red",
    "green",
    "blue",
    "north",
    "south",
    "east",
    "west",
    "a",
    "b",
    "c",
    "d",
    "good",
    "bad",
)


def _name(rng: random.Random) -> str:
    """A column name as data sets have them: words in some case, coined words, or a letter with a number."""
    style = rng.random()
    if style < 0.15:
        return f"{rng.choice('fvxVXcq')}{rng.choice(('', '_'))}{rng.randint(0, 40)}"
    words = [rng.choice(_NOUNS)]
    if style < 0.4:
        words = ["".join(rng.choice(_SYLLABLES) for _ in range(rng.randint(2, 3)))]
    if rng.random() < 0.4:
        words.insert(0, rng.choice(_ADJECTIVES))
    case = rng.random()
    if case < 0.2:
        return "".join(word.capitalize() for word in words)
    return (" " if case < 0.25 else "_").join(words)


def variant(rng: random.Random, task: Competition, root: Path, number: int) -> Competition:
    """Writes a variant of a task with a single target to root/<id> and loads it."""
    train, test = (pd.read_csv(task.public_dir / f"{name}.csv") for name in ("train", "test"))
    answers = pd.read_csv(task.answers)
    rows = np.random.default_rng(rng.randrange(1 << 30))
    train = train.iloc[rows.permutation(len(train))[: rng.randint(200, 800)]]
    test = test.iloc[rows.permutation(len(test))[: rng.randint(50, 250)]]
    answers = answers.set_index(task.id_column).loc[test[task.id_column]].reset_index()

    target = task.target_columns[0]
    features = [c for c in test.columns if c != task.id_column]
    keep = rng.sample(features, rng.randint(min(3, len(features)), min(10, len(features))))
    names: dict[str, str] = {task.id_column: rng.choice(_IDS), target: rng.choice(_TARGETS)}
    if rng.random() < 0.3:
        names[target] = _name(rng)
    for column in keep:
        while (new := _name(rng)) in names.values():
            pass
        names[column] = new
    if len(task.submission_columns) == 2:
        names[task.submission_columns[1]] = names[target] if rng.random() < 0.7 else rng.choice(_TARGETS)
    if names[target] == names[task.id_column]:
        names[target] = "goal"
    train = train[[task.id_column, *keep, target]].rename(columns=names)
    test = test[[task.id_column, *keep]].rename(columns=names)
    answers = answers[list(task.submission_columns)].rename(columns=names)
    ids = rows.permutation(len(train) + len(test)) + rng.choice((0, 1, 1000))
    train[names[task.id_column]] = ids[: len(train)]
    test[names[task.id_column]] = answers[names[task.id_column]] = ids[len(train) :]

    metric, sample = _metric(rng, task, train[names[target]]), answers.copy()
    for column in sample.columns[1:]:
        sample[column] = train[names[target]].mode()[0] if len(sample.columns) == 2 else 1 / (len(sample.columns) - 1)
    name = f"{task.id}-variant-{number}"
    folder = root / name
    public, private = folder / "prepared" / "public", folder / "prepared" / "private"
    public.mkdir(parents=True)
    private.mkdir()
    for frame, path in ((train, public / "train.csv"), (test, public / "test.csv"), (answers, private / "answers.csv"),
                        (sample, public / "sample_submission.csv")):  # fmt: skip
        frame.to_csv(path, index=False)
    thing = rng.choice(_THINGS)
    (public / "description.md").write_text(
        f"# {thing}\n\nPredict {names[target]} of {thing} from {len(keep)} columns.\n"
    )
    scores = [0.1, 0.2, 0.3] if task.lower_is_better and metric == task.metric else [0.9, 0.8, 0.7]
    if metric in ("log_loss", "rmse", "rmsle", "mae"):
        scores.sort()
    pd.DataFrame({"score": scores}).to_csv(folder / "leaderboard.csv", index=False)
    config = {
        "id": name,
        "name": f"{thing.capitalize()} {number}",
        "description": f"{name}/prepared/public/description.md",
        "dataset": {
            "answers": f"{name}/prepared/private/answers.csv",
            "sample_submission": f"{name}/prepared/public/sample_submission.csv",
        },
        "grader": {"name": metric},
    }
    (folder / "config.yaml").write_text(yaml.safe_dump(config))
    return load(root, name)


def _metric(rng: random.Random, task: Competition, target: pd.Series) -> str:
    """The task's metric or another that fits its target and its submission's form."""
    if len(task.submission_columns) > 2:
        return task.metric
    if target.dtype.kind == "f" or task.metric in ("rmse", "rmsle", "mae"):
        return rng.choice(("rmse", "mae", "rmsle") if target.min() >= 0 else ("rmse", "mae"))
    if set(target.unique()) <= {0, 1}:
        return rng.choice(("auc", "log_loss", "accuracy"))
    return "accuracy"
