"""Checkpoints as one transaction: device state (Orbax) and host state (JSON) are kept together or not at all.

    <workdir>/checkpoints/step_00000012/
        state/          Orbax, one array a leaf
        host.json       task cursor, solution buffer, random states...
        MANIFEST        a digest of every file above and of itself, written last

A checkpoint is made under another name and renamed when all of it is on the disk, so `kill -9` at any moment leaves
either all of it or none. It is believed only if every digest agrees; otherwise the one before it is taken.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import errno
import hashlib
import json
import logging
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import jax
import orbax.checkpoint as ocp

log = logging.getLogger(__name__)

HALF, DEAD = ".half-", ".dead-"  # being written, being deleted: swept away by the next save


class Restored(NamedTuple):
    step: int
    state: Any  # a pytree of arrays with the target's shardings
    host: dict[str, Any]


class Checkpoints:
    """The checkpoints of one run. `model` names what is trained; the last `keep` are kept. One process writes."""

    def __init__(self, workdir: str | os.PathLike[str], model: str, keep: int = 2) -> None:
        if keep < 1:
            raise ValueError(f"checkpoint.keep is {keep}: keep at least 1")
        self._folder = Path(workdir).absolute() / "checkpoints"
        self._model, self._keep = model, keep

    def save(self, step: int, state: Any, host: dict[str, Any]) -> Path:
        """Returns when all is on the disk; if that is full, OSError (ENOSPC) of one line, earlier ones as they were.

        Every leaf of `state` is a jax.Array of one element or more; `host` is what JSON can hold.
        """
        self._folder.mkdir(parents=True, exist_ok=True)
        for leftover in (*self._folder.glob(f"{HALF}*"), *self._folder.glob(f"{DEAD}*")):
            shutil.rmtree(leftover)
        half = self._folder / f"{HALF}{step:08d}"
        size, free = sum(leaf.nbytes for leaf in jax.tree.leaves(state)), shutil.disk_usage(self._folder).free
        full = OSError(
            errno.ENOSPC,
            f"no room in {self._folder} for the checkpoint of step {step} (about {size / 1e6:.0f} MB, "
            f"{free / 1e6:.0f} MB free): free some, or choose a --workdir on another disk; earlier ones are untouched",
        )
        if free < size:
            raise full
        try:
            self._write(half, step, state, host)
        except Exception as error:
            shutil.rmtree(half, ignore_errors=True)
            if _disk_is_full(error):
                raise full from error
            raise
        final = self._folder / f"step_{step:08d}"
        if final.exists():  # only ever one that was found damaged: a good one is resumed from, not made again
            self._delete(final)
        half.rename(final)
        _sync(self._folder)
        # Those after this step belong to a run that was given up for an earlier checkpoint: they are damaged.
        ours = [path for path in self._paths() if path <= final]
        for path in self._paths():
            if path not in ours[-self._keep :]:
                self._delete(path)
        return final

    def restore(self, target: Any) -> Restored | None:
        """The newest good checkpoint laid out as `target` (arrays or ShapeDtypeStructs with shardings); None if none.

        ValueError if it is of another model or state. The device count may differ from the one it was saved on.
        """
        for path in reversed(self._paths()):
            manifest = _verified(path)
            if manifest is None:
                continue
            leaves = _named_leaves(target)
            self._check_fits(path, manifest, {name: _describe(leaf) for name, leaf in leaves.items()})
            abstract = {
                name: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding) for name, x in leaves.items()
            }
            args = ocp.args.PyTreeRestore(abstract, restore_args=ocp.checkpoint_utils.construct_restore_args(abstract))
            with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as orbax:
                restored = orbax.restore(path / "state", args=args)
            state = jax.tree.unflatten(jax.tree.structure(target), [restored[name] for name in leaves])
            return Restored(manifest["step"], state, json.loads((path / "host.json").read_text()))
        return None

    def _write(self, folder: Path, step: int, state: Any, host: dict[str, Any]) -> None:
        leaves = _named_leaves(state)
        with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as orbax, _quiet_absl():
            orbax.save(folder / "state", args=ocp.args.PyTreeSave(leaves))
        (folder / "host.json").write_text(json.dumps(host))
        manifest = {
            "step": step,
            "model": self._model,
            "leaves": {name: _describe(leaf) for name, leaf in leaves.items()},
            "files": _digests(folder, sync=True),
        }
        body = json.dumps(manifest, indent=1)
        with (folder / "MANIFEST").open("w") as out:
            out.write(f"{hashlib.sha256(body.encode()).hexdigest()}\n{body}")
            out.flush()
            os.fsync(out.fileno())
        for inner in (*(p for p in folder.rglob("*") if p.is_dir()), folder):
            _sync(inner)

    def _check_fits(self, path: Path, manifest: dict[str, Any], wanted: dict[str, str]) -> None:
        way_out = "choose another --workdir, or the config that it was made with"
        if manifest["model"] != self._model:
            raise ValueError(f"{path} is of the model {manifest['model']}, this run's is {self._model}: {way_out}")
        found = manifest["leaves"]
        for name in sorted(found.keys() | wanted.keys()):
            have, want = found.get(name, "nothing"), wanted.get(name, "nothing")
            if have != want:
                raise ValueError(f"{path} holds {have} for {name}, this run wants {want}: {way_out}")

    def _paths(self) -> list[Path]:
        return sorted(self._folder.glob("step_" + "[0-9]" * 8))

    def _delete(self, path: Path) -> None:
        """Renamed first: a kill in the middle leaves no half of a checkpoint under its name."""
        dead = path.with_name(f"{DEAD}{path.name}")
        path.rename(dead)
        shutil.rmtree(dead)


def _named_leaves(tree: Any) -> dict[str, Any]:
    """Leaves by path. Orbax then sees a flat dict, and no detail of how optax or flax build their nodes."""
    flat = jax.tree_util.tree_flatten_with_path(tree)[0]
    leaves = {jax.tree_util.keystr(path, simple=True, separator="/"): leaf for path, leaf in flat}
    assert len(leaves) == len(flat), "two leaves of one name"
    return leaves


def _describe(leaf: Any) -> str:
    return f"{leaf.dtype}[{','.join(map(str, leaf.shape))}]"


def _digests(folder: Path, sync: bool = False) -> dict[str, str]:
    """sha256 of every file under `folder` but the manifest, by relative path; `sync` waits for the disk too."""

    def digest(path: Path) -> str:
        with path.open("rb") as file:
            if sync:
                os.fsync(file.fileno())
            return hashlib.file_digest(file, "sha256").hexdigest()

    paths = sorted(p for p in folder.rglob("*") if p.is_file() and p.name != "MANIFEST")
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        return dict(zip((str(p.relative_to(folder)) for p in paths), pool.map(digest, paths), strict=True))


def _verified(path: Path) -> dict[str, Any] | None:
    """The manifest of a checkpoint that is whole; None, with a warning that says what is wrong, of one that isn't."""
    try:
        digest, body = (path / "MANIFEST").read_text().split("\n", 1)
        if digest != hashlib.sha256(body.encode()).hexdigest():
            raise ValueError("MANIFEST doesn't agree with its digest")
        manifest = json.loads(body)
        found = _digests(path)
        wrong = sorted(name for name in manifest["files"] if manifest["files"][name] != found.get(name))
        if wrong:
            raise ValueError(f"{', '.join(wrong)} missing or not as written")
    except (OSError, ValueError) as error:
        log.warning("passing over the damaged checkpoint %s: %s", path, error)
        return None
    return manifest


def _disk_is_full(error: BaseException | None) -> bool:
    """TensorStore's errors carry the system's words and no errno."""
    while error is not None:
        if getattr(error, "errno", None) in (errno.ENOSPC, errno.EDQUOT) or os.strerror(errno.ENOSPC) in str(error):
            return True
        error = error.__cause__ or error.__context__
    return False


@contextlib.contextmanager
def _quiet_absl() -> Iterator[None]:
    """Orbax logs the traceback of each thread that fails, besides raising: what is raised says it once."""
    logger = logging.getLogger("absl")
    before, logger.disabled = logger.disabled, True
    try:
        yield
    finally:
        logger.disabled = before


def _sync(folder: Path) -> None:
    """Makes renames and new names in a folder last through a power cut."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
