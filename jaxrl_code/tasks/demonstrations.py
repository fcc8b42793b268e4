"""Demonstrations for behaviour cloning: answers (a plan and a program) to the prompts of `tasks.prompts`.

They imitate a corpus written by several authors of different care: each has habits of wording and naming, and a rate of
mistakes. About half of the programs fail, which is what reinforcement learning is then to unlearn.
"""

from __future__ import annotations

import dataclasses
import random

from jaxrl_code.tasks.competition import Competition
from jaxrl_code.tasks.demo_mistakes import MISTAKES
from jaxrl_code.tasks.demo_programs import Facts, Recipe, build, sample_recipe, text_of
from jaxrl_code.tasks.prompts import PromptLimits, fresh_messages, improve_messages
from jaxrl_code.tasks.solutions import Solution
from sandbox.metrics import find


@dataclasses.dataclass(frozen=True)
class Author:
    opening: str  # of a plan; {model} and {features} are filled in
    slip: float  # a mistake of weight 1 is made with this probability
    weight: float = 1.0


AUTHORS = (
    Author("I will train {model} on {features}.", slip=0.02),
    Author("Plan: prepare {features}, then fit {model}.", slip=0.05),
    Author("Let me use {model} with {features}.", slip=0.09),
    Author("Quick try: {features} into {model}.", slip=0.16),
)

_FEATURES = {
    "numeric": "the numeric columns",
    "drop": "all but the text columns",
    "listed": "a few chosen columns",
    "onehot": "one-hot encoded columns",
    "concat": "one-hot columns made on both tables",
    "codes": "integer codes of the categories",
    "ordinal": "ordinal encoded columns",
    "tfidf": 'TF-IDF of "{column}"',
    "counts": 'word counts of "{column}"',
    "lengths": 'the lengths of "{column}"',
}
_FILLS = {
    "zero": "Fill gaps with 0.",
    "median": "Fill gaps with the median.",
    "mean": "Fill gaps with the mean.",
    "impute": "Impute gaps.",
}
# Weakest first, roughly: revising a valid program moves up.
_STRENGTH = (
    "a dummy classifier", "a dummy regressor", "a decision stump", "naive Bayes", "nearest neighbors",
    "a decision tree", "linear regression", "ridge regression", "logistic regression", "gradient boosting",
    "extra trees", "a random forest", "histogram boosting",
)  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Demonstration:
    task_id: str
    messages: tuple[dict[str, str], ...]
    answer: str
    program: str
    recipe: Recipe

    @property
    def mistakes(self) -> tuple[str, ...]:
        return self.recipe.mistakes


def facts_of(task: Competition, limits: PromptLimits) -> Facts:
    """What the prompt says about a task. ValueError for a task that the demonstrations' programs can't solve."""
    tables = {table.file: table for table in task.tables}
    if "train.csv" not in tables or "test.csv" not in tables or len(task.target_columns) != 1:
        raise ValueError(f"task {task.id} has no train.csv and test.csv that differ in one target column")
    target = next(c for c in tables["train.csv"].columns if c.name == task.target_columns[0])
    columns = [c for c in tables["test.csv"].columns if c.name != task.id_column]
    takes = find(task.metric).takes if task.metric else "number" if target.kind == "float" else "label"
    number = target.kind == "float" or (takes in ("number", "nonnegative") and not target.labels)
    if len(task.submission_columns) > 2:
        submits = "probas"
    elif number:
        submits = "number"
    else:  # a metric that takes any number of a class is a ranking of scores, as AUC
        submits = "label" if takes in ("label", "whole") else "score"
    # A reader of the prompt sees the names of the first columns only.
    seen = columns[: limits.columns]
    hidden = columns[limits.columns :]
    gaps = {c.name for table in task.tables for c in table.columns if c.missing}
    return Facts(
        task_id=task.id,
        id=task.id_column,
        target=target.name,
        columns=task.submission_columns[1:],
        kind="number" if number else "classes",
        submits=submits,
        numeric=tuple(c.name for c in seen if c.kind in ("int", "float")),
        categorical=tuple(c.name for c in seen if c.kind == "category"),
        text=tuple(c.name for c in seen if c.kind == "text"),
        missing=frozenset(c.name for c in seen if c.name in gaps),
        hidden=frozenset(c.kind for c in hidden) | {"missing" for c in hidden if c.name in gaps},
        classes=0 if number else len(target.labels),
        nonnegative=takes == "nonnegative",
    )


