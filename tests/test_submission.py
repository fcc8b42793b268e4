"""Strict checks of submissions and hand-worked scores, in this process; tests/test_grader.py has the processes."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sandbox.grade import Grade, GradeSpec, Reason
from sandbox.metrics import METRICS, find
from sandbox.submission import Reference, grade, import_function, load_reference

ANSWERS = "id,y\n001,0\n1,1\n NA,1\nNA,0\n"  # ids that pandas would change
SAMPLE = "id,y\n001,0.5\n1,0.5\n NA,0.5\nNA,0.5\n"


def competition(folder: Path, metric: str, answers: str = ANSWERS, sample: str = SAMPLE, **kwargs: str) -> Reference:
    (folder / "answers.csv").write_text(answers)
    (folder / "sample.csv").write_text(sample)
    return load_reference(GradeSpec(str(folder / "answers.csv"), str(folder / "sample.csv"), metric, **kwargs))


@pytest.fixture
def auc(tmp_path: Path) -> Reference:
    return competition(tmp_path, "auc-roc")


def test_a_good_submission_in_any_order(auc):
    perfect = Grade(1.0, True, Reason.OK)
    assert grade(b"id,y\n001,0.1\n1,0.9\n NA,0.8\nNA,0.2\n", auc) == perfect
    assert grade(b"id,y\nNA,0.2\n NA,0.8\n1,0.9\n001,0.1\n", auc) == perfect
    assert grade(b"id,y\nNA,0.8\n NA,0.2\n1,0.9\n001,0.1\n", auc).score == 0.75


@pytest.mark.parametrize(
    "data",
    [
        b"\xef\xbb\xbfid,y\n001,0.1\n1,0.9\n NA,0.8\nNA,0.2\n",  # BOM
        b"id,y\r\n001,0.1\r\n1,0.9\r\n NA,0.8\r\nNA,0.2\r\n",
        b'"id","y"\n"001","0.1"\n"1","0.9"\n" NA","0.8"\n"NA","0.2"',
        b"id,y\n001,-1e-3\n1,+9.\n NA,.8\nNA,2E-1\n\n\n",
    ],
)
def test_forms_that_are_let_pass(auc, data):
    assert grade(data, auc) == Grade(1.0, True, Reason.OK)


GOOD = "id,y\n001,0.1\n1,0.9\n NA,0.8\nNA,{}\n"


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"", Reason.EMPTY),
        (b" \n\n", Reason.EMPTY),
        (b"id,y\n", Reason.WRONG_ROWS),
        (b"x" * (2 << 20), Reason.TOO_LARGE),
        (b"c," * 300_000, Reason.LONG_HEADER),
        (b"id,y\n" + b"1," * 300_000 + b"\n", Reason.RAGGED),
        (b"id,y\n" + b"1\n" * 300_000, Reason.RAGGED),
        (b"id,y\n" + b"1,0.5\n" * 100_000, Reason.WRONG_ROWS),
        (b"id,y\n001," + b"1" * 100_000 + b"\n", Reason.LONG_FIELD),
        (b'id,y\n001,"' + b"a\n" * 100_000, Reason.LONG_FIELD),
        (b'id,y\n001,"0.5', Reason.MALFORMED),
        (b'id,y\n001,"0.5"x\n', Reason.MALFORMED),
        (b"id,y\n001,0.1\0\n", Reason.NOT_TEXT),
        (GOOD.format(0.2).encode("utf-16"), Reason.NOT_TEXT),
        ("id,y\n001,0.1\n1,0.9\né,0.8\nNA,0.2\n".encode("latin-1"), Reason.NOT_TEXT),
        (b"id,y,y\n001,1,1\n", Reason.REPEATED_COLUMN),
        (b"id,id\n001,1\n", Reason.REPEATED_COLUMN),
        (b"y,id\n0.1,001\n", Reason.WRONG_COLUMNS),
        (b"id,Y\n001,1\n", Reason.WRONG_COLUMNS),
        (b",id,y\n0,001,1\n", Reason.WRONG_COLUMNS),  # an index that was left in
        (b"id\n001\n", Reason.WRONG_COLUMNS),
        (b"id,y\n001,0.1,\n1,0.9,\n NA,0.8,\nNA,0.2,\n", Reason.RAGGED),
        (b"id,y\n001,0.1\n1,0.9\n NA,0.8\n", Reason.WRONG_ROWS),
        (GOOD.format(0.2).encode() + b"5,0.5\n", Reason.WRONG_ROWS),
        (b"id,y\n001,0.1\n1,0.9\n NA,0.8\n NA,0.2\n", Reason.REPEATED_ID),
        (b"id,y\n01,0.1\n1,0.9\n NA,0.8\nNA,0.2\n", Reason.WRONG_IDS),
        (b"id,y\n001,0.1\n1.0,0.9\n NA,0.8\nNA,0.2\n", Reason.WRONG_IDS),
        (b"id,y\n001,0.1\n1,0.9\n NA,0.8\n,0.2\n", Reason.WRONG_IDS),
        *((GOOD.format(cell).encode(), Reason.NOT_FINITE)
          for cell in ("", "nan", "NaN", "inf", "-inf", "1e999", "NA", "None", " ")),
        *((GOOD.format(cell).encode(), Reason.NOT_A_NUMBER)
          for cell in ("1_0", " 1", "1 ", "True", "yes", "0x1", "1e", ".", "1.2.3", "--1", "１", "[0.5]", "=cmd()")),
    ],
)  # fmt: skip
def test_what_is_refused_and_why(auc, data, reason):
    assert grade(data, auc) == Grade(None, False, reason)


def test_reasons_hold_no_answer_and_no_text_of_the_submission(auc):
    assert all(not any(c in reason.value for c in "{}%") for reason in Reason)
    assert grade(b"id,y\nsecret,1\n", auc).detail == ""


def test_flags(auc, tmp_path):
    assert grade(b"id,y\n001,0.3\n1,0.3\n NA,0.3\nNA,0.3\n", auc) == Grade(0.5, True, Reason.OK, ("degenerate",))
    assert grade(SAMPLE.encode(), auc).flags == ("degenerate", "sample_copy")
    assert grade(b"id,y\nNA,.50\n NA,5e-1\n1,0.5\n001,0.5\n", auc).flags == ("degenerate", "sample_copy")
    assert grade(GOOD.format("0.2").encode(), auc).flags == ()


CLASSES = "id,a,b,c\n"
CASES = {  # metric -> (answers, sample, submission, score by hand)
    "auc-roc": (ANSWERS, SAMPLE, "id,y\n001,0.1\n1,0.4\n NA,0.8\nNA,0.5\n", 0.75),
    "accuracy": ("id,y\n1,a\n2,b\n3,b\n4,c\n", "id,y\n1,a\n2,a\n3,a\n4,a\n", "id,y\n1,a\n2,b\n3,d\n4,a\n", 0.5),
    "log-loss": (ANSWERS, SAMPLE, "id,y\n001,0.5\n1,0.25\n NA,1\nNA,0\n", (math.log(2) + math.log(4)) / 4),
    "rmse": ("id,y\n1,0\n2,1\n", "id,y\n1,0\n2,0\n", "id,y\n1,3\n2,5\n", math.sqrt(12.5)),
    "rmsle": ("id,y\n1,0\n2,1\n", "id,y\n1,0\n2,0\n", f"id,y\n1,{math.e - 1}\n2,1\n", math.sqrt(0.5)),
    "mae": ("id,y\n1,0\n2,1\n", "id,y\n1,0\n2,0\n", "id,y\n1,3\n2,5\n", 3.5),
    # a: precision 1, recall 1/2; b: precision 1/2, recall 1; c (predicted, never true) and d (never predicted): 0
    "f1-macro": ("id,y\n1,a\n2,a\n3,b\n4,d\n", "id,y\n1,a\n2,a\n3,a\n4,a\n", "id,y\n1,a\n2,b\n3,b\n4,c\n", 1 / 3),
    # truth 1 1 5 5, predictions 1 5 5 5: observed 16/4; expected by the margins (1/2, 1/2) x (1/4, 3/4): 16 / 2
    "quadratic-weighted-kappa": (
        "id,y\n1,1\n2,1\n3,5\n4,5\n", "id,y\n1,1\n2,1\n3,1\n4,1\n", "id,y\n1,1\n2,5\n3,5.0\n4,5\n", 0.5,
    ),
}  # fmt: skip


@pytest.mark.parametrize("metric", CASES)
def test_scores_by_hand(tmp_path, metric):
    answers, sample, submission, score = CASES[metric]
    reference = competition(tmp_path, metric, answers, sample)
    assert grade(submission.encode(), reference) == Grade(pytest.approx(score, abs=5.1e-6), True, Reason.OK)
    perfect = grade(answers.encode(), reference)
    assert perfect.score == (0.0 if METRICS[metric].lower_is_better else 1.0)
    assert str(perfect.score)[0] != "-"


def test_every_metric_has_a_case_and_a_direction():
    assert CASES.keys() == METRICS.keys()
    assert {name for name, metric in METRICS.items() if metric.lower_is_better} == {"log-loss", "rmse", "rmsle", "mae"}


def test_kappa_goes_by_distance_not_by_rank_of_the_labels_that_occur(tmp_path):
    sample = "id,y\n1,1\n2,1\n3,1\n4,1\n"
    reference = competition(tmp_path, "qwk", "id,y\n1,1\n2,2\n3,5\n4,5\n", sample)
    # observed (1 + 0 + 16 + 0) / 4; expected: margins (1, 2, 5, 5) x (2, 2, 1, 5) -> mean of squared differences 8.0
    pairs = [(t - p) ** 2 for t in (1, 2, 5, 5) for p in (2, 2, 1, 5)]
    got = grade(b"id,y\n1,2\n2,2\n3,1\n4,5\n", reference).score
    assert got == pytest.approx(1 - (17 / 4) / (sum(pairs) / 16), abs=5.1e-6)
    assert grade(b"id,y\n1,2\n2,2\n3,1\n4,900000000\n", reference).reason is Reason.OUT_OF_RANGE


@pytest.mark.parametrize("answers", ["id,y\n1,b\n2,a\n3,c\n", CLASSES + "1,0,1,0\n2,1,0,0\n3,0,0,1\n"])
def test_log_loss_over_columns(tmp_path, answers):
    sample = CLASSES + "1,1,0,0\n2,1,0,0\n3,1,0,0\n"
    reference = competition(tmp_path, "multi-class-log-loss", answers, sample)
    rows = "1,0.1,0.8,0.1\n2,0.2,0.1,0.1\n3,0,0,0.5\n"  # 0.8, 0.5 after rescaling, 1 after rescaling
    expected = round(-(math.log(0.8) + math.log(0.5)) / 3, 5)
    assert grade((CLASSES + rows).encode(), reference) == Grade(expected, True, Reason.OK)
    for cells, reason in (
        ("0,0,0", Reason.ZERO_ROW),
        ("1.1,0,0", Reason.NOT_PROBABILITY),
        ("-0.1,1,0", Reason.NOT_PROBABILITY),
    ):
        assert grade((CLASSES + rows.replace("0,0,0.5", cells)).encode(), reference).reason is reason
    worst = grade((CLASSES + "1,1,0,0\n2,0,1,0\n3,1,0,0\n").encode(), reference)
    assert worst.valid and 30 < worst.score < 40  # clipped: finite


def test_columns_of_numbers_are_averaged(tmp_path):
    reference = competition(tmp_path, "rmse", "id,a,b\n1,0,0\n2,0,0\n", "id,a,b\n1,0,0\n2,0,0\n")
    assert grade(b"id,a,b\n1,1,3\n2,1,3\n", reference).score == 2.0
    reference = competition(tmp_path, "auc", "id,a,b\n1,0,1\n2,1,0\n", "id,a,b\n1,0,0\n2,0,0\n")
    assert grade(b"id,a,b\n1,0,0\n2,1,1\n", reference).score == 0.5


def test_what_a_metric_takes(tmp_path):
    two = ("id,y\n1,0\n2,1\n", "id,y\n1,0\n2,0\n")
    assert grade(b"id,y\n1,-0.1\n2,1\n", competition(tmp_path, "rmsle", *two)).reason is Reason.NEGATIVE
    assert grade(b"id,y\n1,1.01\n2,1\n", competition(tmp_path, "log_loss", *two)).reason is Reason.NOT_PROBABILITY
    assert grade(b"id,y\n1,-5\n2,7\n", competition(tmp_path, "AUC", *two)).score == 1.0
    assert grade(b"id,y\n1,1e300\n2,1\n", competition(tmp_path, "rmse", *two)).reason is Reason.SCORE_NOT_FINITE


def test_labels_are_compared_sensibly(tmp_path):
    whole = competition(tmp_path, "accuracy", "id,y\n1,0\n2,1\n", "id,y\n1,0\n2,0\n")
    assert grade(b"id,y\n1,0.0\n2,1.\n", whole).score == 1.0
    assert grade(b"id,y\n1,00\n2,7\n", whole).score == 0.5  # a label that never occurs is wrong, not refused
    assert grade(b"id,y\n1,0.5\n2,1\n", whole).reason is Reason.NOT_WHOLE
    assert grade(b"id,y\n1,False\n2,True\n", whole).reason is Reason.NOT_WHOLE
    assert grade(b"id,y\n1,\n2,1\n", whole).reason is Reason.NOT_FINITE
    text = competition(tmp_path, "accuracy", "id,y\n1,True\n2,False\n", "id,y\n1,False\n2,False\n")
    assert grade(b"id,y\n1,True\n2,false\n", text).score == 0.5
    assert grade(b"id,y\n1,True\n2,\n", text).reason is Reason.NOT_FINITE


@pytest.mark.parametrize(
    ("metric", "answers", "sample"),
    [
        ("auc-roc", "id,y\n1,0\n2,0\n", "id,y\n1,0\n2,0\n"),  # one class
        ("auc-roc", "id,y\n1,0\n3,1\n", "id,y\n1,0\n2,0\n"),  # other ids
        ("auc-roc", "id,y\n1,0\n1,1\n", "id,y\n1,0\n1,0\n"),  # repeated ids
        ("auc-roc", "id,z\n1,0\n2,1\n", "id,y\n1,0\n2,0\n"),
        ("auc-roc", "key,y\n1,0\n2,1\n", "id,y\n1,0\n2,0\n"),
        ("rmse", "id,y\n1,a\n2,1\n", "id,y\n1,0\n2,0\n"),
        ("log-loss", "id,y\n1,0.5\n2,1\n", "id,y\n1,0\n2,0\n"),
        ("log-loss", "id,a,b\n1,1,1\n2,1,0\n", "id,a,b\n1,0,0\n2,0,0\n"),
        ("accuracy", "id,a,b\n1,1,1\n2,1,0\n", "id,a,b\n1,0,0\n2,0,0\n"),
        ("f2", "id,y\n1,0\n2,1\n", "id,y\n1,0\n2,0\n"),
    ],
)
def test_answers_that_do_not_fit_are_our_error(tmp_path, metric, answers, sample):
    with pytest.raises(ValueError):
        competition(tmp_path, metric, answers, sample)


def test_a_spec_names_one_way_to_score():
    for metric, function in (("", ""), ("auc", "a:b")):
        with pytest.raises(ValueError, match="exactly one"):
            GradeSpec("a", "s", metric, function)


def test_names_of_metrics():
    assert find("Log_Loss") is find("multi class log loss") is METRICS["log-loss"]
    with pytest.raises(ValueError, match=r"unknown metric 'f2'.*auc-roc"):
        find("f2")


FUNCTION = '''
import pandas as pd
class InvalidSubmissionError(Exception): pass
class Sub(InvalidSubmissionError): pass
def grade(submission, answers):
    if "y" not in submission: raise Sub("no y")
    assert list(answers.columns) == ["id", "y"] and answers["id"].dtype.kind == "i"
    return float((submission["y"].values * 1.0 - answers["y"].values).mean()) / 3
def nan(submission, answers): return float("nan")
def zero(submission, answers): return -0.0000001
def broken(submission, answers): raise KeyError("ours")
'''  # fmt: skip


def test_a_grade_function_of_mle_bench_form(tmp_path, monkeypatch):
    (tmp_path / "grading_for_test.py").write_text(FUNCTION)
    two = ("id,y\n1,0\n2,1\n", "id,y\n1,0\n2,0\n")
    path = tmp_path / "grading_for_test.py"
    monkeypatch.syspath_prepend(str(tmp_path))
    for name in (f"{path}:grade", f"file:{path}:grade", "grading_for_test:grade", "file:grading_for_test:grade"):
        reference = competition(tmp_path, "", *two, grade_fn=name)
        assert grade(b"id,y\n1,1\n2,1\n", reference) == Grade(0.16667, True, Reason.OK)
        assert grade(b"id,y\n2,0\n1,1\n", reference) == Grade(0.0, True, Reason.OK)  # 0.0 is a score
        assert grade(two[1].encode(), reference).flags == ("sample_copy",)
        assert grade(b"id,z\n1,1\n2,1\n", reference).reason is Reason.REFUSED
        assert grade(b"id,y\n1,1,\n2,1,\n", reference).reason is Reason.RAGGED  # pandas would shift the ids away
        assert grade(b"id,y\n1,a\n2,b\n", reference).reason is Reason.BROKE_GRADER  # it takes the sample, not this
    assert (
        grade(b"id,y\n1,1\n", competition(tmp_path, "", *two, grade_fn=f"{path}:nan")).reason is Reason.SCORE_NOT_FINITE
    )
    zero = grade(b"id,y\n1,1\n", competition(tmp_path, "", *two, grade_fn=f"{path}:zero")).score
    assert str(zero) == "0.0"
    with pytest.raises(KeyError, match="ours"):  # it fails on the sample as well
        grade(b"id,y\n1,1\n", competition(tmp_path, "", *two, grade_fn=f"{path}:broken"))
    with pytest.raises(ModuleNotFoundError):
        import_function("no.such.module:grade")


@settings(max_examples=200, deadline=None)
@given(st.binary(max_size=200) | st.text(alphabet="id,y\n\r\"'01. -eNA\0é", max_size=80).map(str.encode))
def test_no_bytes_break_it(tmp_path_factory, data):
    reference = competition(tmp_path_factory.getbasetemp(), "auc-roc")
    for candidate in (data, b"id,y\n" + data, b"id,y\n001,1\n1,0\n NA,0\nNA," + data):
        result = grade(candidate, reference)
        assert result.valid == (result.score is not None) == (result.reason is Reason.OK)
        assert result.score is None or np.isfinite(result.score)
