"""Adds prints to a program after the operations that it really carried out, and nothing else.

The text stays byte for byte as it was apart from the prints, and no line moves: a print is appended to its statement's
own line (`model.fit(X, y); <print>`), or stands on a blank or comment line. So line numbers in a traceback are those of
the program as it was written, and `strip` takes the prints out of the source lines that a traceback shows. Each print
stands right behind its statement in the same block, so it runs only where the statement did not raise. After a `return`
no print can stand: what the return statement reaches counts at the call (sandbox.operations has the rules).

The print uses no name that a program binds, and `sys.__stdout__`, so that a redirected stdout doesn't swallow it.
"""

from __future__ import annotations

import ast
import dataclasses
import re
import warnings

from sandbox.markers import MILESTONES, marker_line
from sandbox.operations import Operations

_NONCE = re.compile(r"[0-9A-Za-z]{8,64}")
_LINES = re.compile(rb"[^\r\n]*(?:\r\n|\r|\n)|[^\r\n]+")
_BOM = "\ufeff"
# Behind these a print on the same line is reached, unless they raised.
_SIMPLE = (ast.Expr, ast.Assign, ast.AugAssign, ast.AnnAssign, ast.Delete, ast.Assert, ast.Import, ast.ImportFrom)
_LAST = (*_SIMPLE, ast.Return, ast.Raise, ast.Break, ast.Continue, ast.Pass, ast.Global, ast.Nonlocal)


@dataclasses.dataclass(frozen=True)
class Instrumented:
    source: str
    planned: tuple[str, ...] = ()  # milestones that have a print somewhere, in the order of MILESTONES
    sites: tuple[tuple[str, int], ...] = ()  # (milestone, line of its print)
    refused: str = ""  # why `source` is the original, without prints


def instrument(source: str, nonce: str) -> Instrumented:
    """The program with its prints; the program as it was where it can't be parsed or the check fails.

    Raises ValueError for a nonce that isn't 8 to 64 letters and digits, or that the program already holds.
    """
    if not _NONCE.fullmatch(nonce):
        raise ValueError(f"nonce {nonce!r} must be 8 to 64 letters and digits; use secrets.token_hex(8)")
    if nonce in source:
        raise ValueError(f"nonce {nonce!r} occurs in the program; draw another one")
    bom, body = (_BOM, source[1:]) if source.startswith(_BOM) else ("", source)
    try:
        planter = _Planter(body, nonce)
        text = bom + planter.planted()
        if not verify(source, text, nonce):
            return Instrumented(source, refused="the program with prints taken out is another program")
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:  # what ast.parse raises on odd programs
        return Instrumented(source, refused=f"the program can't be parsed ({type(error).__name__})")
    reached = {name for name, _ in planter.sites}
    return Instrumented(text, tuple(name for name in MILESTONES if name in reached), tuple(planter.sites))


def strip(text: str, nonce: str) -> str:
    """The text without the prints of this nonce: an instrumented program, or output whose tracebacks quote one.

    Of a program it gives back the original, byte for byte up to a newline at the end of the file.
    """
    prints = "|".join(re.escape(_print(nonce, name)) for name in MILESTONES)
    for pattern in (rf"; (?:{prints})", rf"(?:{prints}); ", rf"(?m:^[ \t]*)(?:{prints})", rf"(?:{prints})"):
        text = re.sub(pattern, "", text)
    return text


