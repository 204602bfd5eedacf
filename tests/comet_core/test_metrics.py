"""Metrics as JSON and as axis titles."""

import json

from comet_core import metrics
from comet_core.metrics import EvalMetrics, LayerMetrics, ListRecorder, StepMetrics


def test_numbers_that_are_not_finite_survive_json_as_texts_and_zero_stays_zero():
    recorder = ListRecorder()
    recorder.record_step(StepMetrics(step=1, train_loss=float("nan"), train_accuracy=0.0))
    recorder.record_eval(EvalMetrics(step=1, test_loss=float("-inf")))
    recorder.record_layers([LayerMetrics(step=1, name="conv", operator="conv2d", error_bound=0.0)])
    back = json.loads(metrics.dumps(recorder.to_dict()))
    assert back["steps"][0]["train_loss"] == "nan"
    assert back["steps"][0]["train_accuracy"] == 0.0
    assert back["steps"][0]["learning_rate"] is None
    assert back["evals"][0]["test_loss"] == "-inf"
    assert back["layers"][0]["error_bound"] == 0.0


def test_an_axis_carries_label_and_unit():
    assert metrics.axis_label(StepMetrics, "step_seconds") == "Step time (s)"
    assert metrics.axis_label(StepMetrics, "train_loss") == "Training loss"


def test_the_measured_peak_is_the_gpus_where_there_is_one():
    assert StepMetrics(step=1, peak_rss_bytes=5).peak_bytes == 5
    assert StepMetrics(step=1, peak_rss_bytes=5, peak_allocated_bytes=3).peak_bytes == 3
