"""Runs programs on this machine: in a bubblewrap box where one can be made, else as a plain process group."""

from __future__ import annotations

import asyncio
import os
import shutil
import sys
from pathlib import Path

from sandbox import bwrap as box
from sandbox import scratch, seccomp
from sandbox.cgroup import CgroupRoot, find_root
from sandbox.local_run import LocalRun, Machine
from sandbox.process import Process
from sandbox.protocol import Capabilities, Job, Limits, Result, check

# Built-in tasks are made from data sets that these packages ship: shown in the box they would be the answers.
DATA_SETS = ("sklearn/datasets/data", "bokeh_sampledata")


class LocalBackend:
    """`bubblewrap` and `cgroups`: None uses them where they work, False never, True makes their lack an error."""

    def __init__(
        self,
        *,
        python: str = sys.executable,
        bubblewrap: bool | None = None,
        cgroups: bool | None = None,
        state_dir: Path | None = None,
        hidden: tuple[str, ...] | None = None,
    ) -> None:
        self._python = box.Python.find(python)
        self._wants = {"bubblewrap": bubblewrap, "cgroups": cgroups}
        self._state_dir = state_dir or scratch.default_state_dir("local")
        data = (os.path.join(folder, name) for folder in self._python.packages for name in DATA_SETS)
        self._hidden = tuple(path for path in (hidden if hidden is not None else data) if os.path.isdir(path))
        self._cleanups: set[asyncio.Task[None]] = set()

    async def start(self) -> Capabilities:
        owner = scratch.Owner(self._state_dir)
        groups = find_root() if self._wants["cgroups"] is not False else "turned off"
        if isinstance(groups, CgroupRoot):
            groups = await _join_works(groups, f"{owner.name}.probe")
        mounts = scratch.can_mount(owner)
        drops = mounts and os.geteuid() == 0
        bwrap, no_bwrap = self._find_bwrap(owner, drops)
        self._machine = Machine(
            owner,
            self._python,
            bwrap,
            groups if isinstance(groups, CgroupRoot) else None,
            mounts,
            self._hidden,
            drops and bool(bwrap),
        )
        await self._reap()
        lacks = {"bubblewrap": no_bwrap, "cgroups": groups if isinstance(groups, str) else ""}
        lacks = {name: reason for name, reason in lacks.items() if reason}
        if missing := [name for name in lacks if self._wants[name]]:
            await self.close()
            raise ValueError(f"{missing[0]}: asked for, but unusable here: {lacks[missing[0]]}")
        capabilities = self._capabilities()
        if lacks:
            reasons = "; ".join(f"no {name} ({reason})" for name, reason in lacks.items())
            missing = ", ".join(capabilities.not_held)
            print(f"WEAK ISOLATION, fit for development only: {reasons}. Not held back: {missing}.", file=sys.stderr)
        return capabilities

    async def run(self, job: Job) -> Result:
        check(job)
        run = LocalRun(self._machine, job)
        try:
            await run.go()
        except OSError as error:  # a full disk, no more pids or descriptors: ours, not the program's
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
        await asyncio.to_thread(self._machine.owner.close)

    async def _reap(self) -> None:
        """Ends what owners that died without closing left behind."""
        machine = self._machine
        for name in machine.owner.dead():
            for group in machine.cgroups.leftovers(name) if machine.cgroups else ():
                await group.kill()
                group.remove()
            machine.owner.remove_dead(name)

    def _find_bwrap(self, owner: scratch.Owner, drops: bool) -> tuple[str, str]:
        """The path of a bubblewrap that works, or the reason why none does."""
        if self._wants["bubblewrap"] is False:
            return "", "turned off"
        path = shutil.which("bwrap")
        if path is None:
            return "", "not installed"
        probe = owner.folder / "probe"
        probe.mkdir()
        reason = box.works(path, self._python, probe, os.geteuid() + 1 if drops else None)
        scratch.remove_tree(probe)
        return ("", reason) if reason else (path, "")

    def _capabilities(self) -> Capabilities:
        machine = self._machine
        boxed, grouped = bool(machine.bwrap), machine.cgroups is not None
        holds = {
            "wall clock": True,
            "output": True,
            "network": boxed,
            "file system": boxed,
            "read-only data": boxed,
            "environment": True,
            "daemons": boxed or grouped,
            "memory": grouped,
            "processes": grouped or (boxed and os.geteuid() != 0),
            "cpu share": grouped,
            "scratch bytes": boxed or machine.mounts,
            "scratch files": machine.mounts,
            "own uid a run": machine.drops,
            "system call filter": boxed and seccomp.program() is not None,
        }
        kind = f"local ({'bubblewrap' if boxed else 'plain process'}, {'cgroups' if grouped else 'no cgroups'})"
        return Capabilities(kind, *(tuple(name for name in holds if holds[name] is held) for held in (True, False)))


async def _join_works(root: CgroupRoot, name: str) -> CgroupRoot | str:
    """Makes a group, has a process join it and kills it there: the whole of what a run needs."""
    try:
        group = root.create(name, Limits())
        try:
            seen: list[bytes] = []
            process = Process(["/bin/sleep", "10"], joins=group.joins, env={}, cwd="/", on_output=seen.append)
            for _ in range(500):
                if len(group.pids()) or process.exited.done():
                    break
                await asyncio.sleep(0.002)
            joined = bool(group.pids())
            await group.kill()
            process.kill_group()
            await process.exited
            process.close()
        finally:
            group.remove()
    except OSError as error:
        return f"cgroup: {error}"
    return root if joined else f"cgroup: a process can't join: {b''.join(seen).decode(errors='replace')[:200]}"
