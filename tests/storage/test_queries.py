"""The read side, on both databases: filters, thinning that keeps first, last and peak, differences, log tails."""

import math
import time

import numpy as np
import pytest
from sqlalchemy import insert

from comet_core.config import RunConfig
from comet_core.metrics import LayerMetrics
from storage import database, queries, runs
from storage.recorder import DatabaseRecorder
from storage.tables import Run, RunSummary, StepRow

pytestmark = pytest.mark.usefixtures("any_database")


def add_steps(run_id: int, losses, **more) -> None:
    counts = ("saved_bytes", "held_bytes", "conv_input_saved_bytes", "conv_input_held_bytes", "batch_bytes")
    rows = [
        {"run_id": run_id, "step": number, "train_loss": float(loss), **dict.fromkeys(counts, 1)}
        | {name: values[number - 1] for name, values in more.items()}
        for number, loss in enumerate(losses, start=1)
    ]
    with database.transaction() as writing:
        writing.execute(insert(StepRow), rows)


@pytest.fixture
def three_runs():
    return [
        runs.create_run(RunConfig(name="100% odd_name")),
        runs.create_run(RunConfig(model="vgg16_bn", policy="baseline")),
        runs.create_run(RunConfig(dataset="cifar10", seed=5)),
    ]


def test_runs_come_newest_first_in_pages(three_runs):
    one, two, three = three_runs
    assert queries.runs_frame()["id"].tolist() == [three, two, one]
    assert queries.runs_frame(limit=2)["id"].tolist() == [three, two]
    assert queries.runs_frame(limit=2, offset=2)["id"].tolist() == [one]
    assert queries.count_runs() == 3


@pytest.mark.parametrize(
    ("filters", "expected"),
    [
        ({"dataset": "cifar10"}, [2]),
        ({"model": "vgg16_bn"}, [1]),
        ({"policy": "compress"}, [2, 0]),
        ({"policy": "compress", "dataset": "digits"}, [0]),
        ({"status": ("queued", "lost")}, [2, 1, 0]),
        ({"status": ("lost",)}, []),
        ({"search": "VGG16"}, [1]),
        ({"search": "0%"}, [0]),
        ({"search": "%"}, [0]),
        ({"search": "odd_n"}, [0]),
        ({"search": "oddxn"}, []),
        ({"search": "#2"}, [1]),
        ({"search": "'; DROP TABLE runs; --"}, []),
        ({"run_ids": []}, []),
    ],
)
def test_filters_let_pass_what_they_say(three_runs, filters, expected):
    found = queries.runs_frame(**filters)
    assert found["id"].tolist() == [three_runs[i] for i in expected]
    assert queries.count_runs(**filters) == len(expected)
    assert list(found.columns) == list(queries.runs_frame().columns), "an empty list has its columns"


def test_dtypes_do_not_depend_on_what_is_there(three_runs):
    full, empty = queries.runs_frame(), queries.runs_frame(run_ids=[])
    assert full.dtypes.to_dict() == empty.dtypes.to_dict()
    steps = queries.step_frame(three_runs[0])
    kinds = (full.dtypes["twin_id"], full.dtypes["last_test_accuracy"], steps.dtypes["train_loss"])
    assert [str(kind) for kind in kinds] == ["Int64", "float64", "float64"]


def test_thinning_keeps_first_last_and_every_peak(three_runs):
    run_id = three_runs[0]
    generator = np.random.default_rng(0)
    losses, seconds = generator.normal(size=30_000), generator.random(30_000)
    losses[12_345], losses[23_456], seconds[7_777] = 100.0, -100.0, 5.0
    add_steps(run_id, losses, step_seconds=seconds.tolist())
    frame = queries.step_frame(run_id, ["train_loss", "step_seconds"], max_points=200)
    assert frame.attrs["total"] == 30_000 and len(frame) <= 2 * 200
    assert frame["step"].tolist() == sorted(set(frame["step"])) and frame["step"].iloc[[0, -1]].tolist() == [1, 30_000]
    assert {12_346, 23_457, 7_778} <= set(frame["step"])
    assert (losses[frame["step"].to_numpy() - 1] == frame["train_loss"]).all(), "kept points are true points"
    assert frame["step"].diff().max() < 2 * 30_000 / 99, "no hole"
    whole = queries.step_frame(run_id, ["train_loss"], max_points=30_000)
    assert len(whole) == 30_000
    assert len(queries.step_frame(run_id, ["train_loss"], max_points=100)) <= 100


def test_thinning_keeps_where_a_curve_breaks_off(started_run):
    run_id = started_run()
    add_steps(run_id, [1.0] * 5_000)
    with database.transaction() as writing:
        rows = writing.query(StepRow).where(StepRow.step >= 4_000)
        rows.update({"train_loss": None, "nonfinite": "train_loss=nan"})
    frame = queries.step_frame(run_id, ["train_loss"], max_points=100)
    assert 4_000 in frame["step"].tolist() and math.isnan(frame["train_loss"].iloc[-1])