def verify(original: str, instrumented: str, nonce: str) -> bool:
    """Whether the second program is the first with prints of this nonce added, by their ASTs."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # invalid escapes in somebody's strings
        before, after = (ast.parse(text.removeprefix(_BOM)) for text in (original, instrumented))
    return ast.dump(before) == ast.dump(_WithoutPrints(nonce).visit(after))


class _WithoutPrints(ast.NodeTransformer):
    def __init__(self, nonce: str) -> None:
        self.prints = {ast.dump(ast.parse(_print(nonce, name)).body[0]) for name in MILESTONES}

    def visit_Expr(self, node: ast.Expr) -> ast.Expr | None:
        return None if ast.dump(node) in self.prints else node


def _print(nonce: str, name: str) -> str:
    line = marker_line(nonce, name)
    return f'__import__("builtins").print("{line}", file=__import__("sys").__stdout__, flush=True)'


def _blocks(stmt: ast.stmt) -> list[list[ast.stmt]]:
    """The blocks of a compound statement, in order."""
    parts = [stmt, *getattr(stmt, "handlers", ()), *getattr(stmt, "cases", ())]
    found = [getattr(part, field, []) for part in parts for field in ("body", "orelse", "finalbody")]
    return [block for block in found if block]


class _Planter:
    """Collects insertions of text, each at (line, byte of the line), then applies them."""

    def __init__(self, source: str, nonce: str) -> None:
        self.nonce = nonce
        self.lines = [match.group() for match in _LINES.finditer(source.encode())]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            tree = ast.parse(source)
        self.operations = Operations(tree)
        self.insertions: list[tuple[int, int, str]] = []
        self.sites: list[tuple[str, int]] = []
        self.import_site = _import_site(tree, self.operations)
        self._block(tree.body, frozenset())

    def planted(self) -> str:
        lines = [*self.lines, b""]  # the end of the file is a place too
        for line, column, text in sorted(self.insertions, reverse=True):
            old = lines[line - 1]
            lines[line - 1] = old[:column] + text.encode() + old[column:]
        return b"".join(lines).decode()

    def _block(self, body: list[ast.stmt], done: frozenset[str]) -> None:
        """Plants in a block. A milestone that an earlier statement of the block has printed isn't printed again."""
        for stmt, following in zip(body, [*body[1:], None], strict=False):
            if isinstance(stmt, _SIMPLE):
                names = self.operations.of_simple(stmt) | ({"imported"} if stmt is self.import_site else set())
                if names := names - done:
                    self._behind(stmt, names)
                    done |= names
            else:
                for block in _blocks(stmt):
                    self._block(block, done)
                if (names := self.operations.of_header(stmt) - done) and self._after(stmt, following, names):
                    done |= names

    def _add(self, line: int, column: int, names: set[str], form: str) -> None:
        ordered = [name for name in MILESTONES if name in names]
        self.insertions.append((line, column, form.format("; ".join(_print(self.nonce, name) for name in ordered))))
        self.sites += [(name, line) for name in ordered]

    def _behind(self, stmt: ast.stmt, names: set[str]) -> None:
        assert stmt.end_lineno is not None and stmt.end_col_offset is not None
        self._add(stmt.end_lineno, stmt.end_col_offset, names, "; {}")

    def _after(self, stmt: ast.stmt, following: ast.stmt | None, names: set[str]) -> bool:
        """Plants after a compound statement, in its block: on a free line, else before the next statement, else at the
        end of the file. Failing that, inside it behind its last statement; then later statements can't rely on it."""
        first = self.lines[stmt.lineno - 1]
        indent = first[: stmt.col_offset]
        if first[stmt.col_offset :].startswith(b"elif") or indent.strip():
            return False
        number = (stmt.end_lineno or stmt.lineno) + 1
        if number <= len(self.lines):
            text = self.lines[number - 1].strip()
            if not text or text.startswith(b"#"):
                self._add(number, 0, names, indent.decode() + "{}")
                return True
        elif following is None:
            newline = "" if self.lines[-1].endswith((b"\n", b"\r")) else "\n"
            self._add(number, 0, names, newline + indent.decode() + "{}")
            return True
        if isinstance(following, _LAST) and not self.lines[following.lineno - 1][: following.col_offset].strip():
            self._add(following.lineno, following.col_offset, names, "{}; ")
            return True
        inner: ast.stmt = stmt
        while isinstance(inner, ast.With | ast.AsyncWith | ast.For | ast.AsyncFor):
            inner = inner.body[-1]
        if isinstance(inner, _SIMPLE):
            self._behind(inner, names)
        return False


def _import_site(tree: ast.Module, operations: Operations) -> ast.stmt | None:
    """The last import before the first operation, of the module or else of the first function that has one."""
    bodies = [tree.body, *(node.body for node in ast.walk(tree) if isinstance(node, ast.FunctionDef))]
    for body in bodies:
        site = None
        for stmt in body:
            if isinstance(stmt, ast.Import) or (isinstance(stmt, ast.ImportFrom) and stmt.module != "__future__"):
                site = stmt
            elif isinstance(stmt, _SIMPLE) and operations.of_simple(stmt):
                break
        if site is not None:
            return site
    return None
