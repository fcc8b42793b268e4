"""The bubblewrap box: every namespace, a root built from read-only binds, nothing writable that isn't sized."""

from __future__ import annotations

import dataclasses
import functools
import json
import os
import shutil
import subprocess
from pathlib import Path

from sandbox import seccomp
from sandbox.protocol import Limits

HARNESS = Path(__file__).with_name("harness.py")
BOX_UID = 1000
SETPRIV = "/usr/bin/setpriv"
TMP_MB, SHM_MB = 64, 256  # beside scratch_mb; both are charged to the run's memory where a cgroup holds it
_ETC = ("ld.so.cache", "ld.so.conf", "ld.so.conf.d", "alternatives", "localtime", "ssl/openssl.cnf")


@dataclasses.dataclass(frozen=True)
class Python:
    """An interpreter and the folders that it lives in: a virtual environment's own, and its base's."""

    executable: str
    prefixes: tuple[str, ...]
    packages: tuple[str, ...]  # site-packages

    @classmethod
    @functools.cache
    def find(cls, executable: str) -> Python:
        ask = "import json, os, site, sys; print(json.dumps([sys.prefix, sys.base_prefix, sys.base_exec_prefix, "
        ask += "os.path.dirname(os.path.realpath(sys.executable)), site.getsitepackages()]))"
        try:
            argv = [executable, "-I", "-c", ask]
            answer = subprocess.run(argv, capture_output=True, text=True, timeout=30, check=True)
        except (OSError, subprocess.SubprocessError) as error:
            raise ValueError(f"python: {executable!r} doesn't run ({error}); give an interpreter's path") from error
        *prefixes, packages = json.loads(answer.stdout)
        kept: list[str] = []
        for prefix in sorted({os.path.realpath(p) for p in prefixes} | {p for p in prefixes if p != "/"}):
            if not any(Path(prefix).is_relative_to(known) for known in ("/usr", "/bin", *kept)):
                kept.append(prefix)
        return cls(os.path.abspath(shutil.which(executable) or executable), tuple(kept), tuple(packages))


@dataclasses.dataclass(frozen=True)
class Folder:
    """The working folder: one of the host's at `path`, or, where path is None, a tmpfs of the box's own that holds
    the program read from `program_fd` and whose handle the harness sends over `channel_fd`."""

    path: Path | None
    program_fd: int = -1
    channel_fd: int = -1


