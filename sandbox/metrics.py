"""The metrics that a competition's config may name, each with its direction and what its predictions have to be.

Truth and predictions come as checked arrays in the order of the answers' ids: float64 [rows, columns] for numbers and
probabilities, str or int64 [rows] for labels. Several columns of numbers are scored one by one and averaged.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np
from sklearn import metrics as sk


@dataclasses.dataclass(frozen=True)
class Metric:
    score: Callable[[np.ndarray, np.ndarray], float]
    lower_is_better: bool
    takes: str  # 'number' (any finite one), 'nonnegative', 'probability' (0 to 1), 'label' or 'whole' (a whole number)


def _mean_of_columns(score: Callable[[np.ndarray, np.ndarray], float]) -> Callable[[np.ndarray, np.ndarray], float]:
    return lambda truth, pred: float(np.mean([score(truth[:, i], pred[:, i]) for i in range(truth.shape[1])]))


def _log_loss(truth: np.ndarray, pred: np.ndarray) -> float:
    """One column: the probability of 1. Several: a probability a class, rows rescaled to sum 1 as Kaggle does."""
    if truth.shape[1] == 1:
        return float(sk.log_loss(truth[:, 0], pred[:, 0], labels=[0, 1]))
    rows = pred / pred.sum(axis=1, keepdims=True)
    return float(sk.log_loss(truth.argmax(axis=1), rows, labels=range(truth.shape[1])))


def _quadratic_weighted_kappa(truth: np.ndarray, pred: np.ndarray) -> float:
    """Between whole numbers; every number between the least and the greatest is a class, so that distances are true."""
    both = np.concatenate([truth, pred])
    return float(sk.cohen_kappa_score(truth, pred, labels=range(both.min(), both.max() + 1), weights="quadratic"))


def _f1_macro(truth: np.ndarray, pred: np.ndarray) -> float:
    """Over all labels that occur in either; one that is never predicted counts 0."""
    zero_division: Any = 0  # its annotation knows only "warn"
    return float(sk.f1_score(truth, pred, average="macro", zero_division=zero_division))


METRICS = {
    "auc-roc": Metric(_mean_of_columns(sk.roc_auc_score), False, "number"),
    "accuracy": Metric(lambda truth, pred: float(np.mean(truth == pred)), False, "label"),
    "f1-macro": Metric(_f1_macro, False, "label"),
    "quadratic-weighted-kappa": Metric(_quadratic_weighted_kappa, False, "whole"),
    "log-loss": Metric(_log_loss, True, "probability"),
    "rmse": Metric(_mean_of_columns(sk.root_mean_squared_error), True, "number"),
    "rmsle": Metric(_mean_of_columns(sk.root_mean_squared_log_error), True, "nonnegative"),
    "mae": Metric(_mean_of_columns(sk.mean_absolute_error), True, "number"),
}
_ALIASES = {
    "auc": "auc-roc", "roc-auc": "auc-roc", "area-under-the-roc": "auc-roc", "logloss": "log-loss",
    "multi-class-log-loss": "log-loss", "f1-score-macro": "f1-macro", "macro-f1": "f1-macro",
    "qwk": "quadratic-weighted-kappa", "mean-absolute-error": "mae", "root-mean-squared-error": "rmse",
    "root-mean-squared-log-error": "rmsle",
}  # fmt: skip


def find(name: str) -> Metric:
    """The metric of a config's grader.name; case, '_' and spaces don't matter. Raises ValueError for an unknown one."""
    key = name.lower().replace("_", "-").replace(" ", "-")
    key = _ALIASES.get(key, key)
    if key not in METRICS:
        raise ValueError(f"unknown metric {name!r}; known: {', '.join(METRICS)}; for others set grader.grade_fn")
    return METRICS[key]
