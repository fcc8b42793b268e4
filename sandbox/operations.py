"""Which milestones a statement of a program reaches, read off its AST: the rules that instrument.py plants prints by.

An operation counts where it is certainly carried out once its statement is done: not in a lambda's body, the branches
of a conditional expression, the right side of `and`/`or` or an unused generator. (One exception: a comprehension's
element counts though its iterable may be empty.)

loaded_data       pd.read_csv and its kin, np.loadtxt and its kin, a data file opened to read; not sample_submission.csv
made_features     fit_transform, transform, get_dummies, fillna, drop...; fitting a transformer; `frame["new"] = ...`;
                  `X = frame[columns]`, `X = [[...] for row in rows]`; not on a frame that is written out
defined_model     an estimator, a torch or keras model, or a class of the program with predict or forward is made; a
                  Pipeline only where a model is among its steps
trained           .fit(X, y); .fit(X) on something constructed as a model; lightgbm/xgboost.train; loss.backward()
predicted         .predict, .predict_proba... unless its argument's name says that it is training or validation data
wrote_submission  .to_csv and its kin, a file opened to write and closed: 'submission.csv' or a path that isn't known

A call of a function of the program reaches what every one of its return statements reaches.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from sandbox.program_names import CHAINED, Names, bindings, evaluated

_READERS = re.compile(r"(read|scan)_(csv|table|json|excel|parquet|feather|fwf|pickle)|loadtxt|genfromtxt|recfromcsv")
_DATA_FILE = re.compile(r"\.(csv|tsv|jsonl?|txt|dat|parquet|feather|npy|npz|pkl)(\.gz)?$")
_FEATURE_CALLS = {
    "fit_transform", "transform", "get_dummies", "factorize", "fillna", "dropna", "drop", "select_dtypes", "cut",
    "qcut", "column_stack", "fit_resample", "nan_to_num", "assign", "interpolate",
}  # fmt: skip
_PREDICT_CALLS = {"predict", "predict_proba", "predict_log_proba", "decision_function", "fit_predict"}
_WRITE_CALLS = {"to_csv", "write_csv", "savetxt"}
_SEEN_ROWS = {"train", "tr", "val", "valid", "validation", "va", "dev", "holdout", "oof", "eval"}
_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)


def _own_scope(node: ast.AST) -> Iterator[ast.AST]:
    """The nodes of a function, those of functions and classes inside it left out."""
    for child in ast.iter_child_nodes(node):
        yield child
        if not isinstance(child, (*_FUNCTIONS, ast.ClassDef, ast.Lambda)):
            yield from _own_scope(child)


def _always_returns(body: list[ast.stmt]) -> bool:
    match body[-1]:
        case ast.Return() | ast.Raise():
            return True
        case ast.If(body=then, orelse=otherwise):
            return bool(otherwise) and _always_returns(then) and _always_returns(otherwise)
    return False


class Operations:
    """The milestones that the statements of one program reach."""

    def __init__(self, tree: ast.Module) -> None:
        self.names = Names(tree)
        self.frames: set[str] = set()  # names whose value came from loaded data, and every parameter
        self.written: set[str] = set()  # frames that are written out
        self.handles: set[str] = set()  # submission.csv, opened to write
        self.returns: dict[str, set[str]] = {}  # a function -> what each of its return statements reaches
        nodes = list(ast.walk(tree))
        functions = [node for node in nodes if isinstance(node, _FUNCTIONS)]
        self.awaited = {node.name for node in functions if isinstance(node, ast.AsyncFunctionDef)}
        for node in nodes:
            match node:
                case ast.arg(arg=name):
                    self.frames.add(name)
                case ast.Call(func=ast.Attribute(value=ast.Name(id=name), attr="to_csv")):
                    self.written.add(name)
        for _ in range(3):  # names and functions that depend on others, to a fixed depth
            for node in nodes:
                self._follow(node)
            found: dict[str, set[str]] = {}
            for function in functions:
                reached = self._returned(function)
                found[function.name] = found.get(function.name, reached) & reached
            self.returns |= found

    def _follow(self, node: ast.AST) -> None:
        match node:
            case ast.For(target=target, iter=value) | ast.comprehension(target=target, iter=value):
                if self._holds_frame(value):
                    self.frames |= {name.id for name in ast.walk(target) if isinstance(name, ast.Name)}
        for target, value in bindings(node):
            if isinstance(value, ast.Call) and self._opens(value) == "wrote_submission":
                self.handles.add(ast.unparse(target))
            if isinstance(target, ast.Name) and isinstance(value, ast.Lambda):
                self.returns[target.id] = self._calls(value.body)
            if self._holds_frame(value) or "loaded_data" in self._calls(value):
                self.frames |= {name.id for name in ast.walk(target) if isinstance(name, ast.Name)}

    def _holds_frame(self, node: ast.AST) -> bool:
        return any(isinstance(part, ast.Name) and part.id in self.frames for part in ast.walk(node))

    def _returned(self, function: ast.FunctionDef | ast.AsyncFunctionDef) -> set[str]:
        """What every way out of a function reaches in its return statement, where no print can follow."""
        scope = list(_own_scope(function))
        values = [node.value for node in scope if isinstance(node, ast.Return)]
        generator = any(isinstance(node, ast.Yield | ast.YieldFrom) for node in scope)
        if generator or not values or not _always_returns(function.body):
            return set()
        return set.intersection(*(self._calls(value) if value else set() for value in values))

    def of_simple(self, stmt: ast.stmt) -> set[str]:
        """What a statement without a body has reached once it is done."""
        found = self._calls(stmt)
        targets = [target for target, _ in bindings(stmt)]
        targets += [stmt.target] if isinstance(stmt, ast.AugAssign) else []
        for target in targets:
            if isinstance(target, ast.Subscript) and isinstance(target.value, ast.Name):
                if target.value.id in self.frames - self.written:
                    found.add("made_features")
            elif any(self._selects(part) for part in evaluated(stmt)) and ast.unparse(target) not in self.written:
                found.add("made_features")
        return found

    def of_header(self, stmt: ast.stmt) -> set[str]:
        """What a statement with a body has reached in its header once it is done: `with open(...)`, `for x in ...`."""
        match stmt:
            case ast.With(items=items) | ast.AsyncWith(items=items):
                opened = {self._opens(item.context_expr) for item in items if isinstance(item.context_expr, ast.Call)}
                return opened.union(*(self._calls(item.context_expr) for item in items)) - {""}
            case ast.For(iter=value) | ast.AsyncFor(iter=value) | ast.If(test=value) | ast.While(test=value):
                return self._calls(value)
            case ast.Match(subject=value):
                return self._calls(value)
        return set()

    def _selects(self, node: ast.AST) -> bool:
        """Several columns of a frame: frame[["a", "b"]], frame[columns], [[...] for row in rows]."""
        match node:
            case ast.Subscript(value=ast.Name(id=name) | ast.Attribute(value=ast.Name(id=name)), slice=key):
                one = isinstance(key, ast.Constant | ast.Compare) or ast.unparse(key) in self.names.words
                return name in self.frames and not one
            case ast.ListComp(elt=ast.List() | ast.Tuple() | ast.ListComp()):
                return self._holds_frame(node)
        return False

    def _calls(self, node: ast.AST) -> set[str]:
        """What the calls in a statement or expression reach."""
        found: set[str] = set()
        for part in evaluated(node):
            if isinstance(part, ast.Call):
                found |= self._call(part)
                name = self.names.path(part.func).rpartition(".")[2]
                if name not in self.awaited and name not in _PREDICT_CALLS:
                    found |= self.returns.get(name, set())
            elif isinstance(part, ast.Await) and isinstance(part.value, ast.Call):
                found |= self.returns.get(self.names.path(part.value.func).rpartition(".")[2], set())
        return found

    def _opens(self, call: ast.Call) -> str:
        """'loaded_data' or 'wrote_submission' for a call of open, by its mode and path; '' for any other call."""
        path = self.names.path(call.func)
        if path.rpartition(".")[2] != "open":
            return ""
        of_path = isinstance(call.func, ast.Attribute) and path not in ("io.open", "codecs.open", "gzip.open")
        place = call.func.value if of_path and isinstance(call.func, ast.Attribute) else (call.args or [call.func])[0]
        modes = call.args[:1] if of_path else call.args[1:2]
        modes += [keyword.value for keyword in call.keywords if keyword.arg == "mode"]
        if any(set(text) & set("wax") for mode in modes for text in self.names.strings(mode)):
            return "wrote_submission" if self._is_submission(place) else ""
        return "loaded_data" if self._is_data(place) else ""

    def _is_submission(self, place: ast.AST) -> bool:
        texts = self.names.strings(place)
        return not texts or any(text.rpartition("/")[2] == "submission.csv" for text in texts)

    def _is_data(self, place: ast.AST) -> bool:
        texts = self.names.strings(place)
        return any(_DATA_FILE.search(text) for text in texts) and "sample_submission" not in " ".join(texts)

    def _call(self, call: ast.Call) -> set[str]:
        """What one call reaches by itself."""
        path = self.names.path(call.func)
        name = path.rpartition(".")[2]
        base = call.func.value if isinstance(call.func, ast.Attribute) else None
        first = call.args[0] if call.args else call.keywords[0].value if call.keywords else None
        found: set[str] = set()
        if _READERS.fullmatch(name) or path in ("numpy.load", "numpy.fromfile"):
            if first is not None and "sample_submission" not in " ".join(self.names.strings(first)):
                found.add("loaded_data")
        elif name in ("read_text", "read_bytes") and base is not None:
            found |= {"loaded_data"} if self._is_data(base) else set()
        elif self._opens(call) == "loaded_data":
            found.add("loaded_data")
        if name in _FEATURE_CALLS and not (isinstance(base, ast.Attribute) and base.attr == "columns"):
            found.add("made_features")
        if name not in CHAINED and self.names.constructs(call) == "model":
            found.add("defined_model")
        if name in ("fit", "partial_fit", "fit_predict") and base is not None:
            kind = self.names.kind(base)
            if kind == "transformer":
                found.add("made_features")
            elif kind == "model" or len(call.args) > 1 or any(keyword.arg == "y" for keyword in call.keywords):
                found.add("trained")
        elif path in ("lightgbm.train", "xgboost.train"):
            found |= {"defined_model", "trained"}
        elif name == "backward" and base is not None:
            found.add("trained")
        forward = isinstance(call.func, ast.Name) and self.names.kind(call.func) == "model"  # model(X_test)
        if (name in _PREDICT_CALLS and base is not None) or forward:
            words = set(re.split(r"[^a-z]+", ast.unparse(first).lower())) if first is not None else set()
            if "test" in words or not (forward or words & _SEEN_ROWS):
                found.add("predicted")
        if name in _WRITE_CALLS and first is not None:
            if self._is_submission(first) and ast.unparse(first) not in self.handles:
                found.add("wrote_submission")
        elif name == "write_text" and base is not None and self._is_submission(base):
            found.add("wrote_submission")
        elif name in ("write", "writelines") and isinstance(base, ast.Call):  # open(...).write(...)
            found |= {self._opens(base)} & {"wrote_submission"}
        elif name == "close" and base is not None and ast.unparse(base) in self.handles:
            found.add("wrote_submission")
        return found
