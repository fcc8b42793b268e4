"""Runs programs in single-use containers of a Docker engine. Every call to the engine has a deadline."""

from __future__ import annotations

import asyncio
import os
import sys
import time
from pathlib import Path
from typing import Any

import aiodocker
import aiohttp

from sandbox import scratch
from sandbox.cgroup import CgroupRoot, find_root
from sandbox.docker_run import DEADLINE_LABEL, DEADLINE_S, OWNER_LABEL, STATE_LABEL, DockerRun, Engine
from sandbox.protocol import Capabilities, Job, Result, check

FORGET_S = 60.0  # a container of nobody's that we know is removed this long past its deadline


class DockerBackend:
    """`socket` is the engine's unix socket ($DOCKER_HOST, else the usual one); `python` is a path in the image."""

    def __init__(
        self,
        *,
        image: str = "jaxrl-sandbox",
        socket: str = "",
        python: str = "python3",
        runtime: str = "",
        state_dir: Path | None = None,
    ) -> None:
        address = socket or os.environ.get("DOCKER_HOST", "/var/run/docker.sock")
        self._socket = address.removeprefix("unix://")
        if not self._socket.startswith("/"):
            raise ValueError(f"socket: {address!r} must be a unix socket: the engine has to see this machine's folders")
        self._image, self._python, self._runtime = image, python, runtime
        self._state_dir = state_dir or scratch.default_state_dir("docker")
        self._cleanups: set[asyncio.Task[None]] = set()

    async def start(self) -> Capabilities:
        # The default connector stops at 100 connections, and a hundred waits would starve every other call.
        connector = aiohttp.UnixConnector(self._socket, limit=0)
        client = aiodocker.Docker(
            url="unix://localhost", connector=connector, timeout=aiohttp.ClientTimeout(total=None)
        )
        owner = None
        try:
            info = await self._look(client)
            owner = scratch.Owner(self._state_dir)
            groups = find_root(every=True) if info["CgroupDriver"] == "cgroupfs" else None
            self._seccomp = any("name=seccomp" in option for option in info["SecurityOptions"])
            self._engine = Engine(
                client=client,
                owner=owner,
                image=self._image,
                python=self._python,
                runtime=self._runtime,
                groups=groups if isinstance(groups, CgroupRoot) else None,
                mounts=scratch.can_mount(owner),
            )
            await self._reap()
        except BaseException:
            await client.close()
            await connector.close()
            if owner is not None:
                owner.close()
            raise
        self._connector = connector
        capabilities = self._capabilities()
        if not self._engine.mounts:
            print(f"docker sandbox: not held back here: {', '.join(capabilities.not_held)}.", file=sys.stderr)
        return capabilities

    async def run(self, job: Job) -> Result:
        check(job)
        run = DockerRun(self._engine, job)
        try:
            await run.go()
        except (OSError, TimeoutError, aiodocker.DockerError, aiohttp.ClientError) as error:
            run.fault = f"{type(error).__name__}: {error}"
        finally:
            # Cleaning up survives a cancellation, and close() waits for it.
            cleanup = asyncio.create_task(run.finish())
            self._cleanups.add(cleanup)
            cleanup.add_done_callback(self._cleanups.discard)
            await asyncio.shield(cleanup)
        return run.result()

    async def close(self) -> None:
        while self._cleanups:
            await asyncio.wait(self._cleanups)
        await self._engine.client.close()
        await self._connector.close()
        await asyncio.to_thread(self._engine.owner.close)

    async def _look(self, client: aiodocker.Docker) -> dict[str, Any]:
        """The engine's description, once it answers and has the image."""
        try:
            async with asyncio.timeout(DEADLINE_S["ping"]):
                info = await client.system.info()
        except (OSError, TimeoutError, aiohttp.ClientError, aiodocker.DockerError) as error:
            raise ValueError(f"socket: no Docker engine answers at {self._socket} ({error}); start one") from error
        try:
            async with asyncio.timeout(DEADLINE_S["inspect"]):
                await client.images.inspect(self._image)
        except aiodocker.DockerError as error:
            raise ValueError(f"image: {self._image!r} isn't there ({error}); make it: sandbox/build_image") from error
        if self._runtime and self._runtime not in info["Runtimes"]:
            raise ValueError(f"runtime: {self._runtime!r} must be one of the engine's {sorted(info['Runtimes'])}")
        return dict(info)

    async def _reap(self) -> None:
        """Removes the containers, groups and folders of owners that died, and what is long past its deadline."""
        engine, dead = self._engine, self._engine.owner.dead()
        async with asyncio.timeout(DEADLINE_S["list"]):
            found = await engine.client.containers.list(all=True, filters=f'{{"label": ["{OWNER_LABEL}"]}}')
        for container in found:
            labels = container["Labels"]
            ours = labels.get(STATE_LABEL) == str(engine.owner.state_dir)
            late = time.time() > float(labels[DEADLINE_LABEL]) + FORGET_S
            if late or (ours and labels[OWNER_LABEL] in dead):
                await engine.delete(container["Names"][0].removeprefix("/"))
        for name in dead:
            for group in engine.groups.leftovers(name) if engine.groups else ():
                await group.kill()
                group.remove()
            engine.owner.remove_dead(name)

    def _capabilities(self) -> Capabilities:
        engine = self._engine
        holds = dict.fromkeys(
            ("wall clock", "output", "network", "file system", "read-only data", "environment", "daemons", "memory",
             "processes", "cpu share"),
            True,
        )  # fmt: skip
        holds |= {"scratch bytes": engine.mounts, "scratch files": engine.mounts}
        holds |= {"own uid a run": os.geteuid() == 0, "system call filter": self._seccomp}
        kind = f"docker ({self._runtime or 'default runtime'})"
        return Capabilities(kind, *(tuple(name for name in holds if holds[name] is held) for held in (True, False)))
