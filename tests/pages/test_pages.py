"""Every page inside its frame: on an empty lab, on a full one, and with what people and networks write into it."""

import json
from pathlib import Path

import pytest
from sqlalchemy import update
from streamlit.testing.v1 import AppTest

from comet_core.config import FIELDS, RunConfig
from pages import _widgets
from storage import database, queries, runs
from storage.tables import StepRow
from tests.pages import seeds

PAGES = (
    "home.py", "new_run.py", "runs.py", "run_detail.py", "compare.py", "trade_offs.py", "layers.py", "codec_lab.py",
    "about.py",
)  # fmt: skip
ROOT = Path(__file__).resolve().parents[2]
FOUND = {"classes": ["cat", "dog"], "num_train": 40, "num_test": 10, "image_size": 32}


def texts(app: AppTest) -> str:
    kinds = ("title", "subheader", "markdown", "caption", "error", "warning", "info", "success", "code")
    parts = [str(getattr(element, "value", "")) for kind in kinds for element in app.get(kind)]
    metrics = [f"{metric.label} {metric.value} {metric.delta}" for metric in app.metric]
    return "\n".join(parts + metrics)


def charts(app: AppTest) -> list[dict]:
    return [json.loads(chart.proto.spec) for chart in app.get("plotly_chart")]


def press(app: AppTest, label: str) -> AppTest:
    (button,) = [button for button in app.button if button.label == label]
    button.click().run()
    assert not app.exception, app.exception[0].message
    return app


def test_text_of_people_is_no_markdown():
    assert _widgets.plain("a *b* <c> $d$ :e: #f") == r"a \*b\* \<c\> \$d\$ \:e\: \#f"
    assert _widgets.plain("two\nlines") == "two lines"
    assert _widgets.plain("a -> b -- c").replace("\u2060", "|") == r"a \-|\> b \-|\- c"
    assert _widgets.plain("schön 0") == "schön 0"


def test_the_list_of_pages_is_complete():
    assert sorted(PAGES) == sorted(path.name for path in (ROOT / "pages").glob("[!_]*.py"))


@pytest.mark.parametrize("file", PAGES)
def test_a_page_refuses_to_run_without_its_frame(file):
    app = AppTest.from_file(str(ROOT / "pages" / file), default_timeout=30).run()
    assert not app.title and not app.button and not app.exception
    assert "inside the lab only" in app.error[0].value


@pytest.mark.parametrize("file", PAGES)
def test_an_empty_lab_says_what_to_do(file, open_page):
    app = open_page(file)
    assert app.title
    assert app.button or file == "about.py"


@pytest.mark.parametrize("file", PAGES)
def test_a_full_lab_opens(file, open_page, lab):
    query = {"run_detail.py": {"run": f"{lab['mine']}"}, "compare.py": {"runs": f"{lab['mine']},{lab['hostile']}"}}
    app = open_page(file, **query.get(file, {}))
    assert not app.error, app.error[0].value
    assert "<script>" not in texts(app)


def test_home_tells_what_the_last_twin_saved(open_page, lab):
    app = open_page("home.py")
    sentence = next(text.value for text in app.markdown if "kept" in text.value)
    held = queries.summary_frame([lab["mine"]])["max_held_bytes"][0] / 2**20
    assert f"kept **{held:.1f} MiB** for backward where its twin kept 170 MiB (93 % less)" in sentence
    assert "reached **59.00 %** on the test images, the twin 60.00 %" in sentence
    assert [metric.value for metric in app.metric] == ["1", "0", "4", "1"]


def test_a_run_shows_its_figures_and_curves(open_page, lab):
    app = open_page("run_detail.py", run=str(lab["mine"]))
    values = {metric.label: metric.value for metric in app.metric}
    assert values["Test accuracy"] == "59.00 %"
    assert values["Step time"] == "500 ms"
    titles = [chart["layout"]["title"]["text"] for chart in charts(app)]
    assert titles == [
        "Saved for backward (MiB)", "Loss", "Compression ratio (x)", "Accuracy (%)",
        "Peak resident memory above the start (MiB)", "What the peak consists of (MiB)", "Error bound of each layer",
    ]  # fmt: skip
    tables = [table.value for table in app.dataframe]
    assert tables[0]["name"].tolist() == [f"layer{place}.conv1" for place in range(1, 8)]
    assert dict(tables[1].values)["Batch size (images)"] == "128"


def test_the_parts_of_the_peak_stand_beside_the_twins(open_page, lab):
    app = open_page("run_detail.py", run=str(lab["mine"]))
    bars = [trace for trace in charts(app)[5]["data"] if len(trace["x"]) > 1]
    assert [trace["name"] for trace in bars] == [f"#{lab['mine']} mine", f"#{lab['twin']} mine (baseline)"]
    captions = [caption.value for caption in app.caption]
    assert any(text.startswith("Step 6, which") and "Not drawn: 398 MiB" in text for text in captions)


