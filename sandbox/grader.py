"""Grades submissions outside the trainer's process: killable, strict, the hidden answers never near a sandbox.

`Grader` keeps one process (sandbox.grader_child) that has its imports behind it and forks a child for every grading,
with limits on time and memory. The trainer itself is never forked, and its `__main__` never imported again. What goes
wrong on our side (a broken answers file, a grader that hangs or dies) is a Grade with `infra`, never a score of 0.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import os
import signal
import sys
from typing import Any

from sandbox.grade import Grade, GradeSpec, Reason

_MAX_BYTES = 64 << 20  # of any submission; a competition's own cap is tighter
_MAX_LINE = 1 << 20
_START_S = 120.0  # for imports, on a busy machine
_GRACE_S = 10.0  # for queueing and forking, beside a grading's own limit
_MAIN = "import json, sys; sys.path[:] = json.loads(sys.argv[1])['path']; from sandbox.grader_child import main; main()"


class Grader:
    def __init__(
        self, workers: int = 2, timeout_s: float = 60.0, memory_mb: int = 2048, preload: tuple[str, ...] = ()
    ) -> None:
        """At most `workers` gradings at once, each with a time limit and `memory_mb` beside what the imports take;
        `preload` names modules of grade functions, which else every grading imports anew."""
        for name, value in (("workers", workers), ("timeout_s", timeout_s), ("memory_mb", memory_mb)):
            if value <= 0:
                raise ValueError(f"grader {name} = {value} must be above 0")
        self._timeout_s = timeout_s
        path = [os.path.abspath(entry) for entry in sys.path]  # '' is the working directory
        self._config = json.dumps(
            {"path": path, "preload": preload, "timeout_s": timeout_s, "memory_mb": memory_mb},
        )
        self._slots = asyncio.Semaphore(workers)
        self._starting = asyncio.Lock()
        self._server: _Server | None = None
        self._closed = False

    async def start(self) -> None:
        """Starts the process and returns; its imports go on in the background."""
        await self._running()

    async def grade(self, submission: bytes | None, spec: GradeSpec) -> Grade:
        """Never raises for what a submission holds or a grade function does."""
        if submission is None:
            return Grade(None, False, Reason.NONE)
        if len(submission) > _MAX_BYTES:
            return Grade(None, False, Reason.TOO_LARGE)
        async with self._slots:
            answer: dict[str, Any] = {}
            for _ in range(2):  # a second try where the process died under us
                server = await self._running()
                try:
                    answer = await server.ask(submission, dataclasses.asdict(spec), self._timeout_s + _GRACE_S)
                    break
                except (ConnectionError, TimeoutError) as error:
                    await server.kill()
                    answer = {"fault": f"the grader's process failed ({error or type(error).__name__})"}
        if "fault" in answer:
            return Grade(None, False, Reason.OUR_FAULT, detail=answer["fault"])
        return Grade(answer["score"], answer["valid"], Reason[answer["reason"]], tuple(answer["flags"]))

    async def check(self, spec: GradeSpec) -> None:
        """Grades the sample submission. Raises ValueError where a competition can't be graded at all."""
        try:
            with open(spec.sample, "rb") as file:
                sample = file.read()
        except OSError as error:
            raise ValueError(f"sample submission {spec.sample} can't be read: {error.strerror}") from None
        grade = await self.grade(sample, spec)
        if grade.infra:
            raise ValueError(f"answers {spec.answers} can't be graded against: {grade.detail}")

    async def close(self) -> None:
        """Ends the process and whatever it runs."""
        self._closed = True
        async with self._starting:
            if self._server is not None:
                await self._server.close()
                self._server = None

    async def _running(self) -> _Server:
        async with self._starting:
            if self._closed:
                raise RuntimeError("the grader is closed")
            if self._server is None or self._server.dead:
                if self._server is not None:
                    await self._server.kill()
                self._server = await _Server.start(self._config)
            return self._server


class _Server:
    """The process, and the questions that it has not answered yet."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self.process = process
        self.dead = False
        self._asked: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self._number = 0
        self._ready: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._writing = asyncio.Lock()
        self._reader = asyncio.create_task(self._read())

    @classmethod
    async def start(cls, config: str) -> _Server:
        # One thread each: a forked child must not meet another thread's locks, and gradings run side by side.
        threads = {f"{name}_NUM_THREADS": "1" for name in ("OMP", "OPENBLAS", "MKL", "NUMEXPR")}
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-I", "-c", _MAIN, config),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.DEVNULL,
            env={**os.environ, **threads},
            start_new_session=True,  # its group can be killed as one, and Ctrl-C leaves it to close()
            limit=_MAX_LINE,
        )
        return cls(process)

    async def ask(self, submission: bytes, spec: dict[str, Any], limit_s: float) -> dict[str, Any]:
        """Raises ConnectionError where the process died, TimeoutError where it doesn't answer."""
        async with asyncio.timeout(_START_S):
            await asyncio.shield(self._ready)
        async with asyncio.timeout(limit_s):
            self._number += 1
            number, answer = self._number, asyncio.get_running_loop().create_future()
            self._asked[number] = answer
            try:
                head = json.dumps({"id": number, "spec": spec, "size": len(submission)}).encode()
                async with self._writing:  # a request is never interleaved with another
                    if self.dead or self.process.stdin is None:
                        raise ConnectionError("it has ended")
                    self.process.stdin.write(head + b"\n" + submission)
                    await self.process.stdin.drain()
                return await answer
            finally:
                self._asked.pop(number, None)

    async def _read(self) -> None:
        assert self.process.stdout is not None
        reason = "it died"
        while line := await self.process.stdout.readline():
            answer = json.loads(line)
            if "ready" in answer and not self._ready.done():
                self._ready.set_result(None)
            reason = answer.get("fatal", reason)
            if (future := self._asked.get(answer.get("id", 0))) is not None and not future.done():
                future.set_result(answer)
        self.dead = True
        for future in (self._ready, *self._asked.values()):
            if not future.done():
                future.set_exception(ConnectionError(reason))
        self._ready.exception()  # seen: nobody may be waiting for it

    async def close(self) -> None:
        """Ends by end of input, by force after two seconds."""
        if self.process.stdin is not None:
            self.process.stdin.close()
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self.process.wait(), 2.0)
        await self.kill()

    async def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):  # children that outlived it are in its group
            os.killpg(self.process.pid, signal.SIGKILL)
        await self.process.wait()
        await self._reader
