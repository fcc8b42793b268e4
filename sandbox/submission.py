"""Checks a submission strictly and scores it. Bytes and paths in, a Grade out; grader_child.py runs this in a process.

The rules for a competition with one of our metrics: UTF-8 (a BOM is let pass), exactly the sample submission's columns
in their order, one row an id, ids compared as exact strings in any order, and in every cell what the metric takes.
Labels: where all answers are whole numbers, '1' and '1.0' are the same label and anything else is refused; otherwise
labels are compared as exact strings. A label that never occurs is wrong, not invalid: to refuse it would tell which do.

With a grade_fn the file's form is checked and the rest is the function's word, on frames read as MLE-bench reads them.
"""

from __future__ import annotations

import csv
import dataclasses
import importlib
import importlib.util
import io
import json
import math
import re
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from sandbox.grade import Grade, GradeSpec, Reason
from sandbox.metrics import Metric, find

_HEADER_BYTES = 64 << 10
_FIELD_CHARS = 64 << 10
_CELL_BYTES = 64  # room for a cell: a float64 in full takes 24
_NUMBER = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?", re.ASCII)  # float() would take 1_0, ' 1', 'nan'
_WHOLE = re.compile(r"([+-]?\d{1,15})(\.0*)?", re.ASCII)
_MISSING = {"", "na", "n/a", "nan", "none", "null", "<na>", "inf", "-inf", "+inf", "infinity", "-infinity"}
_MAX_SPAN = 1000  # between the least and greatest whole number


class Invalid(Exception):
    def __init__(self, reason: Reason) -> None:
        self.reason = reason


@dataclasses.dataclass(frozen=True)
class Reference:
    """What a competition's submissions are held against, read once."""

    spec: GradeSpec
    sample: bytes
    max_bytes: int
    metric: Metric | None = None
    columns: tuple[str, ...] = ()
    id_at: int = 0
    row_of: dict[str, int] = dataclasses.field(default_factory=dict)  # id -> its row of truth
    truth: np.ndarray = dataclasses.field(default_factory=lambda: np.zeros(0))
    example: np.ndarray | None = None  # the sample's predictions, where they are valid


def read_table(
    data: bytes, max_rows: int | None = None, columns: tuple[str, ...] = ()
) -> tuple[list[str], list[list[str]]]:
    """The header and rows of strict CSV. Raises Invalid."""
    if not data.strip():
        raise Invalid(Reason.EMPTY)
    if b"\0" in data:
        raise Invalid(Reason.NOT_TEXT)
    if len(data) > _HEADER_BYTES and b"\n" not in data[:_HEADER_BYTES] and b"\r" not in data[:_HEADER_BYTES]:
        raise Invalid(Reason.LONG_HEADER)
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError:
        raise Invalid(Reason.NOT_TEXT) from None
    rows: list[list[str]] = []
    try:
        reader = csv.reader(io.StringIO(text, newline=""), strict=True)
        header = next(reader)
        if len(set(header)) < len(header):
            raise Invalid(Reason.REPEATED_COLUMN)
        if columns and tuple(header) != columns:
            raise Invalid(Reason.WRONG_COLUMNS)
        for row in reader:
            if not row:  # a blank line, as pandas skips it
                continue
            if len(row) != len(header):
                raise Invalid(Reason.RAGGED)
            if max_rows is not None and len(rows) == max_rows:
                raise Invalid(Reason.WRONG_ROWS)
            rows.append(row)
    except csv.Error as error:
        raise Invalid(Reason.LONG_FIELD if "field larger" in str(error) else Reason.MALFORMED) from None
    return header, rows


def grade(data: bytes, reference: Reference) -> Grade:
    """Scores the bytes of a submission. Raises only for a fault of ours."""
    csv.field_size_limit(_FIELD_CHARS)
    try:
        if len(data) > reference.max_bytes:
            raise Invalid(Reason.TOO_LARGE)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # sklearn on classes that are never predicted, pandas on mixed columns
            score, flags = _by_function(data, reference) if reference.spec.grade_fn else _by_metric(data, reference)
        if not math.isfinite(score):
            raise Invalid(Reason.SCORE_NOT_FINITE)
    except Invalid as invalid:
        return Grade(None, False, invalid.reason)
    return Grade(round(score, 5) + 0.0, True, Reason.OK, flags)  # + 0.0 makes -0.0 a plain zero


