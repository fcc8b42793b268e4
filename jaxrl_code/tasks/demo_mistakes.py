"""The mistakes that models make in such programs, each a small edit of one stage, with the way in which it fails."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable

from jaxrl_code.tasks.demo_programs import ENCODED_FEATURES, NAMES, Facts, Recipe, Stages

_OTHER_TARGETS = ("target", "label", "y", "class", "Target", "outcome")
_OTHER_IDS = ("Id", "ID", "index", "row_id")
_OTHER_PATHS = ("train.csv", "data/training.csv", "input/train.csv", "../data/train.csv", "data/train_data.csv")
_OTHER_OUTPUTS = ("sub.csv", "output.csv", "predictions.csv", "data/submission.csv", "submissions.csv")
_OTHER_MODULES = ("linear_model", "ensemble", "tree", "neighbors")


@dataclasses.dataclass(frozen=True)
class Mistake:
    name: str
    fails: str  # the last error's type, or 'no_submission', or 'invalid_submission'
    weight: float
    apply: Callable[[Stages, Recipe, Facts, random.Random], None]
    fits: Callable[[Recipe, Facts], bool] = lambda recipe, facts: True
    mends: str = ""  # what a plan says that mends it


def _replace(lines: list[str], old: str, new: str, count: int = -1) -> None:
    lines[:] = [line.replace(old, new, count) for line in lines]


def _target(stages: Stages, recipe: Recipe, facts: Facts, rng: random.Random) -> None:
    wrong = rng.choice([name for name in _OTHER_TARGETS if name != facts.target])
    for stage in ("target", "features"):
        _replace(stages[stage], f'"{facts.target}"', f'"{wrong}"')


def _id(stages: Stages, recipe: Recipe, facts: Facts, rng: random.Random) -> None:
    wrong = rng.choice([name for name in _OTHER_IDS if name != facts.id])
    for stage in ("features", "frame"):
        _replace(stages[stage], f'"{facts.id}"', f'"{wrong}"')


def _path(stages: Stages, recipe: Recipe, facts: Facts, rng: random.Random) -> None:
    wrong = rng.choice(_OTHER_PATHS)
    _replace(stages["load"], "data/train.csv", wrong)
    _replace(stages["load"], "data/test.csv", wrong.replace("train", "test").replace("testing", "test"))


def _import(stages: Stages, recipe: Recipe, facts: Facts, rng: random.Random) -> None:
    forgotten = rng.choice([line for line in stages["imports"] if line.startswith("from")])
    stages["imports"].remove(forgotten)


def _module(stages: Stages, recipe: Recipe, facts: Facts, rng: random.Random) -> None:
    wrong = rng.choice([name for name in _OTHER_MODULES if name != recipe.model.module])
    _replace(stages["imports"], f"sklearn.{recipe.model.module} import", f"sklearn.{wrong} import")


def _drop(*stages_: str) -> Callable[[Stages, Recipe, Facts, random.Random], None]:
    def apply(stages: Stages, recipe: Recipe, facts: Facts, rng: random.Random) -> None:
        for stage in stages_:
            stages[stage] = []

    return apply


def _swap(stage: str, old: str, new: str) -> Callable[[Stages, Recipe, Facts, random.Random], None]:
    def apply(stages: Stages, recipe: Recipe, facts: Facts, rng: random.Random) -> None:
        _replace(stages[stage], old, new)

    return apply


def _id_in_test(stages: Stages, recipe: Recipe, facts: Facts, rng: random.Random) -> None:
    test = NAMES[recipe.author][1]
    _replace(stages["features"], f"{test}[X.columns]", test)


def _flat_proba(stages: Stages, recipe: Recipe, facts: Facts, rng: random.Random) -> None:
    _replace(stages["predict"], "[:, 1]", "")


def _predict_train(stages: Stages, recipe: Recipe, facts: Facts, rng: random.Random) -> None:
    _replace(stages["predict"], "(X_test)", "(X)")


def _column(stages: Stages, recipe: Recipe, facts: Facts, rng: random.Random) -> None:
    wrong = rng.choice([name for name in ("prediction", "pred", "target", "label") if name != facts.columns[0]])
    _replace(stages["frame"], f'"{facts.columns[0]}"', f'"{wrong}"')


def _no_id(stages: Stages, recipe: Recipe, facts: Facts, rng: random.Random) -> None:
    out = facts.columns[0]
    stages["frame"] = [stages["frame"][0]] if facts.submits == "probas" else [f'sub = pd.DataFrame({{"{out}": pred}})']


def _output(stages: Stages, recipe: Recipe, facts: Facts, rng: random.Random) -> None:
    _replace(stages["write"], "submission.csv", rng.choice(_OTHER_OUTPUTS[:3] + _OTHER_OUTPUTS[4:]))


def _syntax(stages: Stages, recipe: Recipe, facts: Facts, rng: random.Random) -> None:
    stage = rng.choice([name for name in ("load", "model", "fit", "predict", "frame", "write") if stages[name]])
    line = rng.randrange(len(stages[stage]))
    text = stages[stage][line]
    stages[stage][line] = text[: text.rindex(")")] if ")" in text else text.replace("]", "", 1)


def _attribute(stages: Stages, recipe: Recipe, facts: Facts, rng: random.Random) -> None:
    stage, old, new = rng.choice(
        (("fit", ".fit(", ".train("), ("predict", ".predict", ".predicts"), ("load", "read_csv", "load_csv"),
         ("write", "to_csv", "save_csv"))
    )  # fmt: skip
    _replace(stages[stage], old, new)


def _encoded(recipe: Recipe, facts: Facts) -> bool:
    return recipe.features in ENCODED_FEATURES and recipe.model.module != "dummy"


def _unencoded(stages: Stages, recipe: Recipe, facts: Facts, rng: random.Random) -> None:
    keep = [line for line in stages["encode"] if line.startswith("X, X_test = both")]
    stages["encode"] = keep
    if recipe.fill in ("median", "mean"):  # would fail on the strings first
        stages["fill"] = []


def _gaps(recipe: Recipe, facts: Facts) -> bool:
    return recipe.fill in ("zero", "median", "mean") and not recipe.model.nan and recipe.features != "codes"


def _checks_names(recipe: Recipe, facts: Facts) -> bool:
    return recipe.features in ("numeric", "drop") and recipe.model.module != "dummy" and not recipe.fill


_SLIPS = (
    # Six that most programs can hold are common, so that what to unlearn shows in few programs.
    Mistake("wrong target", "KeyError", 1.0, _target, mends="use the target's right name"),
    Mistake("wrong path", "FileNotFoundError", 1.0, _path, mends="read the files from data/"),
    Mistake("forgotten import", "NameError", 1.0, _import, mends="add the missing import"),
    Mistake("kept index", "invalid_submission", 1.0, _swap("write", ", index=False", ""), mends="write no index"),
    Mistake("wrong column", "invalid_submission", 1.0, _column, mends="name the submission's columns as asked",
            fits=lambda r, f: f.submits != "probas" and r.frame != "sample"),
    Mistake("unencoded", "ValueError", 1.5, _unencoded, _encoded, mends="encode the text columns"),
    # The rare ones.
    Mistake("wrong id", "KeyError", 0.5, _id, mends="use the id column's right name",
            fits=lambda r, f: r.frame != "sample" or r.features in ("numeric", "drop", *ENCODED_FEATURES)),
    Mistake("gaps", "ValueError", 1.5, _drop("fill"), _gaps, mends="fill the missing values"),
    Mistake("unfitted", "NotFittedError", 0.4, _drop("fit"), mends="fit the model before predicting"),
    Mistake("wrong module", "ImportError", 0.4, _module, mends="import the model from the right module"),
    Mistake("flat proba", "ValueError", 0.6, _flat_proba, mends="take the second column of the probabilities",
            fits=lambda r, f: f.submits == "score" and r.proba),
    Mistake("predicts train", "ValueError", 0.3, _predict_train, mends="predict on the test rows"),
    Mistake("id in test", "ValueError", 0.5, _id_in_test, _checks_names, mends="drop the id from the test features"),
    Mistake("no id", "invalid_submission", 0.4, _no_id, mends="put the id into the submission"),
    Mistake("wrong output", "no_submission", 0.4, _output, mends="write submission.csv"),
    Mistake("not written", "no_submission", 0.3, _drop("write"), mends="write the submission"),
    Mistake("syntax", "SyntaxError", 0.5, _syntax, mends="close the bracket"),
    Mistake("attribute", "AttributeError", 0.4, _attribute, mends="call the right method"),
)  # fmt: skip

MISTAKES = {mistake.name: mistake for mistake in _SLIPS}
