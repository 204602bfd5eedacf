"""The Layers page: what it draws of a run's layers, audits and decisions, and what it says where there are none."""

import numpy as np
import pandas as pd
import pytest

from comet_core.config import RunConfig
from pages import _layer_charts
from storage import queries
from tests.pages import seeds


def charts(app):
    return [chart.proto.alt or "" for chart in app.get("plotly_chart")] if app.get("plotly_chart") else []


def test_a_run_shows_its_figures_its_map_its_decisions_and_a_layer(lab, open_page):
    app = open_page("layers.py", run=str(lab["mine"]))
    figures = {metric.label: metric.value for metric in app.metric}
    assert figures["Audits"] == "36" and figures["Within 0.7 to 1.4"].startswith("100")
    assert len(app.get("plotly_chart")) == 4
    events = next(frame.value for frame in app.dataframe if "Kind" in frame.value)
    assert set(events["Kind"]) == {"budget", "clamped"} and len(events) == 6
    facts = next(frame.value for frame in app.dataframe if "What it says" in frame.value)
    assert "-0.03" in " ".join(map(str, facts["Last audit"])).replace("−", "-")


@pytest.mark.parametrize("view", [
    "Compression ratio (x)", "Bits a value (bits)", "Predicted error's variance over the sampling noise's (%)",
    "Measured over predicted gradient error", "Measured over modelled gradient error, as learned",
])  # fmt: skip
def test_every_view_is_a_heat_map_and_a_part_of_the_address(view, lab, open_page):
    app = open_page("layers.py", run=str(lab["mine"]), view=view)
    box = app.selectbox(key="view")
    assert box.options[box.index] == view
    assert len(app.get("plotly_chart")) == 4 and not app.error and not app.info


def test_decisions_can_be_filtered(lab, open_page):
    app = open_page("layers.py", run=str(lab["mine"]))
    next(box for box in app.selectbox if box.label == "Kind").select("clamped").run()
    events = next(frame.value for frame in app.dataframe if "Kind" in frame.value)
    assert set(events["Kind"]) == {"clamped"}


def test_a_layer_without_audits_and_a_run_without_layers_say_so(lab, open_page):
    app = open_page("layers.py", run=str(lab["mine"]), layer="layer7.conv1")
    assert any("was not audited" in info.value for info in app.info)
    app = open_page("layers.py", run=str(lab["zero"]))
    assert any("no layer" in info.value for info in app.info)
    app = open_page("layers.py", run="4711")
    assert any("No such run" in heading.value for heading in app.subheader)


def test_an_empty_lab_says_what_to_do(comet_home, open_page):
    assert any("No compressed run yet" in heading.value for heading in open_page("layers.py").subheader)


def test_a_heat_map_has_a_row_a_layer_in_the_models_order_and_gaps_where_nothing_was_measured(comet_home):
    run_id = seeds.ended_run(RunConfig())
    layers = queries.layer_frame(run_id)
    layers.loc[0, "error_bound"] = np.nan
    names = queries.layer_names(run_id)
    (drawn,) = _layer_charts.heat_map(layers, names, "error_bound", "Error bound").data
    assert list(drawn.y) == names == [f"layer{i}.conv1" for i in range(1, 8)]
    grid = np.asarray(drawn.z, dtype=float)
    assert grid.shape == (7, 6) and np.isnan(grid[0, 0]) and np.isfinite(grid).sum() == 41
    assert grid[1, 0] == pytest.approx(np.log10(0.2))


def test_where_one_is_the_middle_the_colours_reach_as_far_on_both_sides():
    cells = pd.DataFrame({"step": [1, 2], "name": ["a", "a"], "ratio": [1.0, 8.0]})
    (drawn,) = _layer_charts.heat_map(cells, ["a"], "ratio", "Ratio", middle=True).data
    assert drawn.zmin == -drawn.zmax == pytest.approx(-np.log10(8))


def test_an_error_of_zero_has_no_histogram():
    assert _layer_charts.histogram(pd.Series({"error_histogram": None, "step": 1})) is None
