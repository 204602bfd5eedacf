"""The life of a run, on both databases."""

import time

import pytest

from comet_core.config import RunConfig
from comet_core.launcher import Identity
from storage import queries, runs

MYSELF = Identity("here", 4242, "boot/1")
pytestmark = pytest.mark.usefixtures("any_database")


def status(run_id: int) -> str:
    found = queries.run(run_id)
    assert found is not None
    return found["status"]


def test_a_run_goes_from_the_queue_to_its_end():
    first, second = runs.create_run(RunConfig(name="first")), runs.create_run(RunConfig(seed=7))
    assert runs.claim_next(slots=1) == first and status(first) == "starting"
    assert runs.claim_next(slots=1) is None, "one slot, one run"
    runs.mark_starting(first, MYSELF)
    runs.mark_starting(first, MYSELF)  # said by scheduler and worker
    runs.start(first, num_steps_total=10, environment={"torch": "2.14.1"}, start_rss_bytes=123)
    assert runs.heartbeat(first) is False
    assert [run.id for run in runs.live_runs()] == [first]
    runs.finish(first)
    found = queries.run(first)
    assert found is not None
    assert (found["status"], found["num_steps_total"], found["start_rss_bytes"]) == ("finished", 10, 123)
    assert found["environment"] == {"torch": "2.14.1"} and found["error"] is None and found["pid"] == 4242
    assert found["created_at"] <= found["started_at"] <= found["finished_at"] <= time.time()
    assert runs.claim_next(slots=1) == second


def test_the_row_copies_what_is_filtered_by_and_keeps_the_whole_configuration():
    config = RunConfig(dataset="cifar10", model="vgg16_bn", controller="fixed", seed=9)
    run_id = runs.create_run(config)
    found = queries.run(run_id)
    assert found is not None
    names = ("dataset", "model", "policy", "controller", "seed")
    assert [found[name] for name in names] == [getattr(config, name) for name in names]
    assert runs.config_of(run_id) == config and found["config"] == config.to_dict() and found["name"] == config.title


def test_twins_differ_in_the_policy_alone_and_know_each_other():
    compressed, baseline = runs.create_twins(RunConfig(seed=3))
    assert runs.config_of(baseline).to_dict() == {**runs.config_of(compressed).to_dict(), "policy": "baseline"}
    one, other = queries.run(compressed), queries.run(baseline)
    assert one is not None and other is not None
    assert (one["twin_id"], other["twin_id"]) == (baseline, compressed)
    runs.delete_run(baseline)
    one = queries.run(compressed)
    assert one is not None and one["twin_id"] is None
    with pytest.raises(ValueError, match="policy is 'baseline'"):
        runs.create_twins(RunConfig(policy="baseline"))


def test_runs_that_share_the_machine_are_marked():
    ids = [runs.create_run(RunConfig()) for _ in range(3)]
    assert runs.claim_next(slots=2) == ids[0]
    alone = queries.run(ids[0])
    assert alone is not None and alone["timings_shared"] is False
    assert runs.claim_next(slots=2) == ids[1]
    shared = queries.runs_frame().set_index("id")["timings_shared"]
    assert shared.to_dict() == {ids[0]: True, ids[1]: True, ids[2]: False}


def test_a_queued_run_is_stopped_at_once_and_a_live_one_is_asked(started_run):
    queued = runs.create_run(RunConfig())
    assert runs.request_stop(queued) == "stopped" and status(queued) == "stopped"
    live = started_run()
    assert runs.request_stop(live) == "stopping" and runs.request_stop(live) == "stopping"
    assert runs.heartbeat(live) is True
    runs.mark_stopped(live)
    assert status(live) == "stopped"
    with pytest.raises(runs.RunStateError, match="is stopped already; only queued and live runs can be stopped"):
        runs.request_stop(live)


def test_a_stop_that_comes_before_training_is_not_forgotten():
    run_id = runs.create_run(RunConfig())
    runs.claim_next(slots=1)
    runs.request_stop(run_id)
    runs.start(run_id, num_steps_total=10, environment={}, start_rss_bytes=1)
    assert status(run_id) == "stopping"


@pytest.mark.parametrize("end", ["finished", "stopped", "failed", "lost"])
def test_an_end_is_final(started_run, end):
    ends = {
        "finished": runs.finish,
        "stopped": runs.mark_stopped,
        "failed": lambda i: runs.fail(i, "why"),
        "lost": lambda i: runs.lose(i, "why"),
    }
    run_id = started_run()
    ends[end](run_id)
    before = queries.run(run_id)
    for change in ends.values():
        with pytest.raises(runs.RunStateError, match=f"Run {run_id} is {end} and cannot become"):
            change(run_id)
    with pytest.raises(runs.RunStateError, match="has no process any more"):
        runs.heartbeat(run_id)
    with pytest.raises(runs.RunStateError, match="cannot become running"):
        runs.start(run_id, num_steps_total=1, environment={}, start_rss_bytes=1)
    assert queries.run(run_id) == before
    assert before is not None and before["error"] == ("why" if end in ("failed", "lost") else None)


def test_a_run_that_nobody_claimed_cannot_start_or_end():
    run_id = runs.create_run(RunConfig())
    for change in (runs.finish, runs.mark_stopped, runs.heartbeat, lambda i: runs.mark_starting(i, MYSELF)):
        with pytest.raises(runs.RunStateError, match=f"Run {run_id} is queued"):
            change(run_id)
    assert status(run_id) == "queued"


def test_a_run_belongs_to_one_process(started_run):
    run_id = started_run()
    with pytest.raises(runs.RunStateError, match="not for 1 to take"):
        runs.mark_starting(run_id, Identity("elsewhere", 1, "then"))
    with pytest.raises(runs.RunStateError, match="cannot be queued again"):
        runs.give_back(run_id)


def test_a_claim_without_a_process_can_be_given_back():
    run_id = runs.create_run(RunConfig())
    runs.claim_next(slots=1)
    runs.give_back(run_id)
    assert status(run_id) == "queued" and runs.claim_next(slots=1) == run_id


def test_only_a_run_without_a_process_can_be_deleted(started_run):
    live = started_run()
    runs.log_path(live).parent.mkdir(parents=True)
    runs.log_path(live).write_text("step 1")
    with pytest.raises(runs.RunStateError, match=f"Run {live} is running; stop it before you delete it"):
        runs.delete_run(live)
    assert runs.log_path(live).exists()
    runs.finish(live)
    runs.delete_run(live)
    assert queries.run(live) is None and not runs.log_path(live).exists()
    assert runs.create_run(RunConfig()) > live, "a number is never given twice"


@pytest.mark.parametrize("change", [runs.finish, runs.heartbeat, runs.request_stop, runs.delete_run, runs.config_of])
def test_a_run_that_does_not_exist_is_named(change):
    with pytest.raises(runs.RunStateError, match="There is no run 404"):
        change(404)