def test_a_run_from_before_parts_were_measured_says_so_and_shows_the_rest(open_page, lab):
    with database.transaction() as writing:
        writing.execute(update(StepRow).values(other_bytes=None))
    app = open_page("run_detail.py", run=str(lab["mine"]))
    assert len(charts(app)) == 6
    assert sum("An earlier version recorded this run" in caption.value for caption in app.caption) == 1


def test_what_was_not_finite_is_seen_as_such(open_page, lab):
    app = open_page("run_detail.py", run=str(lab["hostile"]))
    crosses = [trace for trace in charts(app)[1]["data"] if trace["mode"] == "markers"]
    assert crosses[0]["customdata"] == ["NaN", "∞", "−∞"]
    diverged = seeds.ended_run(RunConfig(name="diverged"), losses=[float("nan")] * 40)
    loss = open_page("run_detail.py", run=str(diverged)).metric[0]
    assert loss.value == "NaN"


def test_zero_is_a_value(open_page, lab):
    assert open_page("run_detail.py", run=str(lab["zero"])).metric[0].value == "0"
    table = open_page("compare.py", runs=f"{lab['zero']},{lab['twin']}").dataframe[-1].value
    row = table[table["Figure"] == "Training loss at the end"].iloc[0]
    assert row.iloc[1] == "0"


def test_a_failed_run_says_why_first(open_page, lab):
    app = open_page("run_detail.py", run=str(lab["failed"]))
    assert app.error[0].value == _widgets.plain(queries.run(lab["failed"])["error"])


def test_a_live_run_shows_its_progress_and_can_be_stopped(open_page, lab):
    app = open_page("run_detail.py", run=str(lab["live"]))
    (bar,) = app.get("progress")
    assert bar.proto.value == 50
    assert bar.proto.text == "step 20 of 40, epoch 1, about 10 s left"
    press(app, "Stop")
    assert queries.run(lab["live"])["status"] == "stopping"


@pytest.mark.parametrize("asked", ["", "999", "x", "1;drop"])
def test_a_run_that_does_not_exist_leads_to_the_list(asked, open_page, lab):
    app = open_page("run_detail.py", **({"run": asked} if asked else {}))
    assert [button.label for button in app.button] == ["Choose one from the list"]


def test_filters_come_from_the_address(open_page, lab):
    table = open_page("runs.py", status="failed").dataframe[0].value
    assert table["name"].tolist() == ["failed"]
    assert open_page("runs.py", search="<script>").dataframe[0].value["name"].tolist() == [
        queries.run(lab["hostile"])["name"]
    ]
    assert "No run passes" in open_page("runs.py", search="nobody").info[0].value


def test_lists_come_in_pages_of_fifty(open_page):
    for number in range(1, 54):
        runs.create_run(RunConfig(name=f"run {number}"))
    assert len(open_page("runs.py").dataframe[0].value) == 50
    app = open_page("runs.py", page="2")
    assert app.dataframe[0].value["name"].tolist() == ["run 3", "run 2", "run 1"]
    assert "showing 51 to 53 of 53 runs" in texts(app)


def test_compare_shows_differences_first_and_measures_them_from_the_baseline(open_page, lab):
    mine, twin = lab["mine"], lab["twin"]
    app = open_page("compare.py", runs=f"{mine},{twin}")
    options, figures = (table.value for table in app.dataframe)
    assert options.loc["policy"].tolist() == ["compress", "baseline"]
    row = figures[figures["Figure"] == "Test accuracy at the end"].iloc[0].tolist()
    assert row == ["Test accuracy at the end", "59.00 %", "−1.00 points", "−1.7 %", "60.00 %"]
    colors = {
        trace["name"]: (trace["line"]["color"], trace["line"]["dash"])
        for chart in charts(app) for trace in chart["data"]
    }  # fmt: skip
    assert len(colors) == 2 and len(set(colors.values())) == 2


def test_times_of_runs_beside_each_other_are_not_compared(open_page):
    ids = [runs.create_run(RunConfig(name=name)) for name in ("one", "two")]
    runs.claim_next(2), runs.claim_next(2)
    for run_id in ids:
        seeds.train(run_id, claimed=True)
    app = open_page("compare.py", runs=f"{ids[0]},{ids[1]}")
    table = app.dataframe[-1].value.set_index("Figure")
    assert table.loc["Step time"].tolist()[1:3] == ["500 ms (shared)", "not compared"]
    assert "Shared:" in texts(app)
    assert {metric.label: metric.delta for metric in app.metric}[f"Step time, \\#{ids[1]}"] == ""


def test_trade_offs_hold_finished_runs_alone(open_page, lab):
    app = open_page("trade_offs.py")
    (chart,) = charts(app)
    finished = {lab[name] for name in ("mine", "twin", "hostile", "zero")}
    assert set(chart["data"][-1]["customdata"]) == finished
    assert set(app.dataframe[0].value["Run"]) == {f"run_detail?run={run_id}" for run_id in finished}


def test_about_shows_the_place_of_the_database_alone(open_page, monkeypatch, comet_home):
    monkeypatch.setenv("COMET_DATABASE_URL", f"sqlite:///{comet_home}/other.db?timeout=7")
    assert open_page("about.py").code[0].value == f"{comet_home}/other.db"


