"""What a grader is asked (GradeSpec), what it answers (Grade), and the fixed list of reasons that a policy is shown."""

from __future__ import annotations

import dataclasses
import enum


class Reason(enum.StrEnum):
    """Why a submission is invalid. A policy reads these texts, so none holds anything of the answers."""

    OK = "ok"
    NONE = "no submission.csv was written"
    TOO_LARGE = "submission.csv is far larger than the sample submission"
    EMPTY = "submission.csv is empty"
    NOT_TEXT = "submission.csv is not UTF-8 text"
    LONG_HEADER = "the first line of submission.csv is too long"
    LONG_FIELD = "a field of submission.csv is too long"
    MALFORMED = "submission.csv is not well-formed CSV"
    RAGGED = "a row has more or fewer fields than the header"
    REPEATED_COLUMN = "a column name occurs twice"
    WRONG_COLUMNS = "the columns differ from those of sample_submission.csv"
    WRONG_ROWS = "the number of rows differs from that of sample_submission.csv"
    REPEATED_ID = "an id occurs twice"
    WRONG_IDS = "the ids differ from those of sample_submission.csv"
    NOT_FINITE = "a prediction is missing or not finite"
    NOT_A_NUMBER = "a prediction is not a number"
    NOT_WHOLE = "a prediction is not a whole number"
    NEGATIVE = "a prediction is negative, which the metric does not take"
    NOT_PROBABILITY = "a prediction is not a probability between 0 and 1"
    ZERO_ROW = "the probabilities of a row are all zero"
    OUT_OF_RANGE = "a prediction is far out of range"
    SCORE_NOT_FINITE = "the score is not finite"
    REFUSED = "the competition's grader refused the submission"
    BROKE_GRADER = "the competition's grader takes sample_submission.csv but failed on the submission"
    OUR_FAULT = "grading failed for no fault of the submission"


@dataclasses.dataclass(frozen=True)
class GradeSpec:
    """Where a competition's answers lie and how submissions are scored: by one of our metrics or by a function."""

    answers: str  # path of the hidden answers
    sample: str  # path of sample_submission.csv
    metric: str = ""  # a name that sandbox.metrics knows
    grade_fn: str = ""  # 'package.module:function' or 'path.py:function' of MLE-bench's contract
    id_column: str = ""  # '' is the sample's first column

    def __post_init__(self) -> None:
        if bool(self.metric) == bool(self.grade_fn):
            raise ValueError(f"metric {self.metric!r}, grade_fn {self.grade_fn!r}: set exactly one of the two")


@dataclasses.dataclass(frozen=True)
class Grade:
    """A score as the metric has it (no sign changed), rounded to 5 places as in MLE-bench. 0.0 is a score."""

    score: float | None
    valid: bool
    reason: Reason
    flags: tuple[str, ...] = ()  # 'degenerate': all predictions equal; 'sample_copy': those of the sample submission
    detail: str = ""  # for a person, where it was our fault; never for a policy

    @property
    def infra(self) -> bool:
        """Our fault: says nothing about the submission, and is never a reward."""
        return self.reason is Reason.OUR_FAULT
