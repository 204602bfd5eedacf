"""The recorder: everything arrives, nothing is raised, and what the database refuses waits in a file."""

import math
import sqlite3
import threading
import time
from contextlib import contextmanager
from dataclasses import asdict

import pytest
from sqlalchemy import event, text

from comet_core.config import RunConfig
from comet_core.metrics import AuditMetrics, ControllerEvent, EvalMetrics, LayerMetrics, StepMetrics
from storage import database, queries, recorder, runs
from storage.recorder import DatabaseRecorder, replay_spool, spool_path, spooled_runs

SUMMARY = [
    "last_step", "last_epoch", "last_train_loss", "last_test_accuracy", "best_test_accuracy", "best_step",
    "compression_ratio", "conv_input_ratio", "max_saved_bytes", "max_held_bytes", "peak_rss_bytes",
    "peak_rss_above_start_bytes", "peak_allocated_bytes", "step_seconds", "wall_seconds",
]  # fmt: skip


def step(number: int, **values) -> StepMetrics:
    counts = {"saved_bytes": 1000, "held_bytes": 100, "conv_input_saved_bytes": 600, "conv_input_held_bytes": 30}
    return StepMetrics(**{"step": number, "epoch": 1, "train_loss": 1 / number, **counts, **values})


def record(run_id: int, *steps: StepMetrics) -> None:
    taking = DatabaseRecorder(run_id)
    for metrics in steps:
        taking.record_step(metrics)
    taking.close()


@contextmanager
def locked_database(comet_home):
    """Another program holds SQLite's write lock; writers wait a tenth of a second instead of ten."""
    writers = database.engine()
    event.listen(writers, "connect", lambda connection, _: connection.execute("PRAGMA busy_timeout=100").close())
    writers.dispose()
    other = sqlite3.connect(comet_home / "comet.db", isolation_level=None, check_same_thread=False)
    other.execute("BEGIN IMMEDIATE")
    try:
        yield other
    finally:
        if other.in_transaction:
            other.execute("ROLLBACK")
        other.close()


def test_everything_recorded_is_there_after_close(any_database, started_run):
    run_id = started_run()
    taking = DatabaseRecorder(run_id)
    for number in range(1, 251):
        taking.record_step(step(number, learning_rate=0.1))
    layers = [LayerMetrics(step=100, name=f"conv{i}", operator="conv2d", error_bound=1e-3) for i in range(12)]
    taking.record_layers(layers)
    evaluation = EvalMetrics(step=250, epoch=1, test_loss=0.5, test_accuracy=0.75, wall_seconds=9.0)
    taking.record_eval(evaluation)
    taking.close()
    taking.close()
    steps = queries.step_frame(run_id)
    assert steps["step"].tolist() == list(range(1, 251)) and steps.attrs["total"] == 250
    assert steps["train_loss"].tolist() == [1 / number for number in range(1, 251)]
    assert queries.layer_frame(run_id)["name"].tolist() == [f"conv{i}" for i in range(12)]
    assert queries.eval_frame(run_id).iloc[0]["test_accuracy"] == 0.75


def history() -> tuple[list[AuditMetrics], list[ControllerEvent]]:
    """Audits of two steps, one figure not finite; events of which two say the same of the same layer and step."""
    audits = [
        AuditMetrics(step=number, name=name, operator="conv2d", gradient="weight", num_elements=9, slope=slope,
                     error_histogram="1,2")
        for number in (10, 20) for name, slope in (("conv2", -0.1), ("conv10", math.inf))
    ]  # fmt: skip
    twice = ControllerEvent(step=10, kind="clamped", layer="conv2", message="at the smallest bound")
    return audits, [twice, twice, ControllerEvent(step=20, kind="loss spike", message="exact for 20 steps")]


def record_history(run_id: int) -> None:
    audits, events = history()
    taking = DatabaseRecorder(run_id)
    taking.record_audits(audits)
    taking.record_events(events[:1])
    taking.record_events(events[1:])
    taking.close()


def test_audits_and_events_arrive_once_however_often_they_are_entered(any_database, started_run):
    run_id = started_run()
    audits, events = history()
    for _ in range(2):
        record_history(run_id)
    found = queries.audit_frame(run_id)
    assert found.drop(columns="nonfinite").dropna(axis=1).to_dict("records") == [
        {name: value for name, value in asdict(audit).items() if value is not None} for audit in audits
    ]
    assert found.attrs["total"] == 4
    found = queries.event_frame(run_id)
    told = found.drop(columns="nonfinite").to_dict("records")
    assert told == [asdict(entry) for entry in events] and found.attrs["total"] == 3
    assert queries.event_frame(run_id, max_events=1)["kind"].tolist() == ["loss spike"]
    assert queries.audit_frame(run_id, max_steps=1)["step"].tolist() == [10, 10]


