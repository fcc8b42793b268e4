"""Control groups, v1 and v2: the only limits on memory and processes that a program can't step around."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import os
import signal
import time
from pathlib import Path

from sandbox.protocol import Limits

PREFIX = "jaxrl-sandbox."
CONTROLLERS = ("memory", "pids", "cpu")
_PERIOD_US = 100_000


@dataclasses.dataclass(frozen=True)
class Counters:
    """What the kernel counted for everything that ever ran in the group."""

    cpu_s: float = 0.0
    oom_kills: int = 0
    pids_hit: bool = False  # a fork was refused


@dataclasses.dataclass(frozen=True)
class Cgroup:
    """One group for one run, a folder in each hierarchy (v2: one folder)."""

    folders: tuple[Path, ...]
    unified: bool

    @property
    def joins(self) -> tuple[str, ...]:
        """Files to write a pid (0 for oneself) into before exec."""
        return tuple(str(folder / "cgroup.procs") for folder in self.folders)

    def limit(self, limits: Limits) -> None:
        memory, quota = limits.memory_mb << 20, max(1000, int(limits.cpus * _PERIOD_US))
        if self.unified:
            self._write("memory.max", memory)
            self._write("memory.swap.max", 0, optional=True)
            self._write("cpu.max", f"{quota} {_PERIOD_US}")
        else:
            self._write("memory.limit_in_bytes", memory)
            self._write("memory.memsw.limit_in_bytes", memory, optional=True)
            self._write("cpu.cfs_period_us", _PERIOD_US)
            self._write("cpu.cfs_quota_us", quota)
        self._write("pids.max", limits.processes)

    def counters(self) -> Counters:
        if self.unified:
            cpu_s = self._table("cpu.stat").get("usage_usec", 0) / 1e6
            oom_kills = self._table("memory.events").get("oom_kill", 0)
        else:
            cpu_s = int(self._read("cpuacct.usage") or 0) / 1e9
            oom_kills = self._table("memory.oom_control").get("oom_kill", 0)
        return Counters(cpu_s, oom_kills, self._table("pids.events").get("max", 0) > 0)

    def most_pids(self) -> int:
        """The most processes at once, those of groups below this one included; 0 where the kernel doesn't say."""
        return int(self._read("pids.peak") or 0)

    def pids(self) -> set[int]:
        found: set[int] = set()
        for folder in self.folders:
            with contextlib.suppress(OSError):
                found.update(int(pid) for pid in (folder / "cgroup.procs").read_text().split())
        return found - {0}

    async def kill(self, deadline_s: float = 10.0) -> bool:
        """Kills until the group is empty. False if something in it didn't die in time (stuck in the kernel)."""
        end = time.monotonic() + deadline_s
        while alive := self.pids():
            if time.monotonic() > end:
                return False
            self._write("cgroup.kill", 1, optional=True)
            for pid in alive:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            await asyncio.sleep(0.002)
        return True

    def remove(self) -> None:
        for folder in self.folders:
            with contextlib.suppress(FileNotFoundError):
                folder.rmdir()

    def _file(self, name: str) -> Path | None:
        return next((folder / name for folder in self.folders if (folder / name).exists()), None)

    def _write(self, name: str, value: int | str, optional: bool = False) -> None:
        file = self._file(name)
        if file is not None:
            file.write_text(str(value))
        elif not optional:
            raise OSError(f"cgroup file {name} is missing in {[str(folder) for folder in self.folders]}")

    def _read(self, name: str) -> str:
        file = self._file(name)
        return file.read_text() if file else ""

    def _table(self, name: str) -> dict[str, int]:
        rows = (line.split() for line in self._read(name).splitlines())
        return {row[0]: int(row[1]) for row in rows if len(row) == 2 and row[1].isdigit()}


@dataclasses.dataclass(frozen=True)
class CgroupRoot:
    """Where this process may make groups."""

    bases: tuple[Path, ...]
    unified: bool

    def create(self, name: str, limits: Limits | None = None) -> Cgroup:
        group = Cgroup(tuple(base / f"{PREFIX}{name}" for base in self.bases), self.unified)
        try:
            for folder in group.folders:
                folder.mkdir()
            if limits is not None:
                group.limit(limits)
        except BaseException:
            group.remove()
            raise
        return group

    def leftovers(self, owner: str) -> list[Cgroup]:
        names = {folder.name for base in self.bases for folder in base.glob(f"{PREFIX}{owner}.*")}
        return [Cgroup(tuple(base / name for base in self.bases), self.unified) for name in sorted(names)]


def find_root(every: bool = False) -> CgroupRoot | str:
    """The groups that this process may make, or the reason why it may make none.

    `every`: in all hierarchies of v1 and at their top, as the parent of an engine's own groups has to be.
    """
    mounts = [line.split() for line in Path("/proc/self/mountinfo").read_text().splitlines()]
    own: dict[str, str] = {}  # controller ('' in v2) -> this process's group
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _, names, path = line.split(":", 2)
        own |= dict.fromkeys(names.split(",") if names else [""], path)
    v1: dict[str, Path] = {}
    v2: Path | None = None
    for mount in mounts:
        kind, options = mount[mount.index("-") + 1], mount[mount.index("-") + 3].split(",")
        if kind == "cgroup":
            v1 |= {name: Path(mount[4]) for name in options if name in own}
        elif kind == "cgroup2":
            v2 = Path(mount[4])
    needed = ("memory", "pids", "cpu", "cpuacct")
    if v1.keys() >= set(needed):
        tops = dict.fromkeys(v1.values() if every else (v1[name] for name in needed))
        if every and v2 is not None:  # beside v1: runc makes groups there too
            tops[v2] = None
        names = {path: name for name, path in v1.items()}
        bases = [_writable(top, "/" if every else own.get(names[top], "/")) for top in tops]
        if None in bases:
            return "no right to write to the cgroup v1 hierarchies"
        return CgroupRoot(tuple(base for base in bases if base is not None), unified=False)
    if v2 is None:
        return "no cgroup hierarchy is mounted"
    base = _writable(v2, "/" if every else own.get("", "/"))
    if base is None:
        return f"no right to write to {v2}"
    try:
        missing = set(CONTROLLERS) - set((base / "cgroup.subtree_control").read_text().split())
        if missing:
            (base / "cgroup.subtree_control").write_text(" ".join(f"+{name}" for name in sorted(missing)))
    except OSError as error:
        return f"{base}: controllers {', '.join(CONTROLLERS)} can't be passed on ({error.strerror})"
    return CgroupRoot((base,), unified=True)


def _writable(mount: Path, own: str) -> Path | None:
    """The topmost group on the way to our own in which we may make another."""
    path = mount
    for part in ("", *Path(own).parts[1:]):
        path = path / part
        if path.is_dir() and os.access(path, os.W_OK) and os.access(path / "cgroup.procs", os.W_OK):
            return path
    return None
