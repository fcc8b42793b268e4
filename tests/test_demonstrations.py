"""Demonstrations: seeded, true to the prompt, and failing only by their mistakes. Real programs are really run."""

from __future__ import annotations

import asyncio
import dataclasses
import random
import re
from collections import defaultdict
from pathlib import Path

import pytest

from jaxrl_code import chat, corpus
from jaxrl_code.tasks.builtin import BUILTINS
from jaxrl_code.tasks.competition import Competition, load_all
from jaxrl_code.tasks.demo_mistakes import MISTAKES
from jaxrl_code.tasks.demo_programs import MODELS, NAMES, Facts, Recipe, feature_choices, sample_recipe
from jaxrl_code.tasks.demo_runs import run_all
from jaxrl_code.tasks.demo_tasks import variant
from jaxrl_code.tasks.demonstrations import AUTHORS, facts_of, fresh, revise, sample_mistakes, write_plan, write_program
from jaxrl_code.tasks.prepared import prepare
from jaxrl_code.tasks.prompts import PromptLimits, extract_program, fresh_messages
from sandbox.protocol import Outcome, Result

LIMITS = PromptLimits(output_head_chars=200, output_tail_chars=200)
POLICY = Path(__file__).parent.parent / "assets" / "qwen2-tiny-mle"


@pytest.fixture(scope="module")
def tasks(tmp_path_factory) -> dict[str, Competition]:
    root = tmp_path_factory.mktemp("tasks")
    for task in BUILTINS:
        prepare(task, root)
    return {task.id: task for task in load_all(root)}


def recipes(facts: Facts, number: int, seed: int = 0) -> list[Recipe]:
    rng = random.Random(seed)
    return [sample_recipe(rng, facts, rng.randrange(len(AUTHORS))) for _ in range(number)]


def test_facts_are_what_the_prompt_says(tasks):
    titanic = facts_of(tasks["titanic-survival"], LIMITS)
    assert (titanic.id, titanic.target, titanic.columns) == ("passenger_id", "survived", ("survived",))
    assert (titanic.kind, titanic.submits, titanic.classes) == ("classes", "score", 2)
    assert (titanic.numeric, titanic.categorical, titanic.text) == (("age",), ("ticket_class", "sex"), ("name",))
    assert "age" in titanic.missing
    wine = facts_of(tasks["wine-cultivar"], LIMITS)
    assert (wine.submits, wine.columns) == ("probas", ("barbera", "barolo", "grignolino"))
    assert len(wine.numeric) == 8 and "float" in wine.hidden
    assert facts_of(tasks["digits"], LIMITS).submits == "label"
    mpg = facts_of(tasks["auto-mpg"], LIMITS)
    assert (mpg.kind, mpg.submits, mpg.classes, mpg.nonnegative) == ("number", "number", 0, True)
    for task in tasks.values():
        prompt = fresh_messages(task, LIMITS)[-1]["content"]
        facts = facts_of(task, LIMITS)
        names = (facts.id, facts.target, *facts.columns, *facts.numeric, *facts.categorical, *facts.text)
        assert all(name in prompt for name in names)


def test_the_same_seed_gives_the_same_demonstrations(tasks):
    def make() -> list[corpus.Group]:
        return corpus.fresh_groups(list(tasks.values()), each=2, answers=3, seed=7, limits=LIMITS)

    assert make() == make()
    assert len(make()) == 2 * len(tasks)
    assert len({answer for group in make() for answer in group.answers}) > 50


def test_an_answer_is_a_plan_and_one_program(tasks):
    rng = random.Random(0)
    for task in tasks.values():
        demo = fresh(rng, task, facts_of(task, LIMITS), LIMITS)
        assert extract_program(demo.answer) == demo.program
        plan = demo.answer.split("```")[0]
        assert 10 < len(plan) < 200 and demo.recipe.model.says in plan


def test_every_model_and_way_of_features_turns_up(tasks):
    seen_models, seen_features = set(), set()
    for task in tasks.values():
        facts = facts_of(task, LIMITS)
        for recipe in recipes(facts, 200):
            seen_models.add(recipe.model)
            seen_features.add(recipe.features)
            assert recipe.model.kind == facts.kind
        assert set(feature_choices(facts)) <= seen_features
    assert seen_models == set(MODELS)
    assert len(NAMES) == len(AUTHORS)


def test_whatever_draws_at_random_is_seeded(tasks):
    drawing = {"Tree", "Forest", "Boosting"}
    for task in tasks.values():
        facts = facts_of(task, LIMITS)
        for recipe in recipes(facts, 50):
            if any(word in recipe.model.name for word in drawing):
                assert "random_state=0" in write_program(recipe, facts)