def test_only_newer_steps_are_read_when_asked(three_runs):
    add_steps(three_runs[0], range(10))
    frame = queries.step_frame(three_runs[0], ["train_loss"], after_step=8)
    assert frame["step"].tolist() == [9, 10] and frame.attrs["total"] == 2
    assert queries.step_frame(three_runs[0], ["train_loss"], after_step=10).empty


def test_an_unknown_column_is_refused(three_runs):
    with pytest.raises(ValueError, match="columns holds loss; allowed: step, epoch, train_loss"):
        queries.step_frame(three_runs[0], ["loss"])


def test_the_last_row_of_every_layer_in_natural_order(started_run):
    run_id = started_run()
    taking = DatabaseRecorder(run_id)
    for step, names in ((100, ["features.10", "features.2", "fc"]), (200, ["features.10", "features.2"])):
        taking.record_layers([LayerMetrics(step=step, name=name, operator="conv2d") for name in names])
    taking.close()
    frame = queries.layers_last(run_id)
    assert frame["name"].tolist() == ["fc", "features.2", "features.10"] and frame["step"].tolist() == [100, 200, 200]
    assert queries.layer_frame(run_id, 100)["name"].tolist() == ["fc", "features.2", "features.10"]
    assert queries.layer_frame(run_id)["step"].tolist() == [100, 100, 100, 200, 200]


def test_only_options_that_differ_are_shown(three_runs):
    frame = queries.config_differences([three_runs[2], three_runs[0]])
    assert frame.columns.tolist() == [three_runs[2], three_runs[0]] and frame.index.name == "option"
    assert list(frame.loc["seed"]) == [5, 0] and set(frame.index) == {"name", "dataset", "seed"}
    assert queries.config_differences([three_runs[0]]).empty and queries.config_differences([]).empty


def test_summaries_come_in_the_order_asked_for(three_runs):
    one, two, three = three_runs
    assert queries.summary_frame([two, three, 404, one])["id"].tolist() == [two, three, one]
    assert queries.summary_frame([]).empty


def test_trade_offs_are_of_finished_runs(started_run):
    finished, failed = started_run(), started_run()
    runs.finish(finished)
    runs.fail(failed, "why")
    assert queries.trade_off_frame()["id"].tolist() == [finished]
    assert queries.trade_off_frame([failed]).empty


def test_the_log_tail_is_the_last_lines(three_runs):
    run_id = three_runs[0]
    assert queries.log_tail(run_id) == ""
    runs.log_path(run_id).parent.mkdir(parents=True)
    runs.log_path(run_id).write_bytes(b"x" * 1_000_000 + b"\nfirst\r10%\r100%\r\nlast \xff\n")
    assert queries.log_tail(run_id, lines=2) == "100%\nlast \N{REPLACEMENT CHARACTER}"


def test_counts_and_filter_values_are_of_what_is_there(three_runs):
    assert queries.live_counts() == {"queued": 3, "starting": 0, "running": 0, "stopping": 0}
    values = queries.filter_values()
    assert values["dataset"] == ["cifar10", "digits"] and values["status"] == ["queued"]
    assert queries.run(404) is None and queries.scheduler_promise() is None


def test_ten_thousand_runs_list_in_under_a_second(three_runs):
    with database.transaction() as writing:
        run = writing.get_one(Run, three_runs[0])
        names = [column.name for column in Run.__table__.columns if column.name not in ("id", "name")]
        copies = [
            {**{name: getattr(run, name) for name in names}, "id": 10 + number, "name": f"run {number} resnet20"}
            for number in range(10_000)
        ]
        writing.execute(insert(Run), copies)
        writing.execute(insert(RunSummary), [{"run_id": copy["id"]} for copy in copies])
    queries.runs_frame(limit=1)
    before = time.perf_counter()
    page = queries.runs_frame(search="resnet20", limit=50)
    total = queries.count_runs(search="resnet20")
    assert time.perf_counter() - before < 1.0
    assert (len(page), total) == (50, 10_001)


def test_the_largest_peak_is_found_with_its_run_and_runs_without_parts_are_left_out(three_runs):
    one, two, three = three_runs
    add_steps(one, [3, 2, 1], peak_rss_bytes=[5, 8, 8], other_bytes=[1, 2, 3])
    add_steps(two, [3, 2], peak_rss_bytes=[9, 5], peak_allocated_bytes=[3, 4], other_bytes=[1, 1])
    add_steps(three, [1], peak_rss_bytes=[99])
    frame = queries.peak_frame([two, three, one])
    assert frame[["id", "step", "other_bytes"]].to_numpy().tolist() == [[two, 2, 1], [one, 2, 2]]
    assert frame["name"].tolist() == [queries.run(two)["name"], "100% odd_name"]
    assert queries.peak_frame([three]).empty and queries.peak_frame([]).empty
