"""A flat dict a step, to TensorBoard's event files and to metrics.jsonl, and a clock for the phases of a step.

What is logged at step k is fetched and written when step k + 1 is logged (or at `flush`), so that logging never waits
for the device. A run that resumes from step k first drops whatever was written after it: nothing stands twice.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import json
import logging
import math
import os
import re
import struct
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from tensorboardX import summary
from tensorboardX.event_file_writer import EventsWriter
from tensorboardX.proto.event_pb2 import Event  # pyright: ignore[reportAttributeAccessIssue]

GROUPS = ("actor", "critic", "rollout", "env", "time", "eval")
NAME = re.compile(rf"({'|'.join(GROUPS)})(/[a-z0-9_.-]+)+")
WORK = ("sample", "sandbox", "update")  # what a step is for; the rest of its time is overhead

Rows = list[tuple[int, dict[str, float | None]]]  # (step, numbers by name; None for one that isn't finite)

log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class Mean:
    """A mean over a varying count, kept as (total, count): a mean of means would weigh small batches too much."""

    total: Any  # number or scalar array
    count: Any

    def __add__(self, other: Mean) -> Mean:
        return Mean(self.total + other.total, self.count + other.count)


class Clock:
    """Seconds of wall time in which each phase was active. Phases may nest, overlap and run many times at once."""

    def __init__(self) -> None:
        self._active: collections.Counter[str] = collections.Counter()
        self._since: dict[str, float] = {}
        self._seconds: collections.defaultdict[str, float] = collections.defaultdict(float)
        self._start = time.perf_counter()

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        names = (name, "/work") if name in WORK else (name,)  # '/work': any of WORK, so that overlap counts once
        for n in names:
            if not self._active[n]:
                self._since[n] = time.perf_counter()
            self._active[n] += 1
        try:
            yield
        finally:
            for n in names:
                self._active[n] -= 1
                if not self._active[n]:
                    self._seconds[n] += time.perf_counter() - self._since[n]

    def read(self) -> dict[str, float]:
        """time/step_s, time/<phase>_s and time/other_share (outside WORK) since the last reading."""
        now = time.perf_counter()
        for name in self._active:
            if self._active[name]:
                self._seconds[name] += now - self._since[name]
                self._since[name] = now
        seconds, self._seconds = self._seconds, collections.defaultdict(float)
        wall, self._start = now - self._start, now
        other = 1.0 - seconds.pop("/work", 0.0) / wall
        return {"time/step_s": wall, "time/other_share": other} | {f"time/{n}_s": s for n, s in seconds.items()}


class Metrics:
    """Writes `workdir`/metrics.jsonl (one line a step) and event files for `tensorboard --logdir workdir`.

    `resume_step` is the step of the restored checkpoint; whatever `workdir` holds after it is removed (-1: everything).
    """

    def __init__(self, workdir: str | os.PathLike[str], resume_step: int = -1) -> None:
        folder = Path(workdir)
        folder.mkdir(parents=True, exist_ok=True)
        self._path = folder / "metrics.jsonl"
        self._clock = Clock()
        self._step, self._written = resume_step, resume_step
        self._scalars: dict[str, Any] = {}
        self._others: list[tuple[str, str, Any]] = []  # kind, name, value
        _truncate_lines(self._path, resume_step)
        # The ordinal keeps files in order, and apart, when two runs start within a second.
        files = sorted(folder.glob("events.out.tfevents.*"))
        for path in files:
            _truncate_events(path, resume_step)
        self._lines = self._path.open("a")
        self._events = EventsWriter(str(folder / "events"), f".{len(files):04d}")

    def phase(self, name: str) -> contextlib.AbstractContextManager[None]:
        """`with metrics.phase('sample'):` counts towards time/sample_s."""
        _check_name(f"time/{name}_s")
        return self._clock.phase(name)

    def times(self) -> dict[str, float]:
        """The seconds by phase since the last call, to be logged with the step."""
        return self._clock.read()

    def log(self, step: int, scalars: Mapping[str, Any]) -> Rows:
        """Takes numbers, scalar arrays and `Mean`s; returns the earlier step that this call wrote, as a list of 0 or 1.

        A step may be logged in parts: `Mean`s of one name add up, anything else must come once.
        """
        for name in scalars:
            _check_name(name)
        written = self._advance(step)
        for name, value in scalars.items():
            _start_fetch(value)
            if name in self._scalars:
                if not isinstance(value, Mean):
                    raise ValueError(f"metric {name} logged twice at step {step}: give it as a Mean, or once")
                value = self._scalars[name] + value
            self._scalars[name] = value
        return written

    def histogram(self, step: int, name: str, values: Any) -> Rows:
        return self._add(step, "histogram", name, values)

    def text(self, step: int, name: str, markdown: str) -> Rows:
        """Markdown for TensorBoard's text tab; what others wrote goes through `sample_markdown` or `fenced`."""
        return self._add(step, "text", name, markdown)

    def flush(self) -> Rows:
        """Writes all that was logged and waits for the disk. Called before a checkpoint: its step is then closed."""
        written = self._write()
        self._lines.flush()
        os.fsync(self._lines.fileno())
        self._events.flush()
        return written

    def close(self) -> Rows:
        written = self.flush()
        self._lines.close()
        self._events.close()
        return written

    def _add(self, step: int, kind: str, name: str, value: Any) -> Rows:
        _check_name(name)
        written = self._advance(step)
        _start_fetch(value)
        self._others.append((kind, name, value))
        return written

    def _advance(self, step: int) -> Rows:
        if step < self._step or step <= self._written:
            last = max(self._step, self._written)
            raise ValueError(f"step {step} comes after step {last} (a flush closes its step): steps must go up")
        written = self._write() if step > self._step else []
        self._step = step
        return written

    def _write(self) -> Rows:
        """Fetches and writes the open step."""
        if not self._scalars and not self._others:
            return []
        step, now = self._step, time.time()
        row: dict[str, float | None] = {}
        strange = []
        for name, value in self._scalars.items():
            number = _number(value)
            if number is None:
                continue
            finite = math.isfinite(number)
            row[name] = number if finite else None
            if not finite:
                strange.append(name)
            self._event(step, now, summary.scalar(name, number))
        for kind, name, value in self._others:
            if kind == "text":
                self._event(step, now, summary.text(name, value))
                continue
            array = np.asarray(value, np.float64).ravel()
            kept = array[np.isfinite(array)]
            if kept.size < array.size:
                strange.append(name)
            if kept.size:
                self._event(step, now, summary.histogram(name, kept, bins=30))
        line: dict[str, Any] = {"step": step, "time/unix_s": now, **row}
        if strange:
            line["nonfinite"] = strange
            log.warning("step %d: not finite: %s", step, ", ".join(strange))
        self._lines.write(json.dumps(line, allow_nan=False) + "\n")
        self._lines.flush()
        self._scalars, self._others, self._written = {}, [], step
        return [(step, row)]

    def _event(self, step: int, now: float, value: Any) -> None:
        self._events.write_event(Event(step=step, wall_time=now, summary=value))


