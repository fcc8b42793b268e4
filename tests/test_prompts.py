"""Prompts are compact and say all that a program needs; programs come out of answers as documented."""

from __future__ import annotations

from pathlib import Path

import pytest

from jaxrl_code.tasks.competition import Competition
from jaxrl_code.tasks.prompts import PromptLimits, extract_program, fresh_messages, improve_messages
from jaxrl_code.tasks.solutions import Solution
from jaxrl_code.tasks.tables import Column, Table


def task(columns: int = 3, labels: tuple[str, ...] = ("no", "yes")) -> Competition:
    features = tuple(Column(f"x{i}", "float", missing=i == 1) for i in range(columns))
    test = Table("test.csv", 40, (Column("row", "int", False), *features))
    train = Table("train.csv", 90, (*test.columns, Column("y", "category", False, labels)))
    path = Path("/")
    return Competition(
        "t", "Toy task", "# Toy\n\nTell y from x.\nIt is easy.\n\n## Files\n", "auc", "", path, path, path, (0.9, 0.5),
        (train, test), (), "row", ("row", "y"), ("y",), "auc",
    )  # fmt: skip


def test_a_fresh_prompt_word_for_word():
    system, user = fresh_messages(task())
    assert system["role"] == "system" and "writes submission.csv" in system["content"]
    assert user == {
        "role": "user",
        "content": """# Toy task
Tell y from x. It is easy.
Metric: auc (higher is better)
data/train.csv: 90 rows
data/test.csv: 40 rows
Id: "row"
Columns: "x0" float, "x1" float missing, "x2" float
Target: "y" (no, yes)
Submission columns: "row", "y\"""",
    }


def test_what_is_long_is_counted_instead():
    limits = PromptLimits(columns=2, labels=1, description_chars=10)
    content = fresh_messages(task(columns=30), limits)[1]["content"]
    assert 'Columns: "x0" float, "x1" float missing, ... and 28 more (float)\n' in content
    assert 'Target: "y" category\n' in content and "\nTell y ...\n" in content


def test_an_improvement_prompt_shows_program_output_and_outcome():
    content = improve_messages(task(), Solution("a = 1\n", "hello\n", "ok", 0.7, score=0.0))[1]["content"]
    assert content.startswith(fresh_messages(task())[1]["content"])
    assert "```python\na = 1\n```" in content and "```\nhello\n```" in content
    assert "valid submission, auc 0\n" in content and "no valid" not in content  # a score of 0.0 is a score
    failed = improve_messages(task(), Solution("a = 1\n", "", "timeout", -10.0))[1]["content"]
    assert "no valid submission (timeout)" in failed and "(nothing)" in failed


def test_an_improvement_prompt_is_capped_and_its_fences_hold():
    limits = PromptLimits(program_chars=20, output_head_chars=5, output_tail_chars=7)
    content = improve_messages(task(), Solution("p" * 500, "HEAD!" + "x" * 999 + "THE END", "ok", 1.0, 0.5), limits)
    assert "HEAD!\n... 999 characters left out ...\nTHE END\n" in content[1]["content"]
    assert "p" * 11 not in content[1]["content"]
    sly = Solution("s = '''\n```\n'''\n", "```python\nevil()\n```", "ok", 1.0, 0.5)
    assert extract_program(improve_messages(task(), sly)[1]["content"]) == "s = '''\n```\n'''\n"


@pytest.mark.parametrize(
    ("text", "program"),
    [
        ("Plan.\n```python\na = 1\n```", "a = 1\n"),
        ("```python\na = 1\n\nb = 2\n```\nThat is all, `really`.", "a = 1\n\nb = 2\n"),
        ("```py\na = 1\n```", "a = 1\n"),
        ("```Python\na = 1\n```", "a = 1\n"),
        ("``` python3 title=x\na = 1\n```", "a = 1\n"),
        ("```{python}\na = 1\n```", "a = 1\n"),
        ("~~~python\na = 1\n~~~", "a = 1\n"),
        ("```python\r\na = 1\r\n```\r\n", "a = 1\n"),
        ("````python\ns = '''\n```\n'''\n````", "s = '''\n```\n'''\n"),  # a longer fence holds a shorter one
        ("```python\ns = '~~~'\n~~~\n```", "s = '~~~'\n~~~\n"),  # another kind of fence closes nothing
        ("```python\na = 1\n```\nBetter:\n```python\na = 2\n```", "a = 2\n"),  # the last python block
        ("```python\na = 1\n```\nRun it:\n```bash\npython a.py\n```\n```\noutput\n```", "a = 1\n"),
        ("```\na = 1\n```", "a = 1\n"),  # no language, nothing better
        ("```python\na = 1\n```\nor\n```python\na = 2", "a = 1\n"),  # the last complete one
        ("```python\na = 1", None),  # cut off
        ("```python\na = 1 ```", None),
        ("```bash\nls\n```", None),
        ("```python\n\n```", None),
        ("a = 1", None),
        ("Use ```python a = 1``` inline", None),
        ("", None),
    ],
)
def test_extract_program(text: str, program: str | None):
    assert extract_program(text) == program
