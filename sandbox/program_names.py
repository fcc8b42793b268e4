"""What the names of a program stand for, read off its AST: imported paths, strings, models and transformers.

Flow is not followed: a name stands for everything that the program ever assigns to it, whatever the scope.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

_SKLEARN_MODELS = (
    "calibration", "cluster", "cross_decomposition", "discriminant_analysis", "dummy", "ensemble", "gaussian_process",
    "isotonic", "kernel_ridge", "linear_model", "mixture", "model_selection", "multiclass", "multioutput",
    "naive_bayes", "neighbors", "neural_network", "semi_supervised", "svm", "tree",
)  # fmt: skip
_SKLEARN_TRANSFORMERS = (
    "preprocessing", "impute", "feature_extraction", "decomposition", "compose", "feature_selection",
    "random_projection", "kernel_approximation",
)  # fmt: skip
_OTHER_MODELS = ("lightgbm.", "xgboost.", "catboost.", "torch.nn.", "keras.", "tensorflow.keras.", "statsmodels.")
_MODEL_MODULES = (*(f"sklearn.{name}." for name in _SKLEARN_MODELS), *_OTHER_MODELS)
_TRANSFORMER_MODULES = (*(f"sklearn.{name}." for name in _SKLEARN_TRANSFORMERS), "category_encoders.")
_MODEL_NAME = re.compile(  # for names whose module isn't known
    r"^(?=[A-Z])\w*(Classifier|Regressor|Regression|Ranker|SearchCV|SVC|SVR|NB|Ridge|Lasso|ElasticNet)$"
)
_NOT_MODEL_NAME = re.compile(r"(Loss|Fold|Split|Dataset|DMatrix|Pool)$")
CHAINED = ("fit", "partial_fit", "set_params", "to")  # methods that return the object itself


def evaluated(node: ast.AST) -> Iterator[ast.AST]:
    """The nodes that have certainly been evaluated once `node` has."""
    yield node
    match node:
        case ast.Lambda():
            inside: list[ast.AST] = []
        case ast.IfExp() | ast.Assert():
            inside = [node.test]
        case ast.BoolOp():
            inside = [node.values[0]]
        case ast.Compare():
            inside = [node.left, node.comparators[0]]
        case ast.GeneratorExp():
            inside = [node.generators[0].iter]
        case ast.Call():
            inside = [node.func, *node.keywords]
            for arg in node.args:  # a generator that is an argument gets used
                inside += [arg, arg.elt] if isinstance(arg, ast.GeneratorExp) else [arg]
        case _:
            inside = list(ast.iter_child_nodes(node))
    for child in inside:
        yield from evaluated(child)


def bindings(node: ast.AST) -> list[tuple[ast.expr, ast.expr]]:
    """(target, value) of everything that `node` itself assigns."""
    match node:
        case ast.Assign(targets=targets, value=value):
            return [(target, value) for target in targets]
        case ast.AnnAssign(target=target, value=ast.expr() as value) | ast.NamedExpr(target=target, value=value):
            return [(target, value)]
        case ast.withitem(optional_vars=ast.expr() as target, context_expr=value):
            return [(target, value)]
    return []


class Names:
    def __init__(self, tree: ast.Module) -> None:
        self.paths: dict[str, str] = {}  # a name -> the dotted path that it was imported from
        self.texts: dict[str, tuple[str, ...]] = {}  # a name or attribute -> the strings in what was assigned to it
        self.words: set[str] = set()  # names that are assigned one string
        self.kinds: dict[str, str] = {}  # a name or attribute -> 'model' or 'transformer'
        self.classes: dict[str, str] = {}  # a class of the program -> what it constructs
        nodes = list(ast.walk(tree))
        for node in nodes:
            self._declare(node)
        pairs = [pair for node in nodes for pair in bindings(node)]
        for _ in range(3):  # names that depend on names, to a fixed depth
            for target, value in pairs:
                self._bind(target, value)

    def _declare(self, node: ast.AST) -> None:
        match node:
            case ast.Import(names=names):
                for name in names:
                    top = name.name.partition(".")[0]
                    self.paths[name.asname or top] = name.name if name.asname else top
            case ast.ImportFrom(module=str() as module, names=names):
                self.paths |= {name.asname or name.name: f"{module}.{name.name}" for name in names}
            case ast.ClassDef(name=name, bases=bases, body=body):
                methods = {stmt.name for stmt in body if isinstance(stmt, ast.FunctionDef)}
                is_module = any(ast.unparse(base).endswith(("Module", "Classifier", "Regressor")) for base in bases)
                if is_module or methods & {"forward", "predict"}:
                    self.classes[name] = "model"
                elif "transform" in methods:
                    self.classes[name] = "transformer"

    def _bind(self, target: ast.expr, value: ast.expr) -> None:
        key = ast.unparse(target)
        if texts := self.strings(value):
            self.texts[key] = texts
        if isinstance(value, ast.Constant) and isinstance(value.value, str):
            self.words.add(key)
        if isinstance(target, ast.Name) and isinstance(value, ast.Attribute | ast.Name):
            path = self.path(value)
            if path.partition(".")[0] != key:
                self.paths.setdefault(key, path)
        if (kind := self.kind(value)) and self.kinds.get(key) != "model":
            self.kinds[key] = kind

    def path(self, node: ast.expr) -> str:
        """The dotted path of a name or attribute, through the imports; '?' stands for any other expression."""
        match node:
            case ast.Name(id=name):
                return self.paths.get(name, name)
            case ast.Attribute(value=value, attr=attr):
                return f"{self.path(value)}.{attr}"
        return "?"

    def strings(self, node: ast.AST) -> tuple[str, ...]:
        """The string constants in an expression, those behind its names included."""
        found: list[str] = []
        for part in ast.walk(node):
            if isinstance(part, ast.Constant) and isinstance(part.value, str):
                found.append(part.value)
            elif isinstance(part, ast.Name | ast.Attribute):
                found += self.texts.get(ast.unparse(part), ())
        return tuple(found[:20])

    def kind(self, node: ast.AST) -> str:
        """'model', 'transformer' or '' (unknown): what an expression's value was constructed as."""
        if isinstance(node, ast.Name | ast.Attribute | ast.Subscript):
            return self.kinds.get(ast.unparse(node), "")
        if isinstance(node, ast.Call):
            if isinstance(node.func, ast.Attribute) and node.func.attr in CHAINED:
                return self.kind(node.func.value)
            return self.constructs(node)
        return ""

    def constructs(self, call: ast.Call) -> str:
        """'model', 'transformer' or '': what a call constructs."""
        path = self.path(call.func)
        name = path.rpartition(".")[2]
        if self._pipeline(call):
            # What pipelines hold that are steps themselves is in the walk too; asking them would take exponential time.
            steps = (part for arg in (*call.args, *call.keywords) for part in ast.walk(arg) if not self._pipeline(part))
            return "model" if any(self.kind(part) == "model" for part in steps) else "transformer"
        if path.startswith(_TRANSFORMER_MODULES) and not name.endswith("Regressor"):
            return "transformer" if name[0].isupper() or name.startswith("make_") else ""
        if path.startswith(_MODEL_MODULES):
            return "model" if name[0].isupper() and not _NOT_MODEL_NAME.search(name) else ""
        return "model" if _MODEL_NAME.match(name) else self.classes.get(name, "")

    def _pipeline(self, node: ast.AST) -> bool:
        if not isinstance(node, ast.Call):
            return False
        return self.path(node.func).rpartition(".")[2] in ("Pipeline", "make_pipeline")
