"""Metrics as TensorBoard's own reader and a JSON reader find them, through a resume too; and the phase clock."""

from __future__ import annotations

import json
import logging
import math
import threading
import time
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from jaxrl_code.metrics import Mean, Metrics, fenced, sample_markdown


def lines(folder: Path) -> list[dict]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def events(folder: Path) -> EventAccumulator:
    return EventAccumulator(str(folder), size_guidance={"scalars": 0, "histograms": 0, "tensors": 0}).Reload()


def text_steps(reader: EventAccumulator, name: str) -> list[int]:
    return [event.step for event in reader.Tensors(f"{name}/text_summary")]


def test_scalars_histograms_and_text_are_read_back(tmp_path):
    metrics = Metrics(tmp_path)
    for step in range(3):
        metrics.log(step, {"actor/loss": jnp.float32(0.1) * step, "env/runs": step})
        metrics.histogram(step, "env/reward", np.arange(10.0) + step)
        metrics.text(step, "rollout/sample", f"program {step}")
    metrics.close()
    assert [line["step"] for line in lines(tmp_path)] == [0, 1, 2]
    assert lines(tmp_path)[2]["actor/loss"] == float(jnp.float32(0.1) * 2)  # every bit of it
    reader = events(tmp_path)
    assert [e.value for e in reader.Scalars("actor/loss")] == pytest.approx([0, 0.1, 0.2])
    assert [e.step for e in reader.Scalars("env/runs")] == [0, 1, 2]
    histogram = reader.Histograms("env/reward")[1].histogram_value
    assert (histogram.min, histogram.max, histogram.num) == (1, 10, 10)
    assert reader.Tensors("rollout/sample/text_summary")[2].tensor_proto.string_val == [b"program 2"]


class Array:
    """A scalar on a device: reading it before it is ready would block."""

    def __init__(self) -> None:
        self.ready, self.started = False, False

    def copy_to_host_async(self) -> None:
        self.started = True

    def __array__(self, dtype=None, copy=None) -> np.ndarray:
        assert self.ready, "logging waited for the device"
        return np.array(2.5, dtype)


def test_the_fetch_lags_a_step(tmp_path):
    metrics = Metrics(tmp_path)
    first, second = Array(), Array()
    assert metrics.log(1, {"actor/loss": first}) == []
    assert first.started and lines(tmp_path) == []
    first.ready = True
    assert metrics.log(2, {"actor/loss": second}) == [(1, {"actor/loss": 2.5})]
    assert [line["step"] for line in lines(tmp_path)] == [1]
    second.ready = True
    assert metrics.flush() == [(2, {"actor/loss": 2.5})]
    assert [line["step"] for line in lines(tmp_path)] == [1, 2]
    assert [e.step for e in events(tmp_path).Scalars("actor/loss")] == [1, 2]  # on disk before close
    metrics.close()


def test_resume_drops_what_was_written_after_the_checkpoint(tmp_path):
    metrics = Metrics(tmp_path)
    for step in range(5):
        metrics.log(step, {"actor/loss": step})
        metrics.histogram(step, "env/reward", [step])
        metrics.text(step, "rollout/sample", f"first {step}")
    metrics.close()
    # As kill -9 leaves them: the last record and the last line half-written.
    file = next(tmp_path.glob("events.out.tfevents.*"))
    file.write_bytes(file.read_bytes()[:-7])
    with (tmp_path / "metrics.jsonl").open("a") as out:
        out.write('{"step": 5, "actor/lo')
    resumed = Metrics(tmp_path, resume_step=2)
    for step in (3, 4):
        resumed.log(step, {"actor/loss": 10 * step})
        resumed.histogram(step, "env/reward", [10 * step])
        resumed.text(step, "rollout/sample", f"second {step}")
    resumed.close()
    expected = [(0, 0), (1, 1), (2, 2), (3, 30), (4, 40)]
    assert [(line["step"], line["actor/loss"]) for line in lines(tmp_path)] == expected
    reader = events(tmp_path)
    assert [(e.step, e.value) for e in reader.Scalars("actor/loss")] == expected
    assert [e.step for e in reader.Histograms("env/reward")] == [0, 1, 2, 3, 4]
    assert text_steps(reader, "rollout/sample") == [0, 1, 2, 3, 4]
    # The files themselves hold nothing twice: readers that know no purging see the same.
    assert sum(b"first 3" in path.read_bytes() for path in tmp_path.glob("events.out.*")) == 0


def test_a_fresh_run_in_an_old_folder_starts_clean(tmp_path):
    for value in (1.0, 2.0):
        metrics = Metrics(tmp_path)
        metrics.log(0, {"actor/loss": value})
        metrics.close()
    assert [line["actor/loss"] for line in lines(tmp_path)] == [2.0]
    assert [e.value for e in events(tmp_path).Scalars("actor/loss")] == [2.0]