def test_audits_and_events_that_waited_in_the_spool_have_no_doubles(comet_home, started_run, monkeypatch):
    monkeypatch.setattr(recorder, "CLOSE_SECONDS", 0.0)
    run_id = started_run()
    with locked_database(comet_home):
        record_history(run_id)
    waiting = spool_path(run_id).read_text()
    for _ in range(2):  # a crash between entering and removing the file
        spool_path(run_id).write_text(waiting)
        replay_spool(run_id)
    assert len(queries.audit_frame(run_id)) == 4 and len(queries.event_frame(run_id)) == 3


def test_layers_keep_the_models_order(any_database, started_run):
    run_id = started_run()
    taking = DatabaseRecorder(run_id)
    for number in range(1, 12):
        names = ["stem", "body", *(["auxiliary"] if number > 5 else []), "classifier"]
        taking.record_layers([LayerMetrics(step=number, name=name, operator="conv2d") for name in names])
    taking.close()
    assert queries.layer_names(run_id) == ["stem", "body", "classifier", "auxiliary"]
    assert sorted(set(queries.layer_frame(run_id, max_steps=3)["step"])) == [1, 6, 11]


def test_rows_are_visible_within_a_second_of_being_recorded(started_run):
    run_id = started_run()
    taking = DatabaseRecorder(run_id)
    taking.record_step(step(1))
    deadline = time.monotonic() + 1.0
    while queries.step_frame(run_id).empty:
        assert time.monotonic() < deadline
        time.sleep(0.02)
    taking.close()


def test_many_rows_take_few_transactions(started_run):
    run_id = started_run()
    begun = []
    event.listen(database.engine(), "commit", lambda connection: begun.append(connection))
    record(run_id, *(step(number) for number in range(1, 1001)))
    assert len(begun) <= 15


def test_the_summary_says_what_the_rows_say(any_database, started_run):
    run_id = started_run()
    steps = [
        step(n, epoch=1 + n // 16, train_loss=float(n), saved_bytes=1000 + n, held_bytes=100 - n, step_seconds=n / 10,
             peak_rss_bytes=5000 - n, peak_allocated_bytes=n, wall_seconds=float(n))
        for n in range(1, 31)
    ]  # fmt: skip
    taking = DatabaseRecorder(run_id)
    for metrics in steps:
        taking.record_step(metrics)
    for number, accuracy in ((10, 0.5), (20, 0.75), (25, 0.75), (30, 0.625)):
        taking.record_eval(EvalMetrics(step=number, test_accuracy=accuracy, wall_seconds=number + 0.5))
    taking.close()
    found = queries.run(run_id)
    last_epoch = [metrics for metrics in steps if metrics.epoch == 2]
    assert found is not None
    assert {name: found[name] for name in SUMMARY} == pytest.approx(
        {
            "last_step": 30,
            "last_epoch": 2,
            "last_train_loss": 30.0,
            "last_test_accuracy": 0.625,
            "best_test_accuracy": 0.75,
            "best_step": 20,
            "compression_ratio": sum(m.saved_bytes for m in last_epoch) / sum(m.held_bytes for m in last_epoch),
            "conv_input_ratio": 20.0,
            "max_saved_bytes": 1030,
            "max_held_bytes": 99,
            "peak_rss_bytes": 4999,
            "peak_rss_above_start_bytes": 3999,
            "peak_allocated_bytes": 30,
            "step_seconds": sum(n / 10 for n in range(11, 31)) / 20,
            "wall_seconds": 30.5,
        }
    )


def test_what_was_not_measured_stays_unknown(any_database, started_run):
    run_id = started_run()
    record(run_id, StepMetrics(step=1))
    found = queries.run(run_id)
    assert found is not None
    known = {name: found[name] for name in SUMMARY if found[name] is not None}
    assert known == {"last_step": 1, "max_saved_bytes": 0, "max_held_bytes": 0}
    assert queries.step_frame(run_id)[["train_loss", "epoch"]].isna().all(axis=None)


