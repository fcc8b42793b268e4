"""One run of the docker backend: a container named before it exists, and gone whatever happens."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import datetime
import itertools
import os
import time
from typing import Any

import aiodocker
import aiohttp
from aiodocker.containers import DockerContainer

from sandbox import scratch
from sandbox.bwrap import HARNESS, SHM_MB, TMP_MB, environment
from sandbox.cgroup import PREFIX, Cgroup, CgroupRoot, Counters
from sandbox.outcome import End, Evidence, conclude
from sandbox.output import Output
from sandbox.protocol import Job, Outcome, Result

DEADLINE_S = {"ping": 5.0, "list": 30.0, "create": 30.0, "start": 30.0, "inspect": 10.0, "kill": 10.0, "delete": 30.0}
START_S = 60.0  # from start's return to a running interpreter
POLL_S = 5.0  # the wait call has been seen to miss an exit (moby#35001)
OWNER_LABEL, RUN_LABEL = "jaxrl-sandbox.owner", "jaxrl-sandbox.run"
DEADLINE_LABEL, STATE_LABEL = "jaxrl-sandbox.deadline", "jaxrl-sandbox.state"


@dataclasses.dataclass(frozen=True)
class Engine:
    """What the runs of one backend share."""

    client: aiodocker.Docker
    owner: scratch.Owner
    image: str
    python: str
    runtime: str
    groups: CgroupRoot | None  # for a group around each container, whose counts outlive it
    mounts: bool
    numbers: itertools.count[int] = dataclasses.field(default_factory=itertools.count)
    # dockerd's locks make one start 10-20 times slower behind 32 others (moby#42096).
    starts: asyncio.Semaphore = dataclasses.field(
        default_factory=lambda: asyncio.Semaphore(2 * len(os.sched_getaffinity(0)))
    )

    async def delete(self, name: str) -> None:
        """Kills and removes a container by name, in any state; fine if there is none."""
        for attempt in range(3):
            try:
                async with asyncio.timeout(DEADLINE_S["delete"]):
                    await self.client.containers.container(name).delete(force=True, v=True)
                return
            except aiodocker.DockerError as error:
                if error.status == 404:
                    return
                if error.status != 409 or attempt == 2:  # 409: another call is removing it already
                    raise
                await asyncio.sleep(0.2)


class DockerRun:
    """One program from its folder to its result."""

    def __init__(self, engine: Engine, job: Job) -> None:
        self._engine, self._job, self._limits = engine, job, job.limits
        self._loop = asyncio.get_running_loop()
        self._begin = self._loop.time()
        number = next(engine.numbers)
        self._group_name = f"{engine.owner.name}.{number}"
        self._name = f"sbx-{engine.owner.name}-{number}"
        self._path = engine.owner.folder / str(number)
        self._uid = scratch.run_uid(engine.owner, number)
        scratch.check_readable(job.data_dir, self._uid)
        self._output = Output(job.nonce, job.limits.output_keep_bytes)
        self._ready: asyncio.Future[None] = self._loop.create_future()
        self._end: asyncio.Future[End] = self._loop.create_future()
        self._group: Cgroup | None = None
        self._folder_fd = -1
        self._creating: asyncio.Task[DockerContainer] | None = None
        self._tasks: list[asyncio.Task[Any]] = []
        self._state: dict[str, Any] = {}
        self._evidence: Evidence | None = None
        self._wall_s = self._start_cpu_s = self._ready_epoch = 0.0
        self.fault = ""

    async def go(self) -> None:
        engine, limits = self._engine, self._limits
        if engine.groups is not None:
            self._group = engine.groups.create(self._group_name)
        if engine.mounts:
            scratch.make_sized(self._path, limits, self._uid)
        else:
            self._path.mkdir(mode=0o700)
        scratch.put(self._path, self._job.program.encode("utf-8", "surrogatepass"), None, self._uid)
        self._folder_fd = scratch.open_folder(self._path)
        async with engine.starts:
            # Shielded: were it cancelled on the way, the container could come into being after its removal.
            self._creating = asyncio.create_task(self._create())
            container = await asyncio.shield(self._creating)
            stream = container.attach(stdout=True, stderr=True)
            async with asyncio.timeout(DEADLINE_S["start"]):
                await stream._init()  # attached before the start, so that not a byte is missed
                read = asyncio.create_task(self._read(stream))
                self._tasks.append(read)
                await container.start()
        waiting = asyncio.create_task(container.wait(condition="not-running"))
        self._tasks.append(waiting)
        await asyncio.wait({self._ready, waiting}, timeout=START_S, return_when=asyncio.FIRST_COMPLETED)
        if waiting.done():
            await asyncio.wait({read}, timeout=2.0)
        if self._output.ready_at is None:
            self.fault = f"the container didn't start the program: {self._output.prelude.strip()[-500:]}"
            return
        deadline = self._output.ready_at + limits.wall_s
        while not (waiting.done() or self._end.done()):
            left = deadline - self._loop.time()
            if left <= 0:
                self._stop(End.DEADLINE)
                break
            await asyncio.wait({waiting, self._end}, timeout=min(left, POLL_S), return_when=asyncio.FIRST_COMPLETED)
            if not engine.mounts:
                await self._poll_folder()
            if not waiting.done() and left > POLL_S and not (await self._inspect())["Running"]:
                break
        self._wall_s = self._loop.time() - self._output.ready_at
        if self._end.done():
            async with asyncio.timeout(DEADLINE_S["kill"]):
                with contextlib.suppress(aiodocker.DockerError):  # it ended by itself meanwhile
                    await container.kill(signal="SIGKILL")
            await asyncio.wait({waiting}, timeout=DEADLINE_S["kill"])
        self._state = await self._inspect()
        if self._state["Running"]:
            self.fault = "the engine doesn't end the container"
            return
        await asyncio.wait({read}, timeout=2.0)
        if not self._end.done():
            # The engine's stamp is nearer to the exit than the answer to our wait.
            stamp = self._state["FinishedAt"].rstrip("Z")[:26] + "+00:00"  # Python reads microseconds at most
            lasted = datetime.datetime.fromisoformat(stamp).timestamp() - self._ready_epoch
            self._wall_s = max(0.0, min(self._wall_s, lasted))

    async def finish(self) -> None:
        """Removes the container, reads what is to be read, removes everything. Never raises."""
        try:
            if self._creating is not None:
                await asyncio.wait({self._creating})
                await self._engine.delete(self._name)
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)  # not one of them can fail a run by itself
            self._output.close()
            if self._state and not self.fault:
                self._collect()
        except (OSError, TimeoutError, aiodocker.DockerError, aiohttp.ClientError) as error:
            self.fault = f"{type(error).__name__}: {error}"
        finally:
            if self._folder_fd >= 0:
                os.close(self._folder_fd)
            if self._path.exists():
                await asyncio.to_thread(scratch.remove_tree, self._path)
            if self._group is not None:
                with contextlib.suppress(OSError):  # the next start's reaper tries again
                    self._group.remove()

    def result(self) -> Result:
        start_s = (self._output.ready_at or self._loop.time()) - self._begin
        if self.fault or self._evidence is None:
            return Result(self._job.run_id, Outcome.INFRA, start_s=start_s, detail=self.fault)
        result = conclude(
            self._job,
            self._evidence,
            self._output,
            wall_s=self._wall_s,
            cpu_s=self._evidence.counters.cpu_s - self._start_cpu_s,
            start_s=start_s,
        )
        extra = ("cpu_unknown",) if self._group is None else ()
        extra += ("weak_isolation",) if not self._engine.mounts else ()
        return dataclasses.replace(result, flags=result.flags + extra)

    def _config(self) -> dict[str, Any]:
        engine, limits = self._engine, self._limits
        deadline = time.time() + sum(DEADLINE_S.values()) + START_S + limits.wall_s
        mounts = [
            (str(self._path), "/scratch", False),
            (self._job.data_dir, "/scratch/data", True),
            (str(HARNESS), "/harness.py", True),
        ]
        host = {
            "NetworkMode": "none",
            "ReadonlyRootfs": True,
            "Init": True,
            "CapDrop": ["ALL"],
            "SecurityOpt": ["no-new-privileges"],
            "PidsLimit": limits.processes,
            "Memory": limits.memory_mb << 20,
            "MemorySwap": limits.memory_mb << 20,
            "NanoCpus": int(limits.cpus * 1e9),
            "Ulimits": [{"Name": "core", "Soft": 0, "Hard": 0}, {"Name": "nofile", "Soft": 1024, "Hard": 1024}],
            "ShmSize": SHM_MB << 20,
            "IpcMode": "private",
            "LogConfig": {"Type": "none"},
            "Tmpfs": {"/tmp": f"size={TMP_MB}m,mode=1777,nosuid,nodev,exec"},
            "Mounts": [
                {"Type": "bind", "Source": source, "Target": target, "ReadOnly": read_only}
                for source, target, read_only in mounts
            ],
        }
        if engine.runtime:
            host["Runtime"] = engine.runtime
        if self._group is not None:
            host["CgroupParent"] = f"/{PREFIX}{self._group_name}"
        return {
            "Image": engine.image,
            "Cmd": [engine.python, "-P", "-s", "-u", "/harness.py", "program.py", str(self._job.seed)],
            "Env": [f"{name}={value}" for name, value in environment(limits).items()],
            "WorkingDir": "/scratch",
            "Hostname": "sbx",
            "User": f"{self._uid}:{self._uid}",
            "AttachStdin": False,
            "AttachStdout": True,
            "AttachStderr": True,
            "Labels": {
                OWNER_LABEL: engine.owner.name,
                STATE_LABEL: str(engine.owner.state_dir),
                RUN_LABEL: self._job.run_id,
                DEADLINE_LABEL: f"{deadline:.0f}",
            },
            "HostConfig": host,
        }

    async def _create(self) -> DockerContainer:
        async with asyncio.timeout(DEADLINE_S["create"]):
            return await self._engine.client.containers.create(self._config(), name=self._name)

    async def _read(self, stream: Any) -> None:
        """Drains the output for ever, so that a program never blocks on us."""
        try:
            while (message := await stream.read_out()) is not None:
                self._output.feed(message.data, self._loop.time())
                if self._output.ready_at is not None and not self._ready.done():
                    self._ready_epoch = time.time()
                    self._start_cpu_s = self._group.counters().cpu_s if self._group else 0.0
                    self._ready.set_result(None)
                if self._output.total > self._limits.output_kill_bytes:
                    self._stop(End.FLOOD)
        finally:
            await stream.close()

    async def _inspect(self) -> dict[str, Any]:
        async with asyncio.timeout(DEADLINE_S["inspect"]):
            return (await self._engine.client.containers.container(self._name).show())["State"]

    async def _poll_folder(self) -> None:
        size, files = await asyncio.to_thread(scratch.usage, self._path)
        if size > self._limits.scratch_mb << 20 or files > self._limits.scratch_files:
            self._stop(End.SCRATCH)

    def _stop(self, end: End) -> None:
        if not self._end.done():
            self._end.set_result(end)

    def _collect(self) -> None:
        counters = self._group.counters() if self._group is not None else Counters()
        # Where the group around it counts no kills (v1), the engine's word is all there is.
        oom_kills = max(counters.oom_kills, int(self._state["OOMKilled"]))
        hit = counters.pids_hit or (self._group is not None and self._group.most_pids() >= self._limits.processes)
        counters = Counters(counters.cpu_s, oom_kills, hit)
        submission, fault = scratch.read_submission(self._folder_fd, self._limits.submission_bytes, "/scratch")
        full = self._engine.mounts and scratch.is_full(self._folder_fd)
        end = self._end.result() if self._end.done() else End.EXIT
        self._evidence = Evidence(end, self._state["ExitCode"], counters, full, submission, fault)