def load_reference(spec: GradeSpec) -> Reference:
    """Reads answers and sample. Raises ValueError (or OSError) where they don't fit together: a fault of ours."""
    sample = Path(spec.sample).read_bytes()
    if spec.grade_fn:
        return Reference(spec, sample, max_bytes=max(1 << 20, 16 * len(sample)))
    csv.field_size_limit(1 << 30)
    metric = find(spec.metric)
    try:
        header, rows = read_table(sample)
        answer_header, answer_rows = read_table(Path(spec.answers).read_bytes())
    except Invalid as invalid:
        raise ValueError(f"{spec.sample} or {spec.answers}: {invalid.reason}") from None
    id_column = spec.id_column or header[0]
    for path, names in ((spec.sample, header), (spec.answers, answer_header)):
        if id_column not in names:
            raise ValueError(f"{path} has no id column {id_column!r}; it has {names}")
    ids = [row[answer_header.index(id_column)] for row in answer_rows]
    row_of = {name: index for index, name in enumerate(ids)}
    id_at = header.index(id_column)
    if len(row_of) < len(ids) or sorted(row[id_at] for row in rows) != sorted(ids):
        raise ValueError(f"ids of {spec.sample} and {spec.answers} must be unique and the same")
    targets = [name for name in header if name != id_column]
    others = [name for name in answer_header if name != id_column]
    truth = _truth(spec, metric, targets, others, [[r[answer_header.index(n)] for n in others] for r in answer_rows])
    cells = len(rows) * len(header)
    limit = max(1 << 20, 4 * len(sample), len(sample) + _CELL_BYTES * cells)
    found = Reference(spec, sample, limit, metric, tuple(header), id_at, row_of, truth)
    try:
        return dataclasses.replace(found, example=_predictions(sample, found))
    except Invalid:  # a sample may hold placeholders
        return found


def _truth(spec: GradeSpec, metric: Metric, targets: list[str], others: list[str], rows: list[list[str]]) -> np.ndarray:
    try:
        if metric.takes == "probability" and len(targets) > 1 and len(others) == 1:  # a label instead of columns
            return np.eye(len(targets))[[targets.index(row[0]) for row in rows]]
        cells = [[row[others.index(name)] for name in targets] for row in rows]
        if metric.takes in ("label", "whole"):
            if len(targets) != 1:
                raise ValueError(f"{spec.metric} takes one column to predict, the sample has {targets}")
            labels = [row[0] for row in cells]
            whole = metric.takes == "whole" or all(_WHOLE.fullmatch(label) for label in labels)
            return np.array([_whole(label) for label in labels], np.int64) if whole else np.array(labels, object)
        truth = np.array([[_number(cell) for cell in row] for row in cells]).reshape(len(rows), len(targets))
    except (Invalid, ValueError) as error:
        raise ValueError(f"{spec.answers} doesn't fit {spec.metric} and columns {targets}: {error!r}") from None
    one_hot = np.isin(truth, (0, 1)).all() and (len(targets) == 1 or (truth.sum(axis=1) == 1).all())
    if metric.takes == "probability" and not one_hot:
        raise ValueError(f"{spec.answers}: {spec.metric} needs answers of 0 and 1, one 1 a row where there are columns")
    if spec.metric and metric is find("auc-roc") and any(len(np.unique(column)) != 2 for column in truth.T):
        raise ValueError(f"{spec.answers}: {spec.metric} needs both classes in every column")
    return truth


def _number(cell: str) -> float:
    if not _NUMBER.fullmatch(cell):
        raise Invalid(Reason.NOT_FINITE if cell.strip().lower() in _MISSING else Reason.NOT_A_NUMBER)
    value = float(cell)
    if not math.isfinite(value):  # 1e999
        raise Invalid(Reason.NOT_FINITE)
    return value