def fenced(text: str, language: str = "", limit: int = 20_000) -> str:
    """`text` as a markdown code block that nothing inside it can end; its middle is cut past `limit` characters."""
    if len(text) > limit:
        text = f"{text[: limit // 2]}\n... {len(text) - limit} characters cut ...\n{text[-(limit // 2) :]}"
    longest = max((len(run) for run in re.findall(r"`+", text)), default=0)
    fence = "`" * max(3, longest + 1)
    return f"{fence}{language}\n{text}\n{fence}\n"


def sample_markdown(facts: Mapping[str, Any], program: str, output: str) -> str:
    """One sampled program for people: its facts (task, outcome, reward...), source and terminal output."""
    lines = "\n".join(f"{name}: {value}" for name, value in facts.items())
    return f"{fenced(lines)}\n{fenced(program, 'python')}\n{fenced(output, limit=8000)}"


def _check_name(name: str) -> None:
    if not NAME.fullmatch(name):
        raise ValueError(f"metric name {name!r}: write group/snake_case with a group of {', '.join(GROUPS)}")


def _start_fetch(value: Any) -> None:
    """Lets device arrays travel to the host while the device goes on."""
    for leaf in (value.total, value.count) if isinstance(value, Mean) else (value,):
        if hasattr(leaf, "copy_to_host_async"):
            leaf.copy_to_host_async()


def _number(value: Any) -> float | None:
    """A python number; None for a mean over nothing."""
    if not isinstance(value, Mean):
        return np.asarray(value).item()
    total, count = float(np.asarray(value.total)), float(np.asarray(value.count))
    return total / count if count else None


def _replace(path: Path, data: bytes) -> None:
    """Puts `data` in the place of a file, whole or not at all."""
    temporary = path.with_name(f".{path.name.split('.')[0]}.tmp")
    with temporary.open("wb") as out:
        out.write(data)
        out.flush()
        os.fsync(out.fileno())
    os.replace(temporary, path)


def _truncate_lines(path: Path, step: int) -> None:
    """Keeps the lines of a metrics.jsonl up to `step`, a half-written last line not among them."""
    if not path.exists():
        return
    kept = []
    for line in path.read_bytes().splitlines(keepends=True):
        if not line.endswith(b"\n") or json.loads(line)["step"] > step:
            break
        kept.append(line)
    _replace(path, b"".join(kept))


def _truncate_events(path: Path, step: int) -> None:
    """Keeps the records of an event file up to `step`, a half-written last one not among them.

    TensorBoard's own way (a SessionLog with a purge step) leaves the text of the dropped steps standing.
    A record is: uint64 length, uint32 crc of it, data, uint32 crc of the data.
    """
    data, kept, at = path.read_bytes(), [], 0
    while len(data) - at >= 12:
        length = struct.unpack_from("<Q", data, at)[0]
        end = at + 12 + length + 4
        if not length or end > len(data):
            break
        event = Event.FromString(data[at + 12 : end - 4])
        if event.step <= step or event.HasField("file_version"):
            kept.append(data[at:end])
        at = end
    _replace(path, b"".join(kept))
