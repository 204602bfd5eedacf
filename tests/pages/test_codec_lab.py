"""The codec lab: real measurements in processes of their own, their errors, and nothing left behind."""

import gc
import io
import json
import os
import re
import subprocess
import sys
import time

import numpy as np
import pandas as pd
import pytest
from streamlit.testing.v1 import AppTest

from pages import _codec_charts, _measuring
from pages._measuring import Measurement, MeasurementError
from tests.pages.test_pages import ROOT, charts, press, texts

LAYERS = {"conv": "conv2d", "bn": "batch_norm", "stage1.0.conv1": "conv2d"}


@pytest.fixture(autouse=True)
def _known_layers(monkeypatch):
    """Asking the engine takes seconds."""
    monkeypatch.setattr(_measuring, "layers", lambda model: LAYERS)


def npy(values: np.ndarray) -> io.BytesIO:
    content = io.BytesIO()
    np.save(content, values)
    content.seek(0)
    return content


def ended(app: AppTest, seconds: float = 90) -> AppTest:
    """The page once its measurement has come to its end."""
    deadline = time.monotonic() + seconds
    while app.session_state["lab_running"] is not None:
        assert time.monotonic() < deadline
        time.sleep(0.2)
        app.run()
    assert not app.exception, app.exception[0].message
    return app


def asked(open_page, codecs: list[str], bounds: str = "1 13", steps: int = 1) -> AppTest:
    app = open_page("codec_lab.py")
    app.number_input(key="lab_steps").set_value(steps)
    app.multiselect(key="lab_codecs").set_value(codecs)
    app.text_input(key="lab_bounds_rule").set_value(bounds).run()
    return app


def test_a_capture_is_measured_and_drawn(open_page, comet_home):
    app = press(asked(open_page, ["error_bounded", "lossless"]), "Measure")
    assert [button.label for button in app.button if not button.disabled] == ["Stop"]
    app = ended(app)
    assert not app.error, app.error[0].value
    titles = [chart["layout"]["title"]["text"] for chart in charts(app)]
    assert titles == [
        "Bits a value", "Error over bits a value", "Errors of error_bounded",
        "Throughput: encode, then decode",
    ]  # fmt: skip
    answer = app.session_state["lab_answer"]
    drawn = {trace["name"]: trace for trace in charts(app)[0]["data"]}
    assert drawn.keys() == {"error_bounded", "lossless", "entropy of the codes", "entropy given the neighbours"}
    rows = {(row["codec"], row["bound"]): row for row in answer["results"]}
    row = rows["error_bounded", 13]
    figures = {metric.label: metric.value for metric in app.metric}
    assert figures["Ratio"] == f"{row['compression_ratio']:.2f}x"
    assert figures["Entropy in context"] == f"{answer['bounds'][1]['context_bits']:.3f}"
    assert len(app.dataframe[0].value) == len(rows) == 3
    assert list((comet_home / "codec_lab").iterdir()) == []
    app.selectbox[-1].select("lossless").run()
    assert "lossless gave every value back as it was." in texts(app)


def test_codecs_without_a_guarantee_are_judged_by_the_chosen_bound(open_page):
    app = ended(press(asked(open_page, ["error_bounded", "cast"], bounds="1 1000"), "Measure"))
    (row,) = (row for row in app.session_state["lab_answer"]["results"] if row["codec"] == "cast")
    fine, coarse = row["num_over_bounds"]
    assert fine > coarse
    app.selectbox[-1].select("cast").run()
    assert app.metric[-1].help == f"{coarse:,} values beyond the bound 1000."
    app.select_slider[0].set_value(1.0).run()
    assert app.metric[-1].help == f"{fine:,} values beyond the bound 1."
    shown = app.dataframe[0].value
    assert shown["num_over_bound"][shown["codec"] == "cast"].tolist() == [fine]


def test_a_codec_that_became_lossless_says_when_it_does(open_page):
    app = ended(press(asked(open_page, ["dct"]), "Measure"))
    answer = app.session_state["lab_answer"]
    answer["results"][0] |= {"histogram": None, "note": "It stores without loss what is not finite."}
    app.run()
    assert "dct gave every value back as it was. It stores without loss what is not finite." in texts(app)


