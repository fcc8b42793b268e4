"""A box's processes as seen from the host: spawned from the event loop's thread, watched by pidfd, killed for sure."""

from __future__ import annotations

import asyncio
import contextlib
import os
import resource
import signal
import subprocess
from collections.abc import Callable, Sequence

CANT_JOIN = 97
# Joins each cgroup before anything else runs, or refuses. A shell, since preexec_fn would fork the whole manager.
_LAUNCH = f"""while [ "$1" != -- ]; do echo 0 > "$1" || exit {CANT_JOIN}; shift; done; shift
ulimit -c 0; ulimit -n 1024 2>/dev/null; exec "$@" """


class Process:
    """One child of ours in its own session, its output read as it comes."""

    def __init__(
        self,
        argv: Sequence[str],
        *,
        joins: Sequence[str] = (),
        env: dict[str, str],
        cwd: str,
        pass_fds: tuple[int, ...] = (),
        on_output: Callable[[bytes], None],
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._on_output = on_output
        self.exited: asyncio.Future[int] = self._loop.create_future()  # the exit code, 128 + n for signal n
        self.exit_at = 0.0
        self.usage: resource.struct_rusage | None = None
        self._out, write = os.pipe2(os.O_CLOEXEC)
        os.set_blocking(self._out, False)
        try:
            self._popen = subprocess.Popen(
                ["/bin/sh", "-c", _LAUNCH, "sh", *joins, "--", *argv],
                stdin=subprocess.DEVNULL,
                stdout=write,
                stderr=write,
                env=env,
                cwd=cwd,
                pass_fds=pass_fds,
                start_new_session=True,
            )
        except BaseException:
            os.close(self._out)
            raise
        finally:
            os.close(write)
        self.pid = self._popen.pid
        self._pidfd = os.pidfd_open(self.pid)
        self._loop.add_reader(self._out, self._read)
        self._loop.add_reader(self._pidfd, self._reap)

    def kill_group(self) -> None:
        """Kills the session's first process group; only before the exit is collected, when its id can't be reused."""
        if not self.exited.done():
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.pid, signal.SIGKILL)

    async def drained(self, limit_s: float = 2.0) -> None:
        """Reads what is left in the pipe, once everybody who could write to it is dead."""
        end = self._loop.time() + limit_s
        while self._out >= 0 and self._loop.time() < end:
            if not self._read():
                await asyncio.sleep(0.001)

    def close(self) -> None:
        self._stop_reading()
        if self._pidfd >= 0:
            self._loop.remove_reader(self._pidfd)
            os.close(self._pidfd)
            self._pidfd = -1

    def _read(self) -> bool:
        try:
            data = os.read(self._out, 1 << 18)
        except BlockingIOError:
            return False
        if data:
            self._on_output(data)
        else:
            self._stop_reading()
        return True

    def _stop_reading(self) -> None:
        if self._out >= 0:
            self._loop.remove_reader(self._out)
            os.close(self._out)
            self._out = -1

    def _reap(self) -> None:
        pid, status, usage = os.wait4(self.pid, os.WNOHANG)
        if not pid:
            return
        self.exit_at = self._loop.time()
        self._loop.remove_reader(self._pidfd)
        code = os.waitstatus_to_exitcode(status)
        self._popen.returncode = code  # collected here, since Popen wouldn't give the usage
        self.usage = usage
        if not self.exited.done():
            self.exited.set_result(code if code >= 0 else 128 - code)


def tree(root: int, worth_bytes: int) -> tuple[int, int]:
    """Processes below and including `root` or in its session: their number, and the memory that they fill.

    Memory is resident bytes, where those exceed `worth_bytes` with each shared page counted once (slower to read).
    """
    page = resource.getpagesize()
    parents: dict[int, tuple[int, int, int]] = {}
    for name in os.listdir("/proc"):
        if name.isdigit():
            with contextlib.suppress(OSError, ValueError, IndexError), open(f"/proc/{name}/stat", "rb") as file:
                fields = file.read().rpartition(b")")[2].split()
                parents[int(name)] = int(fields[1]), int(fields[3]), int(fields[21]) * page
    inside = {pid for pid, (_, session, _) in parents.items() if pid == root or session == root}
    grew = True
    while grew:
        found = {pid for pid, (parent, _, _) in parents.items() if parent in inside} - inside
        inside |= found
        grew = bool(found)
    resident = sum(parents[pid][2] for pid in inside)
    return len(inside), resident if resident <= worth_bytes else sum(map(_proportional, inside))


def _proportional(pid: int) -> int:
    with contextlib.suppress(OSError), open(f"/proc/{pid}/smaps_rollup", "rb") as file:
        for line in file:
            if line.startswith(b"Pss:"):
                return int(line.split()[1]) << 10
    return 0
