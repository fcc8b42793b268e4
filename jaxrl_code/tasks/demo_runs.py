"""Runs demonstrations' programs fast, to show their real output in prompts that ask for a revision.

Importing pandas and scikit-learn costs a program two seconds; here a server imports them once and forks for each
program. That holds nothing back: it is for our own demonstrations only, what a policy wrote goes to the sandbox.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import linecache
import os
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Iterable
from pathlib import Path

from sandbox.protocol import Outcome, Result

_IMPORTS = ("pandas", "sklearn.ensemble", "sklearn.dummy", "sklearn.naive_bayes", "sklearn.pipeline", "sklearn.impute",
            "sklearn.preprocessing", "sklearn.feature_extraction.text", "sklearn.neighbors")  # fmt: skip
_TIMEOUT_S = 60.0
_SHOWN_AS = "/scratch/program.py"  # the program's path in a sandbox


def run_all(jobs: Iterable[tuple[str, Path]], workers: int) -> list[Result]:
    """Runs (program, data folder) pairs, `workers` at a time; results in the order of the jobs."""
    with tempfile.TemporaryDirectory() as root:
        listed = []
        for number, (program, data) in enumerate(jobs):
            box = Path(root) / str(number)
            box.mkdir()
            (box / "program.py").write_text(program)
            (box / "data").symlink_to(data)
            listed.append(str(box))
        environment = os.environ | {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
        done = subprocess.run(
            [sys.executable, "-m", __name__, str(workers)],
            input=json.dumps(listed), stdout=subprocess.PIPE, text=True, check=True, env=environment,
        )  # fmt: skip
        ended = json.loads(done.stdout)
        return [_result(Path(box), *ended[box]) for box in listed]


def _result(box: Path, status: int, wall_s: float) -> Result:
    path = box / "submission.csv"
    submission = path.read_bytes() if path.is_file() else None
    if status != 0:
        outcome = Outcome.TIMEOUT if wall_s >= _TIMEOUT_S else Outcome.USER_ERROR
    else:
        outcome = Outcome.OK if submission is not None else Outcome.NO_SUBMISSION
    output = (box / "output").read_text(errors="replace")
    return Result(box.name, outcome, wall_s=wall_s, output_head=output, submission=submission)


def _serve(boxes: list[str], workers: int) -> dict[str, tuple[int, float]]:
    for name in _IMPORTS:
        importlib.import_module(name)
    waiting, running, ended = list(reversed(boxes)), {}, {}
    while waiting or running:
        while waiting and len(running) < workers:
            box = waiting.pop()
            pid = os.fork()
            if pid == 0:
                _run(box)
            running[pid] = (box, time.monotonic())
        pid, status = os.waitpid(-1, os.WNOHANG)
        now = time.monotonic()
        if pid:
            box, start = running.pop(pid)
            ended[box] = (status, now - start)
            continue
        for pid, (_, start) in running.items():
            if now - start > _TIMEOUT_S:
                os.kill(pid, 9)
        time.sleep(0.005)
    return ended


def _run(box: str) -> None:
    """In the fork: never returns."""
    os.chdir(box)
    out = os.open("output", os.O_WRONLY | os.O_CREAT)
    os.dup2(out, 1)
    os.dup2(out, 2)
    status = 0
    try:
        source = Path("program.py").read_text()
        linecache.cache[_SHOWN_AS] = (len(source), None, source.splitlines(keepends=True), _SHOWN_AS)
        exec(compile(source, _SHOWN_AS, "exec"), {"__name__": "__main__"})
    except BaseException as error:
        status = 1
        trace = error.__traceback__  # as the interpreter prints it: without this function's frames
        while trace and trace.tb_frame.f_code.co_filename == __file__:
            trace = trace.tb_next
        traceback.print_exception(type(error), error, trace)
    with contextlib.suppress(BaseException):
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(status)


if __name__ == "__main__":
    print(json.dumps(_serve(json.load(sys.stdin), int(sys.argv[1]))))
