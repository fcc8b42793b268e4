"""Programs for the demonstrations: a Recipe is a set of choices, `build` turns it into the lines of a program.

Lines are kept by stage, so that a mistake (demo_mistakes) is a small edit of one stage. Everything is a pure function
of the recipe and of what the prompt says about the task.
"""

from __future__ import annotations

import dataclasses
import random

Stages = dict[str, list[str]]  # stage -> its lines, in the program's order
STAGES = ("imports", "load", "target", "features", "encode", "fill", "model", "fit", "predict", "frame", "write")


@dataclasses.dataclass(frozen=True)
class Facts:
    """What a program has to know about a task. A reader finds all of it in the prompt."""

    task_id: str
    id: str
    target: str  # the column of train.csv that is to be predicted
    columns: tuple[str, ...]  # of the submission, after the id
    kind: str  # 'classes' or 'number'
    submits: str  # 'label', 'score' (one column, any number), 'probas' (a column a class) or 'number'
    numeric: tuple[str, ...]
    categorical: tuple[str, ...] = ()
    text: tuple[str, ...] = ()
    missing: frozenset[str] = frozenset()  # columns with empty cells
    hidden: frozenset[str] = frozenset()  # kinds of the columns that a prompt only counts; 'missing' among them
    classes: int = 0  # 0 where the target is a number
    nonnegative: bool = False  # the metric refuses predictions below zero

    @property
    def strings(self) -> tuple[str, ...]:
        return self.categorical + self.text


@dataclasses.dataclass(frozen=True)
class Model:
    name: str  # the estimator's class
    module: str
    says: str  # what a plan calls it
    kind: str  # 'classes' or 'number'
    params: tuple[str, ...] = ("",)  # settings to choose from
    nan: bool = False  # takes missing values as they are
    dense: bool = False  # refuses sparse features
    weight: float = 1.0


_TREES = ("n_estimators=30, random_state=0", "n_estimators=50, random_state=0", "n_estimators=100, random_state=0",
          "n_estimators=50, max_depth=8, random_state=0", "n_estimators=50, max_depth=3, random_state=0")  # fmt: skip
_TREE = ("random_state=0", "max_depth=5, random_state=0", "max_depth=3, random_state=0")
_STUMP = ("max_depth=1, random_state=0",)
_LOGISTIC = ("max_iter=300", "max_iter=1000", "C=0.1, max_iter=300")
_NEIGHBORS = ("", "n_neighbors=3", "n_neighbors=15")
_BOOST = ("n_estimators=30, random_state=0", "n_estimators=50, max_depth=2, random_state=0",
          "n_estimators=50, learning_rate=0.2, random_state=0")  # fmt: skip
_HIST = ("max_iter=30, random_state=0", "max_iter=50, random_state=0", "max_iter=50, max_depth=3, random_state=0")

MODELS = (
    Model("DummyClassifier", "dummy", "a dummy classifier", "classes", ("", 'strategy="prior"'), nan=True, weight=0.5),
    Model("GaussianNB", "naive_bayes", "naive Bayes", "classes", dense=True),
    Model("DecisionTreeClassifier", "tree", "a decision stump", "classes", _STUMP, nan=True, weight=0.6),
    Model("DecisionTreeClassifier", "tree", "a decision tree", "classes", _TREE, nan=True),
    Model("KNeighborsClassifier", "neighbors", "nearest neighbors", "classes", _NEIGHBORS),
    Model("LogisticRegression", "linear_model", "logistic regression", "classes", _LOGISTIC),
    Model("RandomForestClassifier", "ensemble", "a random forest", "classes", _TREES, nan=True),
    Model("ExtraTreesClassifier", "ensemble", "extra trees", "classes", _TREES, nan=True),
    Model("GradientBoostingClassifier", "ensemble", "gradient boosting", "classes", _BOOST, weight=0.7),
    Model("HistGradientBoostingClassifier", "ensemble", "histogram boosting", "classes", _HIST, nan=True, dense=True),
    Model("DummyRegressor", "dummy", "a dummy regressor", "number", ("", 'strategy="median"'), nan=True, weight=0.5),
    Model("DecisionTreeRegressor", "tree", "a decision stump", "number", _STUMP, nan=True, weight=0.6),
    Model("DecisionTreeRegressor", "tree", "a decision tree", "number", _TREE, nan=True),
    Model("KNeighborsRegressor", "neighbors", "nearest neighbors", "number", _NEIGHBORS),
    Model("LinearRegression", "linear_model", "linear regression", "number"),
    Model("Ridge", "linear_model", "ridge regression", "number", ("", "alpha=0.1", "alpha=10.0")),
    Model("RandomForestRegressor", "ensemble", "a random forest", "number", _TREES[:2] + _TREES[3:], nan=True),
    Model("ExtraTreesRegressor", "ensemble", "extra trees", "number", _TREES[:2] + _TREES[3:], nan=True),
    Model("GradientBoostingRegressor", "ensemble", "gradient boosting", "number", _BOOST),
    Model("HistGradientBoostingRegressor", "ensemble", "histogram boosting", "number", _HIST, nan=True, dense=True),
)  # fmt: skip

