"""What can be told about a CSV file without knowing what it is for: its rows, and its columns' names and kinds."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pandas as pd

_SAMPLED_ROWS = 5_000  # kinds and missing values are judged by a table's first rows
_FEW_LABELS = 20  # a text column with no more distinct values than this is a category


@dataclasses.dataclass(frozen=True)
class Column:
    name: str
    kind: str  # 'int', 'float', 'category' (few distinct texts) or 'text'
    missing: bool  # has empty cells
    labels: tuple[str, ...] = ()  # its distinct values where they are few


@dataclasses.dataclass(frozen=True)
class Table:
    """A CSV file of the public folder."""

    file: str
    rows: int
    columns: tuple[Column, ...]

    def has(self, name: str) -> bool:
        return any(column.name == name for column in self.columns)


def read(path: Path) -> Table:
    """Raises ValueError or OSError for a file that pandas can't parse."""
    head = pd.read_csv(path, nrows=_SAMPLED_ROWS, encoding="utf-8-sig")
    rows = len(head)
    if rows == _SAMPLED_ROWS:
        rows = len(pd.read_csv(path, usecols=[0], dtype=str, encoding="utf-8-sig"))
    return Table(path.name, rows, tuple(_column(str(name), pd.Series(head[name])) for name in head.columns))


def _column(name: str, values: pd.Series) -> Column:
    missing = bool(values.isna().any())
    present = values.dropna()
    distinct = tuple(str(value) for value in sorted(present.unique(), key=str)[: _FEW_LABELS + 1])
    if pd.api.types.is_bool_dtype(present):
        kind = "category"
    elif pd.api.types.is_numeric_dtype(present):
        # A missing value turns a column of integers into floats.
        kind = "int" if len(present) and (present % 1 == 0).all() else "float"
    else:
        kind = "category" if len(distinct) <= _FEW_LABELS else "text"
    few = len(distinct) <= _FEW_LABELS and kind != "float"
    return Column(name, kind, missing, distinct if few else ())
