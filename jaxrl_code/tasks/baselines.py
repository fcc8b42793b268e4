"""Reference models whose real scores are the built-in tasks' leaderboards, and the module that holds them."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from sklearn import ensemble, linear_model, naive_bayes, neighbors, svm, tree
from sklearn.base import clone
from sklearn.compose import ColumnTransformer, make_column_transformer
from sklearn.exceptions import ConvergenceWarning
from sklearn.feature_extraction.text import CountVectorizer
from sklearn.impute import SimpleImputer
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

from jaxrl_code.tasks.builtin import CLASSIFICATION, PROBABILITIES, Builtin
from jaxrl_code.tasks.prepared import tables
from sandbox import metrics

SHARES = (0.15, 0.5, 1.0)  # of the training rows, for entries of every strength
_CLASSIFIERS = (
    tree.DecisionTreeClassifier(max_depth=1, random_state=0),
    tree.DecisionTreeClassifier(max_depth=4, min_samples_leaf=10, random_state=0),
    neighbors.KNeighborsClassifier(15),
    naive_bayes.GaussianNB(),
    linear_model.LogisticRegression(max_iter=300),
    svm.SVC(random_state=0),  # has no probabilities: for accuracy alone
    ensemble.RandomForestClassifier(100, min_samples_leaf=2, random_state=0),
    ensemble.ExtraTreesClassifier(100, min_samples_leaf=2, random_state=0),
    ensemble.GradientBoostingClassifier(n_estimators=30, random_state=0),
    ensemble.HistGradientBoostingClassifier(max_iter=30, random_state=0),
)
_REGRESSORS = (
    tree.DecisionTreeRegressor(max_depth=1, random_state=0),
    tree.DecisionTreeRegressor(max_depth=4, random_state=0),
    tree.DecisionTreeRegressor(random_state=0),
    neighbors.KNeighborsRegressor(15),
    linear_model.LinearRegression(),
    linear_model.Ridge(1.0),
    svm.SVR(),
    ensemble.RandomForestRegressor(100, random_state=0),
    ensemble.ExtraTreesRegressor(100, random_state=0),
    ensemble.GradientBoostingRegressor(random_state=0),
    ensemble.HistGradientBoostingRegressor(random_state=0),
)


def leaderboard(task: Builtin) -> list[float]:
    """The scores of every reference model on the hidden answers, best first, rounded to 5 places as MLE-bench does."""
    train, test, answers, _ = tables(task)
    metric = metrics.find(task.metric)
    if metric.takes == "label":
        truth = answers[task.target].to_numpy(str)
    else:
        truth = answers.drop(columns=task.id_column).to_numpy(float)
    scores = [round(metric.score(truth, pred), 5) for pred in _predictions(task, train, test)]
    return sorted(scores, reverse=not metric.lower_is_better)


def write_module(boards: dict[str, list[float]], path: Path) -> None:
    """Writes the scores as a Python module, so that they travel with the package."""
    lines = [
        '"""Scores of reference models (tasks/baselines.py) on the built-in tasks, best first: their leaderboards.',
        "",
        "Made by `python launch/prepare.py --leaderboards`; not edited by hand.",
        '"""',
        "",
        "# fmt: off",
        "LEADERBOARDS: dict[str, tuple[float, ...]] = {",
    ]
    for name, scores in boards.items():
        lines.append(f'    "{name}": (')
        lines += [f"        {', '.join(map(str, scores[i : i + 12]))}," for i in range(0, len(scores), 12)]
        lines.append("    ),")
    path.write_text("\n".join([*lines, "}", ""]), encoding="utf-8")


def _predictions(task: Builtin, train: pd.DataFrame, test: pd.DataFrame) -> Iterator[np.ndarray]:
    """Of each model on each share of the rows, with numbers alone and with every column; in sandbox.metrics' form."""
    texts = train.select_dtypes("str").columns.drop(task.target, errors="ignore")
    train, test = (table.fillna(dict.fromkeys(texts, "")) for table in (train, test))
    models = _CLASSIFIERS if task.metric in CLASSIFICATION else _REGRESSORS
    if task.metric in CLASSIFICATION and task.metric != "accuracy":
        models = tuple(model for model in models if hasattr(model, "predict_proba"))
    for share in SHARES:
        rows = train.head(int(len(train) * share))
        inputs = rows.drop(columns=[task.target, task.id_column])
        for features, model in itertools.product((_numbers(inputs), _everything(inputs)), models):
            pipeline = make_pipeline(features, clone(model))
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", ConvergenceWarning)
                pipeline.fit(inputs, rows[task.target])
            if task.metric not in CLASSIFICATION:
                yield pipeline.predict(test)[:, None].clip(min=0)
            elif task.metric == "accuracy":
                yield pipeline.predict(test).astype(str)
            else:
                probabilities = pipeline.predict_proba(test)
                yield probabilities if task.metric == PROBABILITIES else probabilities[:, 1:]


def _numbers(inputs: pd.DataFrame) -> ColumnTransformer:
    numeric = inputs.select_dtypes("number").columns.tolist()
    return make_column_transformer((SimpleImputer(strategy="median"), numeric))


def _everything(inputs: pd.DataFrame) -> ColumnTransformer:
    """Numbers scaled, and a column for every common word of the texts."""
    numeric = inputs.select_dtypes("number").columns.tolist()
    steps: list[tuple[Any, Any]] = [(make_pipeline(SimpleImputer(strategy="median"), StandardScaler()), numeric)]
    steps += [(_words(), name) for name in inputs.columns if name not in numeric]
    return make_column_transformer(*steps, sparse_threshold=0)


def _words() -> CountVectorizer:
    return CountVectorizer(binary=True, max_features=60)
