"""What a person sees of a run: a bar on a terminal or a line a step elsewhere, then a table and a curve."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

from jaxrl_code.evaluation import Summary, by_task, summarise

SHOWN = (  # metric, word before it, how it is written
    ("rollout/reward_mean", "reward", "{:+.2f}"),
    ("rollout/valid_share", "valid", "{:.0%}"),
    ("env/duration_mean_s", "run", "{:.1f}s"),
)
TABLE_WIDTH = 120
PHASES = ("sample", "sandbox", "update", "eval", "checkpoint")
CURVES = (  # metric, title; drawn against the step
    ("rollout/reward_mean", "mean reward"),
    ("rollout/valid_share", "valid submissions"),
    ("rollout/valid_reward_mean", "reward of valid ones"),
    ("env/duration_mean_s", "run time (s)"),
)


class Display:
    """Progress from step `first` to `total`: a bar on a terminal, a line a step where the output is a file."""

    def __init__(self, total: int, first: int = 0, console: Console | None = None) -> None:
        self._console = console or Console(highlight=False)
        self._total, self._first, self._start = total, first, time.monotonic()
        self._progress: Progress | None = None
        if self._console.is_terminal:
            clocks = (TimeElapsedColumn(), TextColumn("eta"), TimeRemainingColumn())
            numbers = TextColumn("{task.description}", markup=False)
            self._progress = Progress(BarColumn(20), MofNCompleteColumn(), *clocks, numbers, console=self._console)
            self._task = self._progress.add_task("", total=total, completed=first)
            self._progress.start()

    def step(self, step: int, row: Mapping[str, Any]) -> None:
        """Shows step `step` (from 0) as done; `row` is its metrics, of which some are shown."""
        text = describe(row)
        if self._progress is not None:
            self._progress.update(self._task, completed=step + 1, description=text)
            if step + 1 == self._total:
                self.close()
            return
        spent, done = time.monotonic() - self._start, step + 1 - self._first
        left = spent / done * (self._total - step - 1)
        self._console.print(f"step {step + 1}/{self._total}  {text}  eta {clock(left)}", markup=False, soft_wrap=True)

    def note(self, line: str) -> None:
        """A line above the bar."""
        self._console.print(line, markup=False, soft_wrap=True)

    def close(self) -> None:
        if self._progress is not None:
            self._progress.stop()

    def __enter__(self) -> Display:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def describe(row: Mapping[str, Any]) -> str:
    """The shown numbers of a step, then the seconds that its phases took."""
    words = [f"{word} {form.format(float(row[name]))}" for name, word, form in SHOWN if row.get(name) is not None]
    phases = [(name, row.get(f"time/{name}_s")) for name in PHASES]
    seconds = [f"{name} {float(s):.1f}" for name, s in phases if s is not None]
    return "  ".join(words) + (f"  ({' '.join(seconds)} s)" if seconds else "")


def clock(seconds: float) -> str:
    minutes, s = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{s:02d}" if hours else f"{minutes}:{s:02d}"


def comparison(before: Sequence[dict[str, Any]], after: Sequence[dict[str, Any]]) -> Table:
    """Before and after by task, from evaluation records; scores in the task's own metric, over valid programs.

    'beats' is the share of the leaderboard that a program beats, 0 without a valid submission; 'if valid' leaves those
    out.
    """
    table = Table(title="before → after", title_justify="left")
    table.add_column("task")
    for name in ("valid", "reward", "score", "beats", "if valid", "run (s)"):
        table.add_column(name, justify="right")
    was, now = by_task(before), by_task(after)
    signs = {record["task"]: -1 for record in (*before, *after) if record["score"] != record["signed_score"]}
    for task in sorted(was.keys() | now.keys()):
        _add_row(table, task, was.get(task), now.get(task), signs.get(task, 1))
    table.add_section()
    # A mean of scores over tasks of unlike metrics says nothing: the share of the leaderboard does.
    _add_row(table, "all", summarise(before), summarise(after), 0)
    return table


def _add_row(table: Table, name: str, was: Summary | None, now: Summary | None, sign: int) -> None:
    def pair(field: str, form: str, factor: float = 1.0) -> str:
        values = [getattr(summary, field) if summary else None for summary in (was, now)]
        return " → ".join("-" if v is None else form.format(v * factor) for v in values)

    score = pair("score", "{:.4g}", sign) if sign else ""
    beats = pair("percentile", "{:.0%}"), pair("valid_percentile", "{:.0%}")
    columns = (pair("valid", "{:.0%}"), pair("reward", "{:.2f}"), score, *beats, pair("wall_s", "{:.1f}"))
    table.add_row(name, *columns)


def read_metrics(workdir: str | os.PathLike[str]) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (Path(workdir) / "metrics.jsonl").read_text().splitlines()]


def draw_curve(workdir: str | os.PathLike[str]) -> Path:
    """Draws learning_curve.png from metrics.jsonl, both in `workdir`."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg  # imported late: half a second
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    rows = read_metrics(workdir)
    figure = Figure(figsize=(9, 6), layout="constrained")
    FigureCanvasAgg(figure)
    for axes, (name, title) in zip(figure.subplots(2, 2).flat, CURVES, strict=True):
        points = [(row["step"] + 1, row[name]) for row in rows if row.get(name) is not None]
        axes.plot([x for x, _ in points], [y for _, y in points], marker="o", markersize=3)
        axes.set_title(title)
        axes.set_xlabel("step")
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.grid(alpha=0.3)
        if name.endswith("_share"):
            axes.set_ylim(0, 1)
    path = Path(workdir) / "learning_curve.png"
    figure.savefig(path, dpi=120)
    return path


def finish(
    workdir: str | os.PathLike[str],
    before: Sequence[dict[str, Any]],
    after: Sequence[dict[str, Any]],
    console: Console | None = None,
) -> None:
    """The end of a run: the table of before and after, and where everything is."""
    console = console or Console(highlight=False)
    if not console.is_terminal:  # a file has no width: 80 columns would break most lines of the table
        console.width = max(console.width, TABLE_WIDTH)
    console.print(comparison(before, after))
    console.print(f"learning curve: {draw_curve(workdir)}", markup=False, soft_wrap=True)
    console.print(f"all numbers:    tensorboard --logdir {workdir}", markup=False, soft_wrap=True)
