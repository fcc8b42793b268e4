"""One run of the local backend: from its folder to its result, leaving nothing behind."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import itertools
import json
import os
import select
import signal
import socket

from sandbox import bwrap as box
from sandbox import scratch
from sandbox.cgroup import Cgroup, CgroupRoot, Counters
from sandbox.outcome import End, Evidence, conclude
from sandbox.output import Output
from sandbox.process import Process, tree
from sandbox.protocol import Job, Outcome, Result

START_S = 30.0  # for a box to start and its interpreter to come up
POLL_S = 0.25


@dataclasses.dataclass(frozen=True)
class Machine:
    """What the backend found that this machine can do."""

    owner: scratch.Owner
    python: box.Python
    bwrap: str  # '' where no box can be made
    cgroups: CgroupRoot | None
    mounts: bool
    hidden: tuple[str, ...]  # folders shown empty
    drops: bool  # the manager is root, and a run has a user of its own
    numbers: itertools.count[int] = dataclasses.field(default_factory=itertools.count)

    @property
    def weak(self) -> bool:
        return not self.bwrap or self.cgroups is None


class LocalRun:
    """One program from its folder to its result."""

    def __init__(self, machine: Machine, job: Job) -> None:
        self._machine, self._job, self._limits = machine, job, job.limits
        self._loop = asyncio.get_running_loop()
        self._begin = self._loop.time()
        self._name = f"{machine.owner.name}.{next(machine.numbers)}"
        self._uid = os.geteuid()
        if machine.drops:
            self._uid = scratch.run_uid(machine.owner, int(self._name.rpartition(".")[2]))
            scratch.check_readable(job.data_dir, self._uid)
        self._path = machine.owner.folder / self._name.rpartition(".")[2]
        self._output = Output(job.nonce, job.limits.output_keep_bytes)
        self._ready = self._loop.create_future()
        self._end: asyncio.Future[End] = self._loop.create_future()
        self._group: Cgroup | None = None
        self._process: Process | None = None
        self._init_pidfd = self._folder_fd = -1  # of the box's first process; of the working folder
        self._sized = machine.mounts or bool(machine.bwrap)
        self._files = contextlib.ExitStack()
        self._exit_code: int | None = None
        self._evidence: Evidence | None = None
        self._end_at = self._start_cpu_s = 0.0
        self.fault = ""

    async def go(self) -> None:
        self._spawn()
        process = self._process
        assert process is not None
        await asyncio.wait({self._ready, process.exited}, timeout=START_S, return_when=asyncio.FIRST_COMPLETED)
        if process.exited.done():
            await process.drained()
        if self._output.ready_at is None:
            ended = f"exit code {process.exited.result()}" if process.exited.done() else f"not up after {START_S:.0f} s"
            self.fault = f"the box didn't start ({ended}): {self._output.prelude.strip()[-500:]}"
            return
        self._receive()
        deadline = self._output.ready_at + self._limits.wall_s
        while not (process.exited.done() or self._end.done()):
            left = deadline - self._loop.time()
            if left <= 0:
                self._stop(End.DEADLINE)
                break
            pause = min(left, POLL_S) if self._machine.cgroups is None or not self._sized else left
            await asyncio.wait({process.exited, self._end}, timeout=pause, return_when=asyncio.FIRST_COMPLETED)
            await self._poll()
        if process.exited.done():
            self._exit_code, self._end_at = process.exited.result(), process.exit_at
        else:
            self._end_at = self._loop.time()

    async def finish(self) -> None:
        """Kills what is left, reads what is to be read, removes everything. Never raises."""
        try:
            await self._kill()
            if self._end_at:
                self._collect()
        except OSError as error:
            self.fault = f"{type(error).__name__}: {error}"
        finally:
            if self._process is not None:
                self._process.close()
            for fd in (self._folder_fd, self._init_pidfd):
                if fd >= 0:
                    os.close(fd)
            self._files.close()
            if self._path.exists():
                await asyncio.to_thread(scratch.remove_tree, self._path)
            if self._group is not None:
                with contextlib.suppress(OSError):  # still busy: said by the fault above, removed by the next start
                    self._group.remove()

    def result(self) -> Result:
        start_s = (self._output.ready_at or self._loop.time()) - self._begin
        flags = ("weak_isolation",) if self._machine.weak else ()
        if self.fault or self._evidence is None or self._output.ready_at is None:
            return Result(self._job.run_id, Outcome.INFRA, start_s=start_s, detail=self.fault, flags=flags)
        result = conclude(
            self._job,
            self._evidence,
            self._output,
            wall_s=max(0.0, self._end_at - self._output.ready_at),
            cpu_s=self._evidence.counters.cpu_s - self._start_cpu_s,
            start_s=start_s,
        )
        return dataclasses.replace(result, flags=result.flags + flags)

    def _spawn(self) -> None:
        machine, limits, program = self._machine, self._limits, self._job.program.encode("utf-8", "surrogatepass")
        if machine.cgroups is not None:
            self._group = machine.cgroups.create(self._name, limits)
        if machine.mounts:
            scratch.make_sized(self._path, limits, self._uid)
        else:
            self._path.mkdir(mode=0o700)
        argv: list[str] = []
        fds: list[int] = []
        channel_fd = -1
        if machine.bwrap:
            self._info, write = os.pipe2(os.O_CLOEXEC)
            self._files.callback(os.close, self._info)
            fds.append(write)
            os.set_blocking(self._info, False)
            folder = box.Folder(self._path)
            if not machine.mounts:
                folder = self._inner_folder(program)
                fds += [folder.program_fd, folder.channel_fd]
                channel_fd = folder.channel_fd
            filter_fd = box.filter_pipe()
            fds += [] if filter_fd is None else [filter_fd]
            argv = box.command(
                machine.bwrap,
                machine.python,
                limits,
                folder,
                self._job.data_dir,
                hidden=machine.hidden,
                uid=self._uid if machine.drops else None,
                info_fd=write,
                filter_fd=filter_fd,
            )
        if not machine.bwrap or machine.mounts:
            scratch.put(self._path, program, None if machine.bwrap else self._job.data_dir, self._uid)
            self._folder_fd = scratch.open_folder(self._path)
        # RLIMIT_NPROC counts in the box's own user namespace, and root is exempt from it.
        nproc = limits.processes if machine.bwrap and machine.cgroups is None and os.geteuid() != 0 else 0
        harness = "/harness.py" if machine.bwrap else str(box.HARNESS)
        argv += [machine.python.executable, "-P", "-s", "-u", harness, "program.py", str(self._job.seed)]
        argv += [str(nproc), str(channel_fd)]
        try:
            self._process = Process(
                argv,
                joins=self._group.joins if self._group else (),
                env=box.environment(limits),
                cwd="/" if machine.bwrap else str(self._path),
                pass_fds=tuple(fds),
                on_output=self._on_output,
            )
        finally:
            for fd in fds:
                os.close(fd)

    def _inner_folder(self, program: bytes) -> box.Folder:
        """A sized tmpfs of the box's own, for those who may not mount; its handle comes back over a socket."""
        self._channel, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._files.enter_context(self._channel)
        self._channel.setblocking(False)
        code = os.memfd_create("program")
        with os.fdopen(os.dup(code), "wb") as file:
            file.write(program)
        os.lseek(code, 0, os.SEEK_SET)
        return box.Folder(None, code, theirs.detach())

    def _receive(self) -> None:
        """Takes the handles that only a box that is up can give."""
        if not self._machine.bwrap:
            return
        with contextlib.suppress(BlockingIOError, ProcessLookupError, ValueError):
            self._init_pidfd = os.pidfd_open(json.loads(os.read(self._info, 4096))["child-pid"])
        if not self._machine.mounts and self._folder_fd < 0:
            self._folder_fd = socket.recv_fds(self._channel, 16, 1)[1][0]

    def _on_output(self, data: bytes) -> None:
        self._output.feed(data, self._loop.time())
        if self._output.ready_at is not None and not self._ready.done():
            self._ready.set_result(None)
            self._start_cpu_s = self._group.counters().cpu_s if self._group else 0.0
        if self._output.total > self._limits.output_kill_bytes:
            self._stop(End.FLOOD)

    def _stop(self, end: End) -> None:
        if not self._end.done():
            self._end.set_result(end)

    async def _poll(self) -> None:
        """Stands in for the limits that nothing on this machine enforces."""
        assert self._process is not None
        if self._machine.cgroups is None:
            memory = self._limits.memory_mb << 20
            processes, filled = await asyncio.to_thread(tree, self._process.pid, memory)
            if filled > memory:
                self._stop(End.MEMORY)
            elif processes > self._limits.processes:
                self._stop(End.PROCESSES)
        if not self._sized:
            size, files = await asyncio.to_thread(scratch.usage, self._path)
            if size > self._limits.scratch_mb << 20 or files > self._limits.scratch_files:
                self._stop(End.SCRATCH)

    async def _kill(self) -> None:
        process = self._process
        if process is None:
            return
        if self._machine.bwrap and self._init_pidfd < 0 and self._group is None:
            # A bwrap killed while it starts can leave its child behind (bubblewrap#633): let it come up first.
            await asyncio.wait({self._ready, process.exited}, timeout=5.0, return_when=asyncio.FIRST_COMPLETED)
            with contextlib.suppress(OSError):
                self._receive()
        if self._init_pidfd >= 0:  # the kernel kills a pid namespace with its first process
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._init_pidfd, signal.SIGKILL)
        process.kill_group()
        if self._group is not None:
            await self._group.kill()
        await asyncio.wait({process.exited}, timeout=10.0)
        if self._group is not None:  # once more: the launcher, dead now, may have joined after the first look
            await self._group.kill()
        if not process.exited.done() or (self._group is not None and self._group.pids()):
            self.fault = "processes of the run can't be killed"
            return
        while self._init_pidfd >= 0 and not select.select([self._init_pidfd], [], [], 0)[0]:
            await asyncio.sleep(0.002)
        await process.drained()
        self._output.close()

    def _collect(self) -> None:
        counters = Counters()
        if self._group is not None:
            counters = self._group.counters()
        elif self._process and self._process.usage:
            counters = Counters(self._process.usage.ru_utime + self._process.usage.ru_stime)
        root = "/scratch" if self._machine.bwrap else str(self._path)
        submission, fault = scratch.read_submission(self._folder_fd, self._limits.submission_bytes, root)
        full = self._sized and scratch.is_full(self._folder_fd)
        end = self._end.result() if self._end.done() else End.EXIT
        self._evidence = Evidence(end, self._exit_code or 0, counters, full, submission, fault)
