"""Writes the built-in tasks in MLE-bench's layout.

python launch/prepare.py --root=data/mlebench                      # all of them, in seconds
python launch/prepare.py --root=data/mlebench --ids=digits,auto-mpg
python launch/prepare.py --leaderboards                            # fit the reference models again (minutes)
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from rich import box
from rich.console import Console
from rich.table import Table

from jaxrl_code.tasks import competition
from jaxrl_code.tasks.builtin import BUILTINS, Builtin
from jaxrl_code.tasks.prepared import prepare


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Writes the built-in tasks in MLE-bench's layout.")
    parser.add_argument("--root", default="data/mlebench", help="folder that gets one folder a task")
    parser.add_argument("--ids", default="", help="tasks, with commas between; all without it")
    parser.add_argument(
        "--leaderboards", action="store_true", help="first fit the reference models again (for developers)"
    )
    args = parser.parse_args(argv)
    try:
        tasks = choose(args.ids)
        if args.leaderboards:
            refit()
        write(tasks, Path(args.root).expanduser())
    except (ValueError, OSError) as error:  # what a user can get wrong, a full disk included: one line, no traceback
        sys.exit(f"prepare: {error}")


def choose(ids: str) -> tuple[Builtin, ...]:
    by_id = {task.id: task for task in BUILTINS}
    wanted = [name.strip() for name in ids.split(",") if name.strip()]
    for name in wanted:
        if name not in by_id:
            raise ValueError(f"--ids: no built-in task {name!r}; there are {', '.join(by_id)}")
    return tuple(by_id[name] for name in wanted) or BUILTINS


def write(tasks: tuple[Builtin, ...], root: Path) -> None:
    table = Table(title=f"Tasks under {root}", box=box.SIMPLE_HEAD)
    for heading in ("task", "metric", "train", "test", "bronze", "median", ""):
        table.add_column(heading, justify="left" if heading in ("task", "metric", "") else "right", no_wrap=True)
    for task in tasks:
        what = prepare(task, root)
        made = competition.load(root, task.id)
        train, test = made.tables[:2]
        metric = f"{task.metric} {'↓' if made.lower_is_better else '↑'}"
        bars = (f"{made.medal_scores[2]:.4g}", f"{made.median:.4g}")
        table.add_row(task.id, metric, str(train.rows), str(test.rows), *bars, what)
    Console(width=max(Console().width, 100)).print(table)  # a pipe's 80 columns would cut words


def refit() -> None:
    from jaxrl_code.tasks import baselines, leaderboards  # scikit-learn's models take seconds to import

    boards = {task.id: baselines.leaderboard(task) for task in BUILTINS}
    baselines.write_module(boards, Path(leaderboards.__file__))
    leaderboards.LEADERBOARDS.update({name: tuple(scores) for name, scores in boards.items()})


if __name__ == "__main__":
    main()
