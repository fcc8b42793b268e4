"""The house rules that a reader can rely on, read off the source: who may import whom, and how long a file may be."""

from __future__ import annotations

import ast
import importlib.metadata
import re
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGES = ("jaxrl_code", "sandbox", "configs", "launch")
LAYERS = (  # imports point up this list; the longest matching prefix gives a module's place
    ("sandbox", "jaxrl_code.types"),
    ("jaxrl_code.sharding", "jaxrl_code.chat", "jaxrl_code.metrics", "jaxrl_code.compiles", "jaxrl_code.rewards"),
    ("jaxrl_code.models", "jaxrl_code.ppo", "jaxrl_code.rollout.batching"),
    ("jaxrl_code.tasks",),
    ("jaxrl_code.sampling", "jaxrl_code.rollout"),
    ("jaxrl_code.ppo.learner",),
    ("jaxrl_code.checkpoint", "jaxrl_code.evaluation", "jaxrl_code.display", "jaxrl_code.preflight"),
    ("jaxrl_code.trainer", "jaxrl_code.sft", "jaxrl_code.corpus"),
    ("launch", "configs"),
)
PLACE = {name: depth for depth, names in enumerate(LAYERS) for name in names}
MAX_LINES = 300


def module_name(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


SOURCES = {module_name(path): path for package in PACKAGES for path in sorted((ROOT / package).rglob("*.py"))}


def imports_of(path: Path, running: bool = False) -> set[str]:
    """Every module that a file imports, anywhere in it; `from a import b` counts as a.b where that is a module.

    `running` leaves out what only a type checker imports.
    """
    tree, found = ast.parse(path.read_text(), str(path)), set()
    if running:
        tree.body = [n for n in tree.body if not (isinstance(n, ast.If) and ast.unparse(n.test) == "TYPE_CHECKING")]
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: relative import"
            names = {f"{node.module}.{alias.name}" for alias in node.names}
            found |= {name if name in SOURCES else str(node.module) for name in names}
            found |= {name for name in names if name in ("flax.linen", "flax.nnx")}
    return found


IMPORTS = {name: imports_of(path) for name, path in SOURCES.items()}


def place(module: str) -> int | None:
    parts = module.split(".")
    prefixes = (".".join(parts[:n]) for n in range(len(parts), 0, -1))
    return next((PLACE[prefix] for prefix in prefixes if prefix in PLACE), None)


def ours(module: str) -> bool:
    return module.split(".")[0] in PACKAGES


def who_imports(package: str) -> set[str]:
    """Modules of ours that import `package` or anything in it."""
    return {name for name, found in IMPORTS.items() if any(f == package or f.startswith(package + ".") for f in found)}


def test_every_module_has_a_place():
    lost = [name for name in SOURCES if name != "jaxrl_code" and place(name) is None]
    assert not lost, f"give these a place in LAYERS: {lost}"


def test_imports_point_one_way():
    backwards = [
        f"{name} -> {target}"
        for name, found in IMPORTS.items()
        for target in found
        if ours(target) and target in SOURCES and name != "jaxrl_code" and (place(target) or 0) > (place(name) or 0)
    ]
    assert not backwards


def test_imports_have_no_cycle():
    state: dict[str, str] = {}

    def visit(name: str, trail: tuple[str, ...]) -> None:
        assert state.get(name) != "open", " -> ".join((*trail, name))
        if name not in state:
            state[name] = "open"
            for target in sorted(imports_of(SOURCES[name], running=True) & SOURCES.keys() - {name}):
                visit(target, (*trail, name))
            state[name] = "done"

    for name in SOURCES:
        visit(name, ())
    assert set(state) == set(SOURCES)


def test_the_sandbox_knows_neither_jax_nor_the_trainer():
    for package in ("jax", "flax", "optax", "jaxrl_code", "launch"):
        assert not {name for name in who_imports(package) if name.startswith("sandbox")}, package


def test_nobody_imports_configs():
    assert who_imports("configs") == set()


@pytest.mark.parametrize(
    ("package", "home"),
    [("flax.linen", {"jaxrl_code.models.qwen2"}), ("orbax", {"jaxrl_code.checkpoint"}), ("flax.nnx", set())],
)
def test_a_package_with_one_home(package, home):
    assert who_imports(package) <= home


def test_there_is_no_utils_module():
    assert not [name for name in SOURCES if re.search(r"\b(utils?|helpers?|common|misc)$", name)]


def test_files_are_short():
    lengths = {name: len(path.read_text().splitlines()) for name, path in SOURCES.items()}
    assert not {name: n for name, n in lengths.items() if n > MAX_LINES}


def canonical(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def test_what_is_imported_is_declared():
    setup = ast.parse((ROOT / "setup.py").read_text())
    required = next(k.value for k in ast.walk(setup) if isinstance(k, ast.keyword) and k.arg == "install_requires")
    declared = {canonical(re.split(r"[<>=\[]", line)[0]) for line in ast.literal_eval(required)}
    assert "torch" not in declared
    homes = importlib.metadata.packages_distributions()
    # torch is a guest: live parity with transformers, and vLLM's own environment.
    guests = {"torch", "vllm"}
    tops = {target.split(".")[0] for found in IMPORTS.values() for target in found} - set(PACKAGES) - guests
    third_party = tops - sys.stdlib_module_names
    undeclared = {top for top in third_party if not declared & {canonical(d) for d in homes.get(top, [])}}
    assert not undeclared, f"add to install_requires in setup.py: {undeclared}"