def test_an_error_of_the_measurement_is_its_sentence(open_page, comet_home):
    app = ended(press(asked(open_page, ["cast:dtype=<b>int4</b>"]), "Measure"))
    assert app.error[0].value.startswith(r"dtype is \'\<b\>int4")
    assert list((comet_home / "codec_lab").iterdir()) == []
    assert "Nothing measured yet" in texts(app)


def test_a_measurement_can_be_stopped(open_page, comet_home):
    app = press(asked(open_page, ["error_bounded"], steps=1000), "Measure")
    measurement = app.session_state["lab_running"]
    deadline = time.monotonic() + 60
    while measurement.progress()[0] == 0:
        assert time.monotonic() < deadline and measurement.is_running
        time.sleep(0.1)
    app.run()
    assert re.fullmatch("training resnet20", app.get("progress")[0].proto.text)
    app = ended(press(app, "Stop"))
    assert "Stopped before anything was measured" in texts(app)


@pytest.mark.parametrize(
    ("text", "words"), [("1 x", "x is no bound"), ("0", "0 is no bound"), ("", "these are 0 bounds"), ("inf", "inf is")]
)
def test_what_is_no_bound_is_said_and_nothing_can_be_measured(text, words, open_page):
    app = asked(open_page, ["error_bounded"], bounds=text)
    assert words in texts(app)
    assert next(button for button in app.button if button.label == "Measure").disabled


def test_choices_come_from_the_address_and_an_upload_asks_for_a_file(open_page):
    app = open_page("codec_lab.py", lab_source="Upload", lab_signs="true")
    assert app.toggle(key="lab_signs").value is True
    assert "Choose a file first" in texts(app)
    assert "rule" not in app.selectbox(key="lab_kind_upload").options


def test_a_network_that_cannot_be_looked_at_says_why(open_page, monkeypatch):
    def broken(model):
        raise MeasurementError("The *engine* is away.")

    monkeypatch.setattr(_measuring, "layers", broken)
    app = AppTest.from_file(str(ROOT / "pages" / "_shell.py"), default_timeout=30)
    app.switch_page("codec_lab.py").run()
    assert app.error[0].value == r"The \*engine\* is away\."


# --- the process behind it --------------------------------------------------------------------------------------------


def test_an_uploaded_tensor_is_measured_under_a_safe_name(comet_home):
    values = np.random.default_rng(0).normal(size=(2, 3, 16, 16)).astype(np.float32)
    arguments = ["--codecs", "error_bounded", "--kind", "abs", "--bounds", "0.1", "--channel-dim", "1"]
    measurement = Measurement(arguments, ("../../my tensor$(x).npy", npy(values)))
    assert measurement.folder.parent == comet_home / "codec_lab"
    found = measurement.answer()
    assert found["tensor"]["name"] == "my-tensor-x-.npy" and found["tensor"]["shape"] == [2, 3, 16, 16]
    assert found["results"][0]["num_over_bound"] == 0
    assert not measurement.folder.exists() and not measurement.is_running


@pytest.mark.parametrize(
    ("content", "words"),
    [(b"no numbers", "x.npy is no whole .npy file of numbers"), (npy(np.arange(4)).read(), "x.npy holds int64")],
)
def test_an_upload_that_cannot_be_read_is_refused_with_a_sentence_and_removed(content, words):
    measurement = Measurement(["--codecs", "lossless"], ("x.npy", io.BytesIO(content)))
    with pytest.raises(MeasurementError, match=words):
        measurement.answer()
    assert not measurement.folder.exists()