def _whole(cell: str) -> int:
    if not (match := _WHOLE.fullmatch(cell)):
        raise Invalid(Reason.NOT_FINITE if cell.strip().lower() in _MISSING else Reason.NOT_WHOLE)
    return int(match.group(1))


def _predictions(data: bytes, reference: Reference) -> np.ndarray:
    """A submission's predictions in the order of the answers, as the metric takes them. Raises Invalid."""
    metric, at, row_of = reference.metric, reference.id_at, reference.row_of
    assert metric is not None
    _, rows = read_table(data, len(row_of), reference.columns)
    if len(rows) != len(row_of):
        raise Invalid(Reason.WRONG_ROWS)
    ids = {row[at] for row in rows}
    if len(ids) < len(rows):
        raise Invalid(Reason.REPEATED_ID)
    if ids != row_of.keys():
        raise Invalid(Reason.WRONG_IDS)
    ordered: list[list[str]] = [[]] * len(rows)
    for row in rows:
        ordered[row_of[row[at]]] = row[:at] + row[at + 1 :]
    if metric.takes in ("label", "whole"):
        labels = [row[0] for row in ordered]
        if reference.truth.dtype.kind != "i":
            if not all(label.strip() for label in labels):
                raise Invalid(Reason.NOT_FINITE)
            return np.array(labels, object)  # fixed width would cost the longest label's for each
        whole = np.array([_whole(label) for label in labels], np.int64)
        if np.ptp(np.concatenate([whole, reference.truth])) > _MAX_SPAN and metric.takes == "whole":
            raise Invalid(Reason.OUT_OF_RANGE)
        return whole
    values = np.array([[_number(cell) for cell in row] for row in ordered])
    if metric.takes == "nonnegative" and (values < 0).any():
        raise Invalid(Reason.NEGATIVE)
    if metric.takes == "probability":
        if (values < 0).any() or (values > 1).any():
            raise Invalid(Reason.NOT_PROBABILITY)
        if (values.sum(axis=1) == 0).any() and values.shape[1] > 1:
            raise Invalid(Reason.ZERO_ROW)
    return values


def _by_metric(data: bytes, reference: Reference) -> tuple[float, tuple[str, ...]]:
    assert reference.metric is not None
    values = _predictions(data, reference)
    flags = ("degenerate",) if len(values) > 1 and (values == values[:1]).all() else ()
    if data == reference.sample or (reference.example is not None and np.array_equal(values, reference.example)):
        flags += ("sample_copy",)
    with np.errstate(all="ignore"):
        return float(reference.metric.score(reference.truth, values)), flags


def _by_function(data: bytes, reference: Reference) -> tuple[float, tuple[str, ...]]:
    """MLE-bench's contract: grade(submission, answers) -> float, InvalidSubmissionError for a bad file."""
    read_table(data)
    function, spec = import_function(reference.spec.grade_fn), reference.spec
    try:
        score = float(function(_frame(data), _answers(Path(spec.answers))))
    except Exception as error:
        if any(cls.__name__ == "InvalidSubmissionError" for cls in type(error).__mro__):
            raise Invalid(Reason.REFUSED) from None
        # Ours or the file's? Where the function takes the sample, the file broke it: a crash must not be a way out.
        function(_frame(reference.sample), _answers(Path(spec.answers)))
        raise Invalid(Reason.BROKE_GRADER) from None
    return score, ("sample_copy",) if data == reference.sample else ()


def import_function(name: str) -> Callable[..., Any]:
    """'package.module:function' or 'path/to/file.py:function', either behind an optional 'file:'."""
    module_name, _, function = name.removeprefix("file:").rpartition(":")
    if module_name.endswith(".py"):
        spec = importlib.util.spec_from_file_location("competition_grader", module_name)
        if spec is None or spec.loader is None:
            raise ValueError(f"grade_fn {name!r}: {module_name} can't be loaded")
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    else:
        module = importlib.import_module(module_name)
    return getattr(module, function)


def _frame(data: bytes) -> Any:
    import pandas as pd

    return pd.read_csv(io.BytesIO(data), float_precision="round_trip")


def _answers(path: Path) -> Any:
    if path.suffix == ".jsonl":
        return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    return _frame(path.read_bytes())