def test_numbers_that_are_not_finite_come_back_as_they_were(any_database, started_run):
    run_id = started_run()
    taking = DatabaseRecorder(run_id)
    for number, loss in enumerate((1.0, math.inf, -math.inf, math.nan), start=1):
        taking.record_step(step(number, train_loss=loss))
    taking.record_layers([LayerMetrics(step=1, name="conv", operator="conv2d", predicted_sigma=math.inf)])
    taking.record_eval(EvalMetrics(step=4, test_loss=math.nan, test_accuracy=0.1))
    taking.close()
    frame = queries.step_frame(run_id, ["train_loss"])
    assert str(frame["train_loss"].tolist()) == "[1.0, inf, -inf, nan]"
    assert frame["nonfinite"].tolist() == [None, "train_loss=inf", "train_loss=-inf", "train_loss=nan"]
    assert queries.layers_last(run_id)["predicted_sigma"].tolist() == [math.inf]
    found = queries.run(run_id)
    assert found is not None and math.isnan(found["last_train_loss"])
    assert math.isnan(queries.eval_frame(run_id)["test_loss"].iloc[0])
    record(run_id, step(5, train_loss=2.0))
    assert queries.runs_frame()["last_train_loss"].tolist() == [2.0]


def test_a_locked_database_makes_points_late_and_loses_none(comet_home, started_run, capfd):
    run_id = started_run()
    taking = DatabaseRecorder(run_id)
    with locked_database(comet_home):
        for number in range(1, 251):
            taking.record_step(step(number, train_loss=math.nan if number == 7 else 1.0))
        deadline = time.monotonic() + 10
        while not spool_path(run_id).exists():
            assert time.monotonic() < deadline
            time.sleep(0.02)
    taking.record_step(step(251))
    taking.close()
    frame = queries.step_frame(run_id)
    assert frame["step"].tolist() == list(range(1, 252)) and math.isnan(frame["train_loss"][6])
    assert not spool_path(run_id).exists()
    said = capfd.readouterr().err
    assert "database is locked" in said and "points late, kept in" in said and "none is late now" in said


def test_what_is_late_at_the_end_waits_in_a_file_for_others(comet_home, started_run, capfd, monkeypatch):
    monkeypatch.setattr(recorder, "CLOSE_SECONDS", 0.5)
    run_id = started_run()
    with locked_database(comet_home):
        record(run_id, step(1), step(2))
    assert queries.step_frame(run_id).empty and "2 points are late; they wait in" in capfd.readouterr().err
    with open(spool_path(run_id), "a") as file:
        file.write('["step_metrics", {"step": 3')  # the disk was full
    assert spooled_runs() == [run_id]
    replay_spool(run_id)
    assert queries.step_frame(run_id)["step"].tolist() == [1, 2] and spooled_runs() == []
    found = queries.run(run_id)
    assert found is not None and found["last_step"] == 2


def test_rows_entered_twice_count_once(any_database, started_run):
    run_id = started_run()
    record(run_id, *(step(n, step_seconds=1.0) for n in range(1, 21)))
    before = queries.run(run_id)
    record(run_id, *(step(n, step_seconds=2.0) for n in range(1, 21)))
    assert queries.run(run_id) == before and queries.step_frame(run_id)["step_seconds"].tolist() == [1.0] * 20


def test_the_spool_of_a_deleted_run_goes_too(comet_home, started_run, monkeypatch):
    monkeypatch.setattr(recorder, "CLOSE_SECONDS", 0.0)
    run_id = started_run()
    with locked_database(comet_home):
        record(run_id, step(1))
    runs.finish(run_id)
    runs.delete_run(run_id)
    replay_spool(run_id)
    assert spooled_runs() == [] and queries.step_frame(run_id).empty


def test_recording_takes_training_no_time(comet_home, started_run):
    run_id = started_run()
    metrics = [step(number) for number in range(1, 5001)]
    with locked_database(comet_home) as other:
        taking = DatabaseRecorder(run_id)
        slowest = total = 0.0
        for entry in metrics:
            before = time.perf_counter()
            taking.record_step(entry)
            spent = time.perf_counter() - before
            slowest, total = max(slowest, spent), total + spent
        other.execute("ROLLBACK")
        taking.close()
    assert total / len(metrics) < 0.0005, "one per cent of a step of 50 ms"
    assert queries.step_frame(run_id, []).attrs["total"] == 5000


def test_a_full_queue_loses_points_with_a_message_instead_of_waiting(started_run, capfd, monkeypatch):
    monkeypatch.setattr(recorder, "QUEUE_ROWS", 10)
    hold = threading.Event()
    entering = recorder._enter
    monkeypatch.setattr(recorder, "_enter", lambda *arguments: (hold.wait(), entering(*arguments)))
    taking = DatabaseRecorder(started_run())
    for number in range(1, 1001):
        taking.record_step(step(number))
    hold.set()
    taking.close()
    assert "points lost (the queue is full)" in capfd.readouterr().err


def test_a_run_of_another_lab_does_not_stop_training(any_database, capfd):
    record(12345, step(1))
    with database.session() as reading:
        assert reading.scalar(text("SELECT count(*) FROM step_metrics")) == 0
    assert runs.create_run(RunConfig()) == 1
