"""Which bound did each layer get, why, and was the error of its gradient what was predicted?"""

import pandas as pd
import streamlit as st

from comet_core.metrics import AuditMetrics, LayerMetrics, axis_label
from pages import _charts, _layer_charts, _widgets
from storage import queries

MOST_STEPS = 120  # in a heat map
MOST_RUNS = 200  # to choose from, the newest
VIEWS = {
    "error_bound": axis_label(LayerMetrics, "error_bound"),
    "compression_ratio": axis_label(LayerMetrics, "compression_ratio"),
    "bits_per_value": axis_label(LayerMetrics, "bits_per_value"),
    "noise": "Predicted error's variance over the sampling noise's (%)",
    "agreement": "Measured over predicted gradient error",
    "audit_factor": axis_label(LayerMetrics, "audit_factor"),
}
IN_MIDDLE = ("agreement", "audit_factor")  # 1 is as it should be
FACTS = {
    "slope": "-0.1: the stored input makes the gradient a tenth smaller; within 0.1 is usual at the default budget.",
    "mean_error": "The mean error in units of its own standard error; beyond 3 it is no accident.",
    "excess_kurtosis": "0 as in a normal distribution; far above, few elements carry most of the error.",
    "correlation": "Of the error with the exact gradient, element by element.",
    "passed_error": "Of the gradient that goes on to the layers before, relative; weights pass none.",
    "gradient_rms": "What the error is small against, or not.",
}


def _run() -> int:
    """The run in the address, or the latest with layers to show."""
    asked = _widgets.asked_runs(st.query_params.get("run", ""))
    found = queries.run(asked[0]) if asked else None
    if asked and found is None:
        text = f"There is no run #{asked[0]}; it may have been deleted."
        _widgets.empty("No such run", text, "runs.py", "Choose one from the list")
    listed = queries.runs_frame(policy="compress", limit=MOST_RUNS)
    names = {int(run_id): str(name) for run_id, name in zip(listed["id"], listed["name"], strict=True)}
    if found is not None:
        names = {found["id"]: found["name"], **names}
    if not names:
        text = "Bounds, ratios and gradient errors of every layer stand here, of runs that compress."
        _widgets.empty("No compressed run yet", text, "new_run.py", "Set up a run with its twin")
    labels = {run_id: f"#{run_id} {_charts.middle_cut(name, 50)}" for run_id, name in names.items()}
    chosen = st.selectbox("Run", list(labels), format_func=labels.__getitem__, width=420)
    st.query_params["run"] = str(chosen)
    return chosen


def _figures(audits: pd.DataFrame) -> None:
    ratio = (audits["measured_sigma"] / audits["predicted_sigma"]).dropna()
    within = ratio.between(0.7, 1.4).mean() if len(ratio) else None
    slope = audits["slope"].median() if len(audits) else None
    text = "Measured over predicted gradient error, of all audits that had a prediction."
    _widgets.figures(
        [
            ("Audits", f"{audits.attrs['total']:,}", "Each is one layer's gradient formed twice in one iteration."),
            ("Within 0.7 to 1.4", _charts.number_text(within, "fraction"), text),
            ("Measured / predicted", _charts.number_text(ratio.median() if len(ratio) else None), f"Median. {text}"),
            ("Median slope", _charts.number_text(slope), FACTS["slope"]),
        ]
    )


def _map(layers: pd.DataFrame, audits: pd.DataFrame, names: list[str]) -> None:
    view = st.selectbox(
        "Colour shows", list(VIEWS), format_func=VIEWS.__getitem__, key="view", bind="query-params", width=420
    )
    if view == "agreement":
        ratio, turn = audits["measured_sigma"] / audits["predicted_sigma"], audits.groupby("name").cumcount() + 1
        cells = audits.assign(agreement=ratio, step=turn)  # layers are audited one after the other
        kept = [name for name in names if name in set(cells["name"])]
    else:
        cells = layers.assign(noise=100 * (layers["predicted_sigma"] / layers["gradient_noise"]) ** 2)
        kept = names
    if not (cells[view] > 0).any():
        st.info("This was not measured in this run: it needs an error-bounded codec, and audits or a few collections.")
        return
    kind = {"middle": view in IN_MIDDLE, "turns": view == "agreement"}
    _widgets.chart(VIEWS[view], lambda: _layer_charts.heat_map(cells, kept, view, VIEWS[view], **kind), key="map")


def _events(found: pd.DataFrame) -> None:
    if found.empty:
        st.caption("No decision was recorded.")
        return
    _widgets.chart("Decisions", lambda: _layer_charts.events(found), key="events")
    places = st.columns([1, 1, 2])
    kind = places[0].selectbox("Kind", sorted(set(found["kind"])), index=None, placeholder="Any")
    layer = places[1].selectbox("Of layer", sorted(set(found["layer"].dropna())), index=None, placeholder="Any")
    shown = found[(found["kind"] == kind) | (kind is None)]
    shown = shown[(shown["layer"] == layer) | (layer is None)]
    if len(found) < found.attrs["total"]:
        st.caption(f"The latest {len(found):,} of {found.attrs['total']:,}.")
    st.dataframe(
        shown[["step", "kind", "layer", "message"]].rename(columns=str.capitalize), hide_index=True, placeholder="–"
    )


def _one(layers: pd.DataFrame, audits: pd.DataFrame, names: list[str]) -> None:
    name = st.selectbox("Layer", names, key="layer", bind="query-params", width=420)
    mine, looked = layers[layers["name"] == name], audits[audits["name"] == name]
    left, right = st.columns(2)
    with left:
        _widgets.chart("Gradient error", lambda: _layer_charts.errors(mine, looked, name), key="errors")
    with right:
        if looked.empty:
            st.info("This layer was not audited: it was stored exactly, or the run ended before its turn.")
            return
        last = looked.iloc[-1]
        _widgets.chart("Error of the gradient", lambda: _layer_charts.histogram(last), key="histogram")
    means = looked[list(FACTS)].mean()
    rows = [
        (axis_label(AuditMetrics, fact), _charts.number_text(last[fact]), _charts.number_text(means[fact]), text)
        for fact, text in FACTS.items()
        if looked[fact].notna().any()
    ]
    columns = ["Of the gradient's error", "Last audit", f"Mean of {len(looked)}", "What it says"]
    st.dataframe(pd.DataFrame(rows, columns=columns), hide_index=True, height="content")


_widgets.page_setup("Layers")
run_id = _run()
layers, audits = queries.layer_frame(run_id, max_steps=MOST_STEPS), queries.audit_frame(run_id)
if layers.empty:
    st.info("This run has recorded no layer: a baseline has none, and others record at the first iterations.")
    st.stop()
names = queries.layer_names(run_id)
_figures(audits)
whole, decisions, single = st.tabs(["All layers", "Decisions", "One layer"])
with whole:
    _map(layers, audits, names)
with decisions:
    _events(queries.event_frame(run_id))
with single:
    _one(layers, audits, names)
