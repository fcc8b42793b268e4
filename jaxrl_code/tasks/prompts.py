"""From a competition to chat messages, and from the policy's answer to its program."""

from __future__ import annotations

import dataclasses
import json
import re

from jaxrl_code.tasks.competition import Competition
from jaxrl_code.tasks.solutions import Solution
from jaxrl_code.tasks.tables import Column, Table

SYSTEM = (
    "You are a machine learning engineer. Plan in a few sentences, then write one complete program in a ```python "
    "block that writes submission.csv."
)
_REVISE = "Revise this program to score better: outline the changes, then write the full program."
_FENCE = re.compile(r"^ {0,3}(`{3,}|~{3,})[ \t]*([^\s`]*)[^\n`]*$")
_PYTHON = ("python", "python3", "py")


@dataclasses.dataclass(frozen=True)
class PromptLimits:
    """How much of each part a prompt shows."""

    description_chars: int = 240
    columns: int = 8  # of each table; the rest are counted
    labels: int = 10  # names of a target's classes, when it has no more than these
    program_chars: int = 6000  # of an earlier program, which is cut in its middle past this
    output_head_chars: int = 200  # of its terminal output
    output_tail_chars: int = 400


def fresh_messages(task: Competition, limits: PromptLimits = PromptLimits()) -> list[dict[str, str]]:
    """Asks for a solution from scratch."""
    return [{"role": "system", "content": SYSTEM}, {"role": "user", "content": _task_text(task, limits)}]


def improve_messages(
    task: Competition, solution: Solution, limits: PromptLimits = PromptLimits()
) -> list[dict[str, str]]:
    """Shows an earlier solution with its terminal output and asks to revise it."""
    program = _cut(solution.program.strip("\n"), limits.program_chars // 2, limits.program_chars // 2)
    output = _cut(solution.output.strip(), limits.output_head_chars, limits.output_tail_chars) or "(nothing)"
    if solution.score is None:
        outcome = f"no valid submission ({solution.outcome})"
    else:
        outcome = f"valid submission, {task.metric_label} {solution.score:.4g}"
    parts = (
        _task_text(task, limits),
        f"An earlier program:\n{_fenced(program, 'python')}",
        f"Its output:\n{_fenced(output)}",
        f"Its outcome: {outcome}",
        _REVISE,
    )
    return [{"role": "system", "content": SYSTEM}, {"role": "user", "content": "\n".join(parts)}]


def extract_program(text: str) -> str | None:
    """The last complete python block of an answer; failing that the last complete block without a language; or None.

    A block is fenced as in CommonMark (``` or ~~~, three or more; closed by a line of at least as many of the same).
    Later wins because a policy that corrects itself writes its final program last. A block that was cut off before its
    closing fence is never run: half a program can look like a whole one. No fence at all is no program.
    """
    python, plain = None, None
    fence, language, block = "", "", []
    for line in text.replace("\r\n", "\n").split("\n"):
        found = _FENCE.match(line)
        if not fence:
            if found:
                fence, language, block = found.group(1), found.group(2).lower().strip("{}."), []
        elif found and found.group(1).startswith(fence) and not line.strip(" \t" + fence[0]):
            program = "\n".join(block)
            if program.strip():
                if language in _PYTHON:
                    python = program + "\n"
                elif not language:
                    plain = program + "\n"
            fence = ""
        else:
            block.append(line)
    return plain if python is None else python


def _task_text(task: Competition, limits: PromptLimits) -> str:
    lines = [f"# {task.name}"]
    if summary := _first_words(task.description, limits.description_chars):
        lines.append(summary)
    lines.append(f"Metric: {task.metric_label} ({'lower' if task.lower_is_better else 'higher'} is better)")
    lines += [f"data/{table.file}: {table.rows} rows" for table in task.tables]
    lines.append(f"Id: {_quoted(task.id_column)}")
    tables = {table.file: table for table in task.tables}
    test = tables.get("test.csv")
    for table in (test,) if test else task.tables:
        lines.append(f"{'Columns' if test else table.file}: {_columns(table, task, limits)}")
    if task.target_columns and "train.csv" in tables:
        targets = [column for column in tables["train.csv"].columns if column.name in task.target_columns]
        lines.append(f"Target: {', '.join(_target(column, limits) for column in targets)}")
    lines.append(f"Submission columns: {_names(task.submission_columns, limits)}")
    return "\n".join(lines)


def _columns(table: Table, task: Competition, limits: PromptLimits) -> str:
    columns = [column for column in table.columns if column.name != task.id_column]
    gaps = {column.name for each in task.tables for column in each.columns if column.missing}  # in train or in test

    def kind(column: Column) -> str:
        return f"{column.kind}{' missing' if column.name in gaps else ''}"

    shown = [f"{_quoted(column.name)} {kind(column)}" for column in columns[: limits.columns]]
    rest = columns[limits.columns :]
    if rest:
        shown.append(f"... and {len(rest)} more ({', '.join(sorted({kind(column) for column in rest}))})")
    return ", ".join(shown)


def _target(column: Column, limits: PromptLimits) -> str:
    if column.labels and len(column.labels) <= limits.labels:
        return f"{_quoted(column.name)} ({', '.join(column.labels)})"
    return f"{_quoted(column.name)} {column.kind}"


def _names(names: tuple[str, ...], limits: PromptLimits) -> str:
    keep = limits.columns + 4  # an id and the class columns of a multi-class task should all be seen
    if len(names) <= keep:
        return ", ".join(map(_quoted, names))
    return f"{', '.join(map(_quoted, names[:keep]))}, ... and {len(names) - keep} more"


def _quoted(name: str) -> str:
    """As a program writes it: in the same tokens, so that a small model can copy it, and with its spaces."""
    return json.dumps(name, ensure_ascii=False)


def _first_words(description: str, chars: int) -> str:
    """The first paragraph that is not a heading, cut at a word."""
    for paragraph in re.split(r"\n\s*\n", description.strip()):
        text = " ".join(line.strip() for line in paragraph.splitlines() if not line.startswith("#")).strip()
        if text:
            return text if len(text) <= chars else text[:chars].rsplit(" ", 1)[0] + " ..."
    return ""


def _fenced(text: str, language: str = "") -> str:
    """A block that stays one whatever fences the text holds."""
    longest = max((len(run) for run in re.findall(r"`+", text)), default=0)
    fence = "`" * max(3, longest + 1)
    return f"{fence}{language}\n{text}\n{fence}"


def _cut(text: str, head: int, tail: int) -> str:
    if len(text) <= head + tail:
        return text
    return f"{text[:head]}\n... {len(text) - head - tail} characters left out ...\n{text[len(text) - tail :]}"