TEXT_FEATURES = ("tfidf", "counts", "lengths")
ENCODED_FEATURES = ("onehot", "concat", "codes", "ordinal")


@dataclasses.dataclass(frozen=True)
class Recipe:
    """The choices behind one program."""

    author: int  # an author has habits of wording and naming, and a share of mistakes (demonstrations.AUTHORS)
    model: Model
    params: str
    features: str  # one of `feature_choices`
    listed: tuple[str, ...] = ()  # the chosen columns, or the text column
    fill: str = ""  # '' | 'zero' | 'median' | 'mean' | 'impute'
    scale: bool = False
    proba: bool = True  # for 'score' tasks: probabilities, not the weaker hard labels
    log_target: bool = False
    frame: str = "dict"  # 'dict' | 'sample' | 'test'
    mistakes: tuple[str, ...] = ()
    seed: int = 0  # of a mistake's own choices

    @property
    def sparse(self) -> bool:
        return self.features in ("tfidf", "counts")


NAMES = (("train", "test"), ("train", "test"), ("train_df", "test_df"), ("df", "df_test"))  # by author


def feature_choices(facts: Facts) -> list[str]:
    """The ways of making features that can work on the task."""
    choices: list[str] = []
    if facts.numeric:
        choices += ["numeric", "listed"] if len(facts.numeric) > 2 else ["numeric"]
        if len(facts.strings) <= 4 and not facts.hidden & {"category", "text"}:
            choices.append("drop")
    if (facts.categorical or "category" in facts.hidden) and "text" not in facts.hidden:
        choices += ["onehot", "concat", "codes", "ordinal"]
    if facts.text:
        choices += ["tfidf", "tfidf", "counts", "lengths"]
    return choices


def sample_recipe(rng: random.Random, facts: Facts, author: int) -> Recipe:
    """A recipe without mistakes."""
    features = rng.choice(feature_choices(facts))
    models = [m for m in MODELS if m.kind == facts.kind and not (m.dense and features in ("tfidf", "counts"))]
    if facts.classes > 4:  # boosting grows a tree for each class
        models = [m for m in models if "boosting" not in m.says]
    model = rng.choices(models, [m.weight for m in models])[0]
    listed: tuple[str, ...] = ()
    if features == "listed":
        listed = tuple(rng.sample(facts.numeric, min(len(facts.numeric), rng.randint(2, 5))))
    elif features in TEXT_FEATURES:
        listed = (rng.choice(facts.text),)
    gaps = bool(facts.missing.intersection(listed or facts.numeric)) or (not listed and "missing" in facts.hidden)
    gaps = gaps and features not in TEXT_FEATURES
    fill = ""
    if features == "codes" or (gaps and (not model.nan or rng.random() < 0.5)):
        fill = rng.choice(("zero", "zero", "median", "mean", "impute"))
    scaled = model.module in ("linear_model", "neighbors") and features not in ("tfidf", "counts")
    return Recipe(
        author=author,
        model=model,
        params=rng.choice(model.params),
        features=features,
        listed=listed,
        fill=fill,
        scale=scaled and rng.random() < 0.6,
        proba=rng.random() < 0.7,
        log_target=facts.nonnegative and model.module != "dummy" and rng.random() < 0.4,
        frame=rng.choice(("dict", "dict", "sample", "test")),
        seed=rng.randrange(1 << 30),
    )


def build(recipe: Recipe, facts: Facts) -> Stages:
    """The program's lines by stage, before any mistake."""
    train, test = NAMES[recipe.author]
    stages: Stages = {name: [] for name in STAGES}
    stages["load"] = [f'{train} = pd.read_csv("data/train.csv")', f'{test} = pd.read_csv("data/test.csv")']
    target = f'{train}["{facts.target}"]'
    if recipe.log_target:
        target = f"np.log1p({target})"
    stages["target"] = [f"y = {target}"]
    imports = _features(stages, recipe, facts, train, test)
    imports += _model(stages, recipe)
    _predict(stages, recipe, facts, test)
    _frame(stages, recipe, facts, test)
    numpy = ["import numpy as np"] if any("np." in line for lines in stages.values() for line in lines) else []
    by_module: dict[str, list[str]] = {}
    for module, name in imports:
        by_module.setdefault(module, []).append(name)
    sklearn = [f"from sklearn.{module} import {', '.join(names)}" for module, names in by_module.items()]
    stages["imports"] = [*numpy, "import pandas as pd", *sklearn]
    return stages


def text_of(stages: Stages) -> str:
    return "\n".join(line for name in STAGES for line in stages[name]) + "\n"


def _quoted(names: tuple[str, ...]) -> str:
    return "[" + ", ".join(f'"{name}"' for name in names) + "]"