def sample_mistakes(rng: random.Random, recipe: Recipe, facts: Facts) -> tuple[str, ...]:
    """Independent slips, each with its author's rate times its weight."""
    slip = AUTHORS[recipe.author].slip
    return tuple(m.name for m in MISTAKES.values() if rng.random() < slip * m.weight and m.fits(recipe, facts))


def write_program(recipe: Recipe, facts: Facts) -> str:
    """The recipe's program, its mistakes included."""
    stages = build(recipe, facts)
    for name in recipe.mistakes:
        MISTAKES[name].apply(stages, recipe, facts, random.Random(f"{recipe.seed}:{name}"))
    return text_of(stages)


def write_plan(recipe: Recipe) -> str:
    features = _FEATURES[recipe.features].format(column=recipe.listed[0] if recipe.listed else "")
    plan = AUTHORS[recipe.author].opening.format(model=recipe.model.says, features=features)
    if recipe.fill:
        plan += " " + _FILLS[recipe.fill]
    if recipe.log_target:
        plan += " Predict the log of the target."
    return plan


def answer(plan: str, program: str) -> str:
    return f"{plan}\n```python\n{program}```"


def sample_author(rng: random.Random) -> int:
    return rng.choices(range(len(AUTHORS)), [author.weight for author in AUTHORS])[0]


def fresh(rng: random.Random, task: Competition, facts: Facts, limits: PromptLimits) -> Demonstration:
    """An answer to a prompt that asks for a solution from scratch."""
    recipe = sample_recipe(rng, facts, sample_author(rng))
    recipe = dataclasses.replace(recipe, mistakes=sample_mistakes(rng, recipe, facts))
    program = write_program(recipe, facts)
    messages = tuple(fresh_messages(task, limits))
    return Demonstration(task.id, messages, answer(write_plan(recipe), program), program, recipe)


def improve(
    rng: random.Random, task: Competition, facts: Facts, earlier: Recipe, solution: Solution, limits: PromptLimits
) -> Demonstration:
    """A revision of an earlier program: its mistakes mended if it failed, else another model, features or settings."""
    recipe, outline = revise(rng, facts, earlier, failed=solution.score is None)
    recipe = dataclasses.replace(recipe, mistakes=sample_mistakes(rng, recipe, facts))
    program = write_program(recipe, facts)
    messages = tuple(improve_messages(task, solution, limits))
    text = answer(f"{outline} {write_plan(recipe)}", program)
    return Demonstration(task.id, messages, text, program, recipe)


def revise(rng: random.Random, facts: Facts, earlier: Recipe, failed: bool) -> tuple[Recipe, str]:
    """The revised recipe without mistakes, and the sentence that outlines the change."""
    seed = rng.randrange(1 << 30)
    if failed and rng.random() < 0.8:
        fix = MISTAKES[earlier.mistakes[0]].mends if earlier.mistakes else "write it anew"
        return dataclasses.replace(earlier, mistakes=(), seed=seed), f"The run failed: {fix}."
    for _ in range(20):  # a stronger model, by the usual order
        recipe = sample_recipe(rng, facts, earlier.author)
        if rng.random() < 0.2 or _STRENGTH.index(recipe.model.says) > _STRENGTH.index(earlier.model.says):
            return recipe, f"Change {earlier.model.says} to {recipe.model.says}."
    return sample_recipe(rng, facts, earlier.author), "Try other settings."
