"""A run's working folder on the host, what is read from it, and what a dead owner left behind."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import os
import shutil
import stat
import tempfile
import uuid
from pathlib import Path

from sandbox.protocol import Limits

_libc = ctypes.CDLL(None, use_errno=True)
_MS_NOSUID, _MS_NODEV, _MNT_DETACH = 2, 4, 2
SUBMISSION = "submission.csv"


def default_state_dir(kind: str) -> Path:
    """A backend's folder, this user's, that outlives a process: the next one finds there what to clean up."""
    if os.geteuid() == 0:
        return Path("/run/jaxrl-sandbox") / kind
    return Path(os.environ.get("XDG_RUNTIME_DIR") or tempfile.gettempdir()) / f"jaxrl-sandbox-{os.geteuid()}" / kind


class Owner:
    """One manager's name and folder. The lock on it, not a pid, says that the manager lives."""

    def __init__(self, state_dir: Path) -> None:
        state_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
        status = state_dir.lstat()
        if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid():
            raise ValueError(f"state_dir: {state_dir} isn't a folder of this user's; remove it or give another")
        self.state_dir = state_dir
        self.name = uuid.uuid4().hex[:12]
        self.folder = state_dir / self.name
        # The lock is taken before the folder shows up under its name: no reaper can find it unlocked.
        hidden = Path(tempfile.mkdtemp(prefix=".new-", dir=state_dir))
        self._lock = os.open(hidden / "lock", os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
        fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        hidden.rename(self.folder)

    def dead(self) -> list[str]:
        """Names of owners whose lock nobody holds."""
        names = []
        for folder in self.state_dir.iterdir():
            if folder.name == self.name or not folder.is_dir():
                continue
            try:
                lock = os.open(folder / "lock", os.O_RDWR | os.O_CLOEXEC)
            except FileNotFoundError:
                continue  # being made
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                names.append(folder.name)
            except BlockingIOError:
                pass
            finally:
                os.close(lock)
        return names

    def remove_dead(self, name: str) -> None:
        remove_tree(self.state_dir / name)

    def close(self) -> None:
        remove_tree(self.folder)
        os.close(self._lock)


def make_sized(path: Path, limits: Limits, uid: int) -> None:
    """A folder that is a file system of its own, with a cap on bytes and on files. Needs the right to mount."""
    path.mkdir(mode=0o700)
    options = f"size={limits.scratch_mb}m,nr_inodes={limits.scratch_files},mode=0711,uid={uid},gid={uid}"
    if _libc.mount(b"tmpfs", os.fsencode(path), b"tmpfs", _MS_NOSUID | _MS_NODEV, options.encode()) != 0:
        code = ctypes.get_errno()
        path.rmdir()
        raise OSError(code, f"mount of a tmpfs at {path}: {os.strerror(code)}")


def can_mount(owner: Owner) -> bool:
    """Whether this process may mount (root outside a locked-down container)."""
    try:
        make_sized(owner.folder / "probe", Limits(scratch_mb=1, scratch_files=16), os.geteuid())
    except OSError:
        return False
    remove_tree(owner.folder / "probe")
    return True


def put(path: Path, program: bytes, data_dir: str | None, uid: int) -> None:
    """Lays out a working folder: the program, and where its data is to be bound (or a link to it, if given)."""
    (path / "program.py").write_bytes(program)
    if data_dir is None:
        (path / "data").mkdir()
    else:
        (path / "data").symlink_to(data_dir)
    if uid != os.geteuid():
        os.chown(path, uid, uid)
        os.chown(path / "program.py", uid, uid)


FIRST_UID, UIDS = 100_000, 50_000  # a user a run, where the manager is root


def run_uid(owner: Owner, number: int) -> int:
    """The user to run as: nobody on this machine if the manager is root, else the manager's own."""
    return FIRST_UID + (int(owner.name, 16) + number) % UIDS if os.geteuid() == 0 else os.geteuid()


def check_readable(data_dir: str, uid: int) -> None:
    """Raises ValueError where a run's own user couldn't read the data."""
    if uid == os.geteuid():
        return
    for path in (data_dir, *(entry.path for entry in os.scandir(data_dir))):
        needed = 0o005 if os.path.isdir(path) else 0o004
        if os.stat(path).st_mode & needed != needed:
            raise ValueError(f"data_dir: {path} isn't readable by other users; chmod -R a+rX {data_dir}")


def open_folder(path: Path) -> int:
    return os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)


def is_full(folder_fd: int) -> bool:
    """Whether a program that wants room for one more block or file in a sized folder is refused."""
    space = os.statvfs(folder_fd)
    return space.f_bavail * space.f_frsize < 1 << 16 or space.f_favail == 0


def usage(path: Path) -> tuple[int, int]:
    """Bytes and files of a folder without a cap of its own. Counting stops where it grows long."""
    size = files = 0
    for folder, _, names in os.walk(path):
        for name in (".", *names):
            with contextlib.suppress(OSError):
                size += os.lstat(os.path.join(folder, name)).st_blocks * 512
            files += 1
        if files > 200_000:
            break
    return size, files


def read_submission(folder_fd: int, cap: int, root: str) -> tuple[bytes | None, str]:
    """The submission in a dead box's folder, or None and what is wrong with it.

    Reasons: 'missing', 'link_outside' (a link that leaves `root`, the folder's path as the program saw it), 'link',
    'not_a_file', 'hard_link', 'too_big'.
    """
    try:
        fd = os.open(SUBMISSION, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=folder_fd)
    except FileNotFoundError:
        return None, "missing"
    except OSError as error:
        if error.errno == errno.ELOOP:
            target = os.path.normpath(os.path.join(root, os.readlink(SUBMISSION, dir_fd=folder_fd)))
            return None, "link" if target.startswith(root.rstrip("/") + "/") else "link_outside"
        if error.errno in (errno.ENXIO, errno.EACCES, errno.EPERM):  # a socket, or no right to read
            return None, "not_a_file"
        raise
    try:
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode):
            return None, "not_a_file"
        if status.st_nlink != 1:
            return None, "hard_link"
        if status.st_size > cap:
            return None, "too_big"
        with os.fdopen(os.dup(fd), "rb") as file:
            return file.read(cap), ""
    finally:
        os.close(fd)


def remove_tree(path: Path) -> None:
    """Removes a folder of ours, the file systems mounted in it and what programs left there, mode-000 folders too."""
    mounted = [line.split()[4].replace("\\040", " ") for line in Path("/proc/self/mountinfo").read_text().splitlines()]
    for point in sorted((p for p in mounted if Path(p).is_relative_to(path)), reverse=True):
        _libc.umount2(os.fsencode(point), _MNT_DETACH)

    def unlock(function: object, name: str, _: object) -> None:
        with contextlib.suppress(OSError):
            os.chmod(os.path.dirname(name), 0o700)
            if os.path.isdir(name) and not os.path.islink(name):
                os.chmod(name, 0o700)
                shutil.rmtree(name, ignore_errors=True)
            else:
                os.unlink(name)

    shutil.rmtree(path, onerror=unlock)