def command(
    bwrap: str,
    python: Python,
    limits: Limits,
    folder: Folder,
    data: str,
    *,
    hidden: tuple[str, ...] = (),
    uid: int | None,
    info_fd: int,
    filter_fd: int | None,
) -> list[str]:
    """The argv before the program's own. The working folder is shown as /scratch, the data as /scratch/data.

    `uid`: the user that the program becomes, for a manager that is root: a box of root's in a user namespace is still
    root to the files of /proc. None for anybody else, who needs a user namespace to make the others.
    """
    argv = [bwrap, "--die-with-parent", "--new-session", "--info-fd", str(info_fd), "--cap-drop", "ALL"]
    argv += ["--unshare-ipc", "--unshare-pid", "--unshare-net", "--unshare-uts", "--unshare-cgroup-try"]
    if uid is None:
        argv += ["--unshare-user", "--disable-userns", "--uid", str(BOX_UID), "--gid", str(BOX_UID)]
    else:
        argv += ["--cap-add", "CAP_SETUID", "--cap-add", "CAP_SETGID", "--cap-add", "CAP_SETPCAP"]
    if filter_fd is not None:
        argv += ["--seccomp", str(filter_fd)]
    argv += ["--hostname", "sbx", "--ro-bind", "/usr", "/usr"]
    for name in ("bin", "sbin", "lib", "lib32", "lib64", "libx32"):
        top = Path("/", name)
        if top.is_symlink():
            argv += ["--symlink", os.readlink(top), str(top)]
        elif top.exists():
            argv += ["--ro-bind", str(top), str(top)]
    for name in _ETC:
        argv += ["--ro-bind-try", f"/etc/{name}", f"/etc/{name}"]
    # Before the interpreter, which may live below it.
    argv += ["--perms", "1777", "--size", str(TMP_MB << 20), "--tmpfs", "/tmp"]
    for prefix in python.prefixes:
        for parent in reversed(Path(prefix).parents[:-1]):  # bwrap would make them for its own user alone
            argv += ["--perms", "0755", "--dir", str(parent)]
        argv += ["--ro-bind", prefix, prefix]
    for path in hidden:
        argv += ["--tmpfs", path, "--remount-ro", path]
    argv += ["--proc", "/proc"]
    for name in ("sys", "sysrq-trigger", "irq", "bus", "fs"):
        argv += ["--ro-bind-try", f"/proc/{name}", f"/proc/{name}"]
    argv += ["--dev", "/dev", "--perms", "1777", "--size", str(SHM_MB << 20), "--tmpfs", "/dev/shm"]
    argv += ["--remount-ro", "/dev", "--ro-bind", str(HARNESS), "/harness.py"]
    if folder.path is not None:
        argv += ["--bind", str(folder.path), "/scratch"]
    else:
        argv += ["--perms", "0700", "--size", str(limits.scratch_mb << 20), "--tmpfs", "/scratch"]
        argv += ["--file", str(folder.program_fd), "/scratch/program.py"]
    argv += ["--ro-bind", data, "/scratch/data", "--remount-ro", "/", "--chdir", "/scratch"]
    if uid is not None:
        argv += [SETPRIV, "--reuid", str(uid), "--regid", str(uid), "--clear-groups", "--inh-caps=-all"]
        argv += ["--ambient-caps=-all", "--bounding-set=-all", "--no-new-privs"]
    return argv


def environment(limits: Limits) -> dict[str, str]:
    """All that a program sees of the environment; nothing of the manager's but what the hardware asks for."""
    threads = str(max(1, int(limits.cpus)))
    names = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "NUMEXPR_NUM_THREADS")
    allowed = {
        "PATH": "/usr/local/bin:/usr/bin:/bin",
        "HOME": "/tmp",
        "USER": "sbx",  # the program's uid has no name to look up
        "LANG": "C.UTF-8",
        "PYTHONUNBUFFERED": "1",
        "PYTHONDONTWRITEBYTECODE": "1",
        "PYTHONHASHSEED": "0",
        # joblib counts the host's cores otherwise, and starts that many processes.
        "LOKY_MAX_CPU_COUNT": threads,
        **dict.fromkeys(names, threads),
    }
    if kernel := os.environ.get("OPENBLAS_CORETYPE"):  # set where OpenBLAS misreads the processor
        allowed["OPENBLAS_CORETYPE"] = kernel
    return allowed


def filter_pipe() -> int | None:
    """A descriptor to read the system call filter from, once."""
    code = seccomp.program()
    if code is None:
        return None
    read, write = os.pipe2(os.O_CLOEXEC)
    os.write(write, code)
    os.close(write)
    return read


def works(bwrap: str, python: Python, scratch: Path, uid: int | None) -> str:
    """'' if a box can be made here, or why not."""
    if uid is not None and not os.access(SETPRIV, os.X_OK):
        return f"{SETPRIV} is missing"
    read, write = os.pipe()
    filter_fd = filter_pipe()
    fds = (write,) if filter_fd is None else (write, filter_fd)
    data = str(scratch)
    argv = command(bwrap, python, Limits(), Folder(scratch), data, uid=uid, info_fd=write, filter_fd=filter_fd)
    try:
        answer = subprocess.run([*argv, "/bin/true"], pass_fds=fds, capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.SubprocessError) as error:
        return str(error)
    finally:
        for fd in (read, *fds):
            os.close(fd)
    return "" if answer.returncode == 0 else answer.stderr.strip()[:300] or f"exit code {answer.returncode}"
