"""The metric tables and the dataclasses of the engine are one list of names."""

import math
import subprocess
import sys
from dataclasses import fields

import pytest

from comet_core.launcher import PROJECT
from comet_core.metrics import AuditMetrics, ControllerEvent, EvalMetrics, LayerMetrics, StepMetrics
from storage.tables import AuditRow, EvalRow, EventRow, LayerRow, StepRow, join_nonfinite, split_nonfinite

TABLES = [
    (StepMetrics, StepRow),
    (LayerMetrics, LayerRow),
    (AuditMetrics, AuditRow),
    (ControllerEvent, EventRow),
    (EvalMetrics, EvalRow),
]
OWN = ("run_id", "place", "nonfinite")  # of the tables alone


@pytest.mark.parametrize(("metric", "table"), TABLES)
def test_every_metric_has_a_column_of_its_name_and_kind(metric, table):
    columns = {column.name: column for column in table.__table__.columns if column.name not in OWN}
    assert list(columns) == [entry.name for entry in fields(metric)]
    for entry in fields(metric):
        column = columns[entry.name]
        assert column.nullable == ("None" in str(entry.type)), f"{entry.name} may be None in one of the two only"
        kind = column.type.python_type.__name__
        assert kind in str(entry.type) or (kind, entry.type) == ("str", str), entry.name


def test_what_is_not_finite_is_named_and_comes_back():
    row = {"train_loss": math.nan, "measured_sigma": -math.inf, "learning_rate": 0.0, "epoch": None, "name": "nan"}
    stored = split_nonfinite(row)
    gone = {"train_loss": None, "measured_sigma": None}
    assert stored == {**row, **gone, "nonfinite": "train_loss=nan measured_sigma=-inf"}
    back = join_nonfinite(stored["nonfinite"])
    assert math.isnan(back["train_loss"]) and back["measured_sigma"] == -math.inf
    assert split_nonfinite({"train_loss": 1.0})["nonfinite"] is None and join_nonfinite(None) == {}


def test_pages_read_and_write_without_torch():
    code = "import sys, storage.queries, storage.runs; sys.exit('torch' in sys.modules or 'streamlit' in sys.modules)"
    assert subprocess.run([sys.executable, "-W", "error", "-c", code], cwd=PROJECT).returncode == 0