def _features(stages: Stages, recipe: Recipe, facts: Facts, train: str, test: str) -> list[tuple[str, str]]:
    kind, drop, features = recipe.features, (facts.id, facts.target), stages["features"]
    encode = stages["encode"]
    if kind == "tfidf" or kind == "counts":
        name = "TfidfVectorizer" if kind == "tfidf" else "CountVectorizer"
        column = recipe.listed[0]
        features.append(f"vec = {name}(max_features=1000)")
        features.append(f'X = vec.fit_transform({train}["{column}"].fillna(""))')
        features.append(f'X_test = vec.transform({test}["{column}"].fillna(""))')
        return [("feature_extraction.text", name)]
    if kind == "lengths":
        column = recipe.listed[0]
        for x, table in (("X", train), ("X_test", test)):
            features.append(f'text = {table}["{column}"].fillna("")')
            features.append(f'{x} = pd.DataFrame({{"chars": text.str.len(), "words": text.str.count(" ")}})')
        return []
    if kind == "listed":
        features += [f"cols = {_quoted(recipe.listed)}", f"X, X_test = {train}[cols], {test}[cols]"]
    elif kind == "numeric":
        features.append(f'X = {train}.drop(columns={_quoted(drop)}).select_dtypes("number")')
        features.append(f"X_test = {test}[X.columns]")
    elif kind == "drop":
        features.append(f"X = {train}.drop(columns={_quoted(drop + facts.categorical + facts.text)})")
        features.append(f"X_test = {test}[X.columns]")
    else:  # the encoded ones
        text = facts.text
        if kind == "concat":
            features.append(f"both = pd.concat([{train}, {test}]).drop(columns={_quoted(drop + text)})")
            encode += ["both = pd.get_dummies(both)", f"X, X_test = both[:len({train})], both[len({train}):]"]
        else:
            features.append(f"X = {train}.drop(columns={_quoted(drop + text)})")
            features.append(f"X_test = {test}[X.columns]")
        if kind == "onehot":
            encode.append("X = pd.get_dummies(X)")
            encode.append("X_test = pd.get_dummies(X_test).reindex(columns=X.columns, fill_value=0)")
        elif kind == "codes":
            encode.append('for c in X.select_dtypes(exclude="number"):')
            encode.append("    codes = {v: i for i, v in enumerate(X[c].unique())}")
            encode.append("    X[c], X_test[c] = X[c].map(codes), X_test[c].map(codes)")
        elif kind == "ordinal":
            encode.append('cats = X.select_dtypes(exclude="number").columns')
            settings = 'handle_unknown="use_encoded_value", unknown_value=-1, encoded_missing_value=-1'
            encode.append(f"enc = OrdinalEncoder({settings})")
            encode.append("X[cats] = enc.fit_transform(X[cats])")
            encode.append("X_test[cats] = enc.transform(X_test[cats])")
    fill = stages["fill"]
    if recipe.fill == "zero":
        fill.append("X, X_test = X.fillna(0), X_test.fillna(0)")
    elif recipe.fill in ("median", "mean"):
        fill.append(f"X, X_test = X.fillna(X.{recipe.fill}()), X_test.fillna(X.{recipe.fill}())")
    return [("preprocessing", "OrdinalEncoder")] if kind == "ordinal" else []


def _model(stages: Stages, recipe: Recipe) -> list[tuple[str, str]]:
    imports = [(recipe.model.module, recipe.model.name)]
    model = f"{recipe.model.name}({recipe.params})"
    steps = ["SimpleImputer"] * (recipe.fill == "impute") + ["StandardScaler"] * recipe.scale
    if steps:
        model = f"make_pipeline({', '.join(f'{step}()' for step in steps)}, {model})"
        modules = {"SimpleImputer": "impute", "StandardScaler": "preprocessing"}
        imports += [("pipeline", "make_pipeline"), *((modules[step], step) for step in steps)]
    stages["model"] = [f"model = {model}"]
    stages["fit"] = ["model.fit(X, y)"]
    return imports


def _predict(stages: Stages, recipe: Recipe, facts: Facts, test: str) -> None:
    if facts.submits == "probas":
        call = "model.predict_proba(X_test)"
    elif facts.submits == "score" and recipe.proba:
        call = "model.predict_proba(X_test)[:, 1]"
    else:
        call = "model.predict(X_test)"
    if recipe.log_target:
        call = f"np.expm1({call})"
    if facts.nonnegative:
        call += ".clip(0)"
    stages["predict"] = [f"pred = {call}"]


def _frame(stages: Stages, recipe: Recipe, facts: Facts, test: str) -> None:
    out = facts.columns[0]
    if facts.submits == "probas":
        if recipe.frame == "sample":
            frame = ['sub = pd.read_csv("data/sample_submission.csv")', "sub[sub.columns[1:]] = pred"]
        else:
            frame = [f"sub = pd.DataFrame(pred, columns={_quoted(facts.columns)})",
                     f'sub.insert(0, "{facts.id}", {test}["{facts.id}"])']  # fmt: skip
    elif recipe.frame == "sample":
        frame = ['sub = pd.read_csv("data/sample_submission.csv")', f'sub["{out}"] = pred']
    elif recipe.frame == "test":
        frame = [f'{test}["{out}"] = pred', f'sub = {test}[["{facts.id}", "{out}"]]']
    else:
        frame = [f'sub = pd.DataFrame({{"{facts.id}": {test}["{facts.id}"], "{out}": pred}})']
    stages["frame"] = frame
    stages["write"] = ['sub.to_csv("submission.csv", index=False)']