def test_means_weigh_by_count(tmp_path):
    metrics = Metrics(tmp_path)
    metrics.log(0, {"env/score": Mean(jnp.float32(10.0), jnp.int32(10)), "env/none": Mean(0.0, 0)})
    metrics.log(0, {"env/score": Mean(0.0, 30)})
    ((_, row),) = metrics.close()
    assert row == {"env/score": 0.25}  # a mean of means would say 0.5; a mean over nothing is left out


def test_numbers_that_are_not_finite_are_null_and_flagged(tmp_path, caplog):
    metrics = Metrics(tmp_path)
    with caplog.at_level(logging.WARNING):
        metrics.log(7, {"actor/loss": jnp.nan, "critic/loss": math.inf, "actor/kl": 1.0})
        metrics.histogram(7, "env/reward", [1.0, math.nan])
        metrics.close()
    (line,) = lines(tmp_path)
    assert (line["actor/loss"], line["critic/loss"], line["actor/kl"]) == (None, None, 1.0)
    assert line["nonfinite"] == ["actor/loss", "critic/loss", "env/reward"]
    assert "step 7" in caplog.text
    assert events(tmp_path).Histograms("env/reward")[0].histogram_value.num == 1


@pytest.mark.parametrize("name", ["loss", "loss/actor", "actor/Loss", "actor/", "actor//x", "actor/a b"])
def test_names_keep_to_the_groups(tmp_path, name):
    metrics = Metrics(tmp_path)
    with pytest.raises(ValueError, match="group"):
        metrics.log(0, {name: 1})
    with pytest.raises(ValueError, match="group"):
        metrics.text(0, name, "")
    with pytest.raises(ValueError, match="group"):
        metrics.histogram(0, name, [1])
    metrics.log(0, {"eval/score/iris-species": 1.0})
    metrics.close()


def test_a_step_is_logged_once_and_in_order(tmp_path):
    metrics = Metrics(tmp_path)
    metrics.log(3, {"actor/loss": 1.0})
    with pytest.raises(ValueError, match="twice"):
        metrics.log(3, {"actor/loss": 1.0})
    with pytest.raises(ValueError, match="go up"):
        metrics.log(2, {"actor/kl": 1.0})
    metrics.flush()
    with pytest.raises(ValueError, match="go up"):
        metrics.log(3, {"actor/kl": 1.0})
    metrics.close()


def test_logging_leaves_no_thread_behind(tmp_path):
    before = threading.active_count()
    metrics = Metrics(tmp_path)
    metrics.log(0, {"actor/loss": 1.0})
    assert threading.active_count() == before
    metrics.close()


def test_the_clock_counts_overlap_once(tmp_path):
    metrics = Metrics(tmp_path)
    with metrics.phase("sample"), metrics.phase("sandbox"), metrics.phase("sandbox"):
        time.sleep(0.05)
    with metrics.phase("checkpoint"):
        time.sleep(0.05)
    times = metrics.times()
    assert times["time/sample_s"] == pytest.approx(0.05, abs=0.03)
    assert times["time/sandbox_s"] == pytest.approx(0.05, abs=0.03)
    assert times["time/step_s"] == pytest.approx(0.1, abs=0.05)
    assert 0.3 < times["time/other_share"] < 0.7  # the checkpoint's half
    metrics.close()


def test_a_phase_that_spans_steps_is_split_between_them(tmp_path):
    metrics = Metrics(tmp_path)
    with metrics.phase("sample"):
        time.sleep(0.03)
        first = metrics.times()
        time.sleep(0.03)
    second = metrics.times()
    assert first["time/sample_s"] >= 0.03 and second["time/sample_s"] >= 0.03
    assert first["time/other_share"] < 0.5 and second["time/other_share"] < 0.5
    with pytest.raises(ValueError):
        metrics.phase("Sample")
    metrics.close()


@pytest.mark.filterwarnings("ignore:html5lib's sanitizer:DeprecationWarning")
def test_a_sampled_program_cannot_escape_its_block():
    from tensorboard.plugin_util import markdown_to_safe_html  # warns at its first import

    program = "print('```')\n```\n<script>alert(1)</script>\n# not a heading\n````"
    html = markdown_to_safe_html(sample_markdown({"task": "<b>x</b>"}, program, "out ``` <img src=x>"))
    assert "<script" not in html and "<img" not in html and "<b>" not in html and "<h1" not in html
    assert html.count("<pre>") == 3
    assert "# not a heading" in html


def test_long_text_loses_its_middle():
    block = fenced("a" * 50 + "b" * 50, limit=20)
    assert "aaaaaaaaaa\n... 80 characters cut ...\nbbbbbbbbbb" in block