def test_authors_differ_in_care_and_half_of_all_fails(tasks):
    rng, shares = random.Random(0), []
    for author in range(len(AUTHORS)):
        made = [
            sample_mistakes(rng, sample_recipe(rng, facts, author), facts)
            for facts in (facts_of(task, LIMITS) for task in tasks.values())
            for _ in range(200)
        ]
        shares.append(sum(bool(mistakes) for mistakes in made) / len(made))
    assert shares == sorted(shares) and shares[0] < 0.3 and shares[-1] > 0.6
    assert 0.4 < sum(shares) / len(shares) < 0.65


def test_every_mistake_changes_the_program_where_it_fits(tasks):
    fitted = defaultdict(int)
    for task in tasks.values():
        facts = facts_of(task, LIMITS)
        for recipe in recipes(facts, 60):
            clean = write_program(recipe, facts)
            for mistake in MISTAKES.values():
                if mistake.fits(recipe, facts):
                    fitted[mistake.name] += 1
                    wrong = write_program(dataclasses.replace(recipe, mistakes=(mistake.name,)), facts)
                    assert wrong != clean, (task.id, mistake.name, clean)
    assert set(fitted) == set(MISTAKES)


def test_a_revision_mends_what_failed_and_says_so(tasks):
    facts = facts_of(tasks["titanic-survival"], LIMITS)
    earlier = dataclasses.replace(recipes(facts, 1)[0], mistakes=("wrong path",))
    revised = [revise(random.Random(i), facts, earlier, failed=True) for i in range(40)]
    mended = [recipe for recipe, outline in revised if outline == "The run failed: read the files from data/."]
    assert len(mended) > 20
    assert {write_program(r, facts) for r in mended} == {
        write_program(dataclasses.replace(earlier, mistakes=()), facts)
    }
    better = [revise(random.Random(i), facts, earlier, failed=False) for i in range(40)]
    assert all(write_plan(recipe) for recipe, _ in better) and len({recipe.model for recipe, _ in better}) > 3


def test_a_variant_is_a_task_of_other_names(tasks, tmp_path):
    for i, task in enumerate(tasks.values()):
        made = variant(random.Random(i), task, tmp_path, i)
        facts, old = facts_of(made, LIMITS), facts_of(task, LIMITS)
        assert not set(facts.numeric + facts.categorical + facts.text) & set(old.numeric + old.categorical + old.text)
        assert facts.submits in ("probas",) if old.submits == "probas" else facts.kind == old.kind
        assert feature_choices(facts)
        assert made.tables[0].rows <= task.tables[0].rows


def graded(jobs: list[tuple[Competition, str]]) -> list[Result]:
    results = run_all([(program, task.public_dir) for task, program in jobs], workers=2)
    return [result for result, _ in asyncio.run(corpus.grade_all([task for task, _ in jobs], results, workers=2))]


@pytest.mark.slow
def test_programs_without_mistakes_run_and_are_valid(tasks, tmp_path):
    jobs = []
    for i, task in enumerate(
        (*tasks.values(), *(variant(random.Random(i), t, tmp_path, i) for i, t in enumerate(tasks.values())))
    ):
        facts = facts_of(task, LIMITS)
        jobs += [(task, write_program(recipe, facts)) for recipe in recipes(facts, 12, seed=i)]
    for (task, program), result in zip(jobs, graded(jobs), strict=True):
        assert result.outcome is Outcome.OK, f"{task.id}: {result.detail}\n{program}\n{result.output_head}"


@pytest.mark.slow
def test_every_mistake_fails_in_its_way(tasks):
    jobs, expected = [], []
    for mistake in MISTAKES.values():
        found = 0
        for seed in range(20):
            for task in tasks.values():
                facts = facts_of(task, LIMITS)
                recipe = recipes(facts, 1, seed)[0]
                if found < 6 and mistake.fits(recipe, facts):
                    found += 1
                    jobs.append((task, write_program(dataclasses.replace(recipe, mistakes=(mistake.name,)), facts)))
                    expected.append(mistake)
    for (task, program), mistake, result in zip(jobs, expected, graded(jobs), strict=True):
        raised = re.findall(r"^(?:[\w.]+\.)?(\w+Error)\b", result.output_head, re.MULTILINE)
        got = raised[-1] if result.outcome is Outcome.USER_ERROR and raised else str(result.outcome)
        assert got == mistake.fails, f"{mistake.name}, {task.id}\n{program}\n{result.output_head}{result.detail}"


def test_prompts_and_answers_are_short_in_the_shipped_tokens(tasks):
    tokenizer, rng = chat.load(POLICY), random.Random(0)
    for task in tasks.values():
        facts = facts_of(task, LIMITS)
        assert len(tokenizer.encode_chat(fresh_messages(task, LIMITS))) <= 300
        lengths = sorted(len(tokenizer.encode(fresh(rng, task, facts, LIMITS).answer)) for _ in range(50))
        assert lengths[25] <= 190 and lengths[-1] < 256
