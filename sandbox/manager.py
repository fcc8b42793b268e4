"""The pool in front of a backend: how many boxes run at once, what queues, what is tried again."""

from __future__ import annotations

import asyncio
import dataclasses
import os
from typing import Any

from sandbox.local import LocalBackend
from sandbox.protocol import Capabilities, Job, Outcome, Result, Sandbox, check

RETRY_PAUSE_S = 0.5


class Manager:
    """A Sandbox over another: at most `max_running` boxes at once; runs lost by our own fault start again.

    Use it from one event loop, on a thread that outlives it: bubblewrap kills a box when the thread that spawned it
    ends. Durations are stamped by that loop, so it must not be blocked by computation.
    """

    def __init__(self, backend: Sandbox, *, max_running: int, infra_retries: int = 2) -> None:
        if max_running < 1:
            raise ValueError(f"max_running: {max_running} must be >= 1")
        if infra_retries < 0:
            raise ValueError(f"infra_retries: {infra_retries} must be >= 0")
        self._backend = backend
        self._slots = asyncio.Semaphore(max_running)
        self._retries = infra_retries
        self._running: set[asyncio.Task[Any]] = set()
        self._closed = False

    async def start(self) -> Capabilities:
        return await self._backend.start()

    async def run(self, job: Job) -> Result:
        check(job)
        if self._closed:
            raise RuntimeError("run() after close()")
        # A task of its own, so that close() can end it without cancelling the caller's.
        task = asyncio.create_task(self._run(job))
        self._running.add(task)
        task.add_done_callback(self._running.discard)
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            if not task.cancelled():  # the caller was cancelled: take the run along, and wait until nothing is left
                task.cancel()
                await asyncio.wait({task})
            if self._closed:
                return Result(job.run_id, Outcome.INFRA, detail="the sandbox was closed")
            raise

    async def close(self) -> None:
        """Ends whatever runs, waits until nothing of it is left."""
        if self._closed:
            return
        self._closed = True
        while self._running:
            for task in self._running:
                task.cancel()
            await asyncio.wait(self._running)
        await self._backend.close()

    async def _run(self, job: Job) -> Result:
        queued = asyncio.get_running_loop().time()
        async with self._slots:
            queue_s = asyncio.get_running_loop().time() - queued
            result = await self._backend.run(job)
            for attempt in range(self._retries):
                if result.outcome is not Outcome.INFRA:
                    break
                await asyncio.sleep(RETRY_PAUSE_S * 2**attempt)
                result = await self._backend.run(job)
        return dataclasses.replace(result, queue_s=queue_s)


def make_sandbox(
    kind: str = "auto", *, max_running: int = 0, infra_retries: int = 2, image: str = "jaxrl-sandbox", **options: Any
) -> Manager:
    """A manager over the backend of this kind, not yet started.

    'local' needs bubblewrap and cgroups, 'weak' does without either where it must, 'auto' is the best that works
    here without an engine, 'docker' talks to a Docker engine. max_running = 0 is one box a core. `options` go to the
    backend.
    """
    running = max_running or len(os.sched_getaffinity(0))
    match kind:
        case "local":
            backend: Sandbox = LocalBackend(bubblewrap=True, cgroups=True, **options)
        case "auto":
            backend = LocalBackend(**options)
        case "weak":
            backend = LocalBackend(bubblewrap=False, **options)
        case "docker":
            from sandbox.docker import DockerBackend  # nobody else has to have its client, nor to wait for its import

            backend = DockerBackend(image=image, **options)
        case _:
            raise ValueError(f"sandbox kind: {kind!r} must be 'auto', 'local', 'weak' or 'docker'")
    return Manager(backend, max_running=running, infra_retries=infra_retries)