def test_a_stop_right_after_the_start_is_no_failure():
    measurement = Measurement(["--codecs", "lossless"])
    measurement.stop()
    with pytest.raises(MeasurementError, match="Stopped before anything was measured"):
        measurement.answer()
    assert not measurement.folder.exists()


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_session_that_goes_takes_process_and_files_along(comet_home):
    measurement = Measurement(["--steps", "100000", "--codecs", "lossless"])
    folder, process = measurement.folder, measurement._process.pid
    assert measurement.is_running and folder.exists()
    other = Measurement(["--codecs", "zip"])
    assert other.shared and not measurement.shared
    with pytest.raises(MeasurementError, match="codec is 'zip'; allowed"):
        other.answer()
    del measurement
    gc.collect()
    assert not os.path.exists(f"/proc/{process}") and not folder.exists()


def test_what_a_killed_server_left_goes_after_a_day(comet_home):
    old, new = comet_home / "codec_lab" / "old", comet_home / "codec_lab" / "new"
    for folder in (old, new):
        folder.mkdir(parents=True)
        (folder / "x.npy").touch()
    os.utime(old, (0, time.time() - 100_000))
    with pytest.raises(MeasurementError):
        Measurement(["--codecs", "zip"]).answer()
    assert not old.exists() and new.exists()


def test_a_process_that_breaks_shows_the_end_of_its_log(monkeypatch):
    monkeypatch.setattr(sys, "executable", "false")
    with pytest.raises(MeasurementError, match="The measurement broke: it printed nothing"):
        Measurement(["--codecs", "lossless"]).answer()


def test_the_pages_side_of_it_loads_no_torch():
    code = "import sys, pages._measuring, pages._codec_charts; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, timeout=60).returncode == 0


# --- charts -----------------------------------------------------------------------------------------------------------


def row(codec: str, bound: float | None, bits: float, error: float) -> dict:
    return {"codec": codec, "bound": bound, "bits_per_value": bits, "relative_rms_error": error,
            "encode_gb_per_s": 1.0, "decode_gb_per_s": 2.0}  # fmt: skip


RESULTS = pd.DataFrame(
    [row("b", 0.1, 2.0, 0.2), row("b", 0.01, 4.0, 0.02), row("<b>x</b>", None, 8.0, 0.1), row("exact", None, 20.0, 0.0)]
)


def test_bits_of_codecs_without_a_bound_are_level_lines():
    bounds = pd.DataFrame({"bound": [0.01, 0.1], "order0_bits": [4.0, None], "context_bits": [None, None]})
    figure = _codec_charts.bits_over_bound(RESULTS, bounds, "Bound")
    lines = {trace.name: (list(trace.x), list(trace.y)) for trace in figure.data}
    assert lines == {
        "b": ([0.01, 0.1], [4.0, 2.0]), "&lt;b&gt;x&lt;/b&gt;": ([0.01, 0.1], [8.0, 8.0]),
        "exact": ([0.01, 0.1], [20.0, 20.0]), "entropy of the codes": ([0.01], [4.0]),
    }  # fmt: skip


def test_exact_results_are_left_out_where_errors_are_drawn():
    names = [trace.name for trace in _codec_charts.rate_distortion(RESULTS).data]
    assert names == ["b", "&lt;b&gt;x&lt;/b&gt;"]


def test_a_codec_keeps_its_colour_in_every_chart():
    chosen = _codec_charts.colors(RESULTS["codec"])
    assert _codec_charts.rate_distortion(RESULTS).data[1].line.color == chosen["<b>x</b>"]
    assert list(_codec_charts.throughput(RESULTS.iloc[1:]).data[0].marker.color)[1] == chosen["<b>x</b>"]


@pytest.mark.parametrize(("unit", "ends"), [(None, 1.0), (0.5, 0.5)])
def test_an_error_histogram_has_its_unit_on_the_axis(unit, ends):
    figure = _codec_charts.error_histogram({"codec": "b", "histogram": [1, 2, 1], "histogram_unit": unit}, "#000000")
    (bars,) = figure.data
    assert list(bars.y) == [25.0, 50.0, 25.0]
    assert bars.x[0] - bars.width / 2 == pytest.approx(-ends) and bars.x[2] + bars.width / 2 == pytest.approx(ends)
    assert ("share of the bound" in figure.layout.xaxis.title.text) is (unit is None)
    json.loads(figure.to_json())