@pytest.fixture
def images(monkeypatch):
    """The check of the data set answers at once; what it was asked is kept."""
    asked = []

    def check(config):
        asked.append(config)
        return FOUND

    monkeypatch.setattr(runs, "check_dataset", check)
    return asked


def test_the_form_shows_every_option_that_matters_with_unit_and_help(open_page):
    app = open_page("new_run.py")
    inputs = {widget.key.removeprefix("new_"): widget for kind in ("selectbox", "number_input", "text_input", "toggle")
              for widget in app.get(kind)}  # fmt: skip
    hidden = {"dataset_path", "momentum_fraction", "error_bound", "memory_bytes"}
    assert inputs.keys() == FIELDS.keys() - hidden
    assert inputs["batch_size"].label == "Batch size (images)"
    assert all(widget.help for widget in inputs.values())
    assert "From 1 to 65,536 images" in inputs["batch_size"].help.replace("\\", "")


@pytest.mark.parametrize(("controller", "option"), [
    ("momentum", "momentum_fraction"), ("fixed", "error_bound"), ("memory", "memory_bytes")])  # fmt: skip
def test_an_option_appears_with_the_choice_that_needs_it(controller, option, open_page):
    app = open_page("new_run.py")
    app.selectbox(key="new_controller").select(controller).run()
    keys = {widget.key for widget in app.number_input}
    assert f"new_{option}" in keys
    assert "new_noise_budget" not in keys


def test_choices_stay_while_their_input_is_hidden(open_page):
    app = open_page("new_run.py")
    app.number_input(key="new_epochs").set_value(7).run()
    app.number_input(key="new_noise_budget").set_value(0.5).run()
    app.selectbox(key="new_policy").select("baseline").run()
    app.selectbox(key="new_policy").select("compress").run()
    assert app.number_input(key="new_noise_budget").value == 0.5
    assert app.number_input(key="new_epochs").value == 7


def test_parameters_of_a_codec_are_asked_for_where_it_has_some(open_page, images):
    app = open_page("new_run.py")
    app.text_input(key="new_codec_params").set_value("dither=perhaps").run()
    assert _widgets.plain("codec_params: dither is 'perhaps'; allowed: False, True.") in texts(app)
    app.text_input(key="new_codec_params").set_value("dither=true").run()
    press(app, "Launch with baseline twin")
    assert [queries.run(run_id)["config"]["codec_params"] for run_id in (1, 2)] == ["dither=true"] * 2
    app.selectbox(key="new_codec").select("lossless").run()
    assert "new_codec_params" not in {widget.key for widget in app.text_input}
    press(app, "Launch")
    assert queries.run(3)["config"]["codec_params"] == ""


def test_launch_with_twin_queues_both(open_page, images):
    app = open_page("new_run.py", preset="quick")
    app.text_input(key="new_name").set_value("<b>mine</b>")
    app.number_input(key="new_epochs").set_value(3).run()
    press(app, "Launch with baseline twin")
    assert "are queued" in texts(app)
    frame = queries.runs_frame()
    assert frame["name"].tolist() == ["<b>mine</b> (baseline)", "<b>mine</b>"]
    assert frame["twin_id"].tolist() == [1, 2]
    assert queries.run(1)["config"]["epochs"] == 3
    assert len(images) == 1


def test_launch_alone_queues_one_and_the_form_forgets_it_elsewhere(open_page, images):
    app = press(open_page("new_run.py"), "Launch")
    assert queries.count_runs() == 1
    assert "is queued" in texts(app)
    app.switch_page("about.py").run()
    assert "is queued" not in texts(app.switch_page("new_run.py").run())


def test_nonsense_is_refused_beside_its_field_and_nothing_is_made(open_page, images):
    app = open_page("new_run.py")
    app.number_input(key="new_epochs").set_value(0).run()
    sentence = "epochs is 0; allowed: a whole number from 1 to 10,000."
    assert _widgets.plain(sentence) in texts(app)
    press(app, "Launch with baseline twin")
    assert f"Nothing was launched. {_widgets.plain(sentence)}" in texts(app)
    assert queries.count_runs() == 0 and not images


def test_images_that_cannot_be_used_are_refused_with_their_sentence(open_page, monkeypatch):
    def check(config):
        raise ValueError("batch_size is 4096, but there are only 40 training images.")

    monkeypatch.setattr(runs, "check_dataset", check)
    app = press(open_page("new_run.py"), "Launch")
    assert _widgets.plain("batch_size is 4096, but there are only 40 training images.") in texts(app)
    assert queries.count_runs() == 0


def test_image_folder_needs_a_path_and_shows_what_it_holds(open_page, images):
    app = open_page("new_run.py", preset="images")
    assert not app.error
    press(app, "Launch")
    assert "dataset\\_path is empty" in texts(app)
    app.text_input(key="new_dataset_path").set_value("/data/images.zip").run()
    assert "2 classes, 40 training and 10 test images of 32x32 pixels." in texts(app)
    press(app, "Launch")
    assert queries.run(1)["config"]["dataset_path"] == "/data/images.zip"
