"""How is this run doing, what does it save, and what went wrong?"""

from typing import Any

import pandas as pd
import streamlit as st

from comet_core.config import FIELDS
from comet_core.metrics import EvalMetrics, LayerMetrics, StepMetrics, axis_label
from pages import _charts, _widgets
from pages._charts import Curve
from storage import queries, runs

LAYER_COLUMNS = ("operator", "error_bound", "saved_bytes", "held_bytes", "compression_ratio", "bits_per_value")
RATIO_HELP = {
    "graph": "Uncompressed by really held bytes of all saved tensors, in the last epoch.",
    "conv": "Uncompressed by really held bytes of convolution inputs alone, in the last epoch.",
}
SPREAD = " (standard deviation)"
SIGMAS = ("predicted_sigma", "measured_sigma", "target_sigma")


def _draw() -> None:
    run = queries.run(run_id)
    if run is None:
        st.rerun()
    _head(run)
    if run["error"]:
        st.error(_widgets.plain(run["error"]), icon=":material/error:")
    waits = run["status"] in _widgets.WAITING
    if waits:
        _widgets.scheduler_notice()
        _widgets.progress(run)
    _figures(run)
    _curves(run)
    _details(run)
    if waits != live:
        st.rerun()  # it came to its end: polling stops


def _head(run: dict[str, Any]) -> None:
    with st.container(horizontal=True, vertical_alignment="center"):
        _widgets.badge(run["status"])
        facts = " · ".join(run[name] for name in ("model", "dataset", "policy"))
        st.caption(_widgets.plain(facts), width="content")
        st.caption(f"created {_widgets.moment(run['created_at'])}", width="content")
        if run["twin_id"]:
            both = {"runs": ",".join(map(str, sorted((run_id, run["twin_id"]))))}
            st.page_link("compare.py", label=f"Compare with twin #{run['twin_id']}", query_params=both)
        if run["status"] in ("queued", "starting", "running") and st.button("Stop", icon=":material/stop:"):
            try:
                runs.request_stop(run_id)
                st.rerun()
            except runs.RunStateError as error:
                st.error(_widgets.plain(error))


def _figures(run: dict[str, Any]) -> None:
    on_gpu = _widgets.measured(run, "peak_allocated_bytes") is not None
    peak = "peak_allocated_bytes" if on_gpu else "peak_rss_above_start_bytes"
    best = _widgets.number(run, "best_test_accuracy", "fraction")
    shared = "Other runs computed at the same time." if run["timings_shared"] else None
    _widgets.figures(
        [
            ("Training loss", _widgets.number(run, "last_train_loss"), "Of the last step."),
            ("Test accuracy", _widgets.number(run, "last_test_accuracy", "fraction"), f"Best so far: {best}."),
            (
                "Graph ratio",
                _widgets.number(run, "compression_ratio", "x"),
                RATIO_HELP["graph"],
            ),
            (
                "Conv ratio",
                _widgets.number(run, "conv_input_ratio", "x"),
                RATIO_HELP["conv"],
            ),
            ("Peak on GPU" if on_gpu else "Peak above start", _widgets.number(run, peak, "bytes"), None),
            ("Step time, shared" if shared else "Step time", _widgets.number(run, "step_seconds", "s"), shared),
        ]
    )


def _curves(run: dict[str, Any]) -> None:
    steps, evals = queries.step_frame(run_id), queries.eval_frame(run_id)
    color, dash = _charts.run_style(run_id)
    grey: dict[str, Any] = dict(color=_charts.GREY, dash="dot")
    own: dict[str, Any] = dict(color=color, dash=dash)

    def curve(column: str, name: str, style: dict[str, Any], **options: Any) -> Curve:
        return Curve(frame=steps, metric=StepMetrics, column=column, name=name, **style, **options)

    def tested(column: str) -> Curve:
        return Curve(
            frame=evals, metric=EvalMetrics, column=column, name="test", markers=True, color=color, dash="solid"
        )

    held = [curve("saved_bytes", "uncompressed", grey), curve("held_bytes", "really held", own, filled=True)]
    _draw_card("Saved for backward", held, 340)
    left, right = st.columns(2, gap="medium")
    with left:
        _draw_card("Loss", [curve("train_loss", "training", own, opacity=0.7), tested("test_loss")])
        ratios = [curve("compression_ratio", "whole graph", own), curve("conv_input_ratio", "convolution inputs", grey)]
        _draw_card("Compression ratio", ratios)
    with right:
        _draw_card("Accuracy", [curve("train_accuracy", "training", own, opacity=0.7), tested("test_accuracy")])
        on_gpu = bool(steps["peak_allocated_bytes"].notna().any())
        frame, column, label = _charts.peaks(steps, on_gpu, _widgets.measured(run, "start_rss_bytes"))
        peak = Curve(frame=frame, metric=StepMetrics, column=column, name="peak", label=label, **own)
        _draw_card("Peak memory", [peak])
    _peak_parts(run, measured=not steps.empty)


def _peak_parts(run: dict[str, Any], measured: bool) -> None:
    peaks = queries.peak_frame([run_id, *([run["twin_id"]] if run["twin_id"] else [])])
    if measured and run_id not in set(peaks["id"]):
        st.caption("An earlier version recorded this run; it did not measure what the peak of memory consists of.")
        return
    _widgets.chart("What the peak consists of", lambda: _charts.waterfall(peaks) if measured else None, key="parts")
    if measured:
        st.caption(_about_peak(peaks.iloc[0], _charts.left_out(peaks)[0]))


def _about_peak(peak: pd.Series, before: float) -> str:
    """Which step is drawn, what is not, and what the words below the bars mean."""
    text = f"Step {peak['step']:,.0f}, which had this run's largest peak; parts are those of its fullest moment. "
    if before:
        text += (
            f"Not drawn: {_charts.number_text(before, 'bytes')} that the process had before training without the "
            "parameters, for interpreter, libraries and images. "
        )
    text += (
        "Held is what is kept for backward, scratch what is decoded from it, other what operators and codecs work with "
        "and what the allocator keeps."
    )
    if pd.notna(peak["device_used_bytes"]):
        reserved, used = (
            _charts.number_text(peak[name], "bytes") for name in ("peak_reserved_bytes", "device_used_bytes")
        )
        text += f" PyTorch had reserved {reserved}; on the GPU all processes together used {used}."
    return text


def _draw_card(title: str, curves: list[Curve], height: int = 300) -> None:
    drawn = [curve for curve in curves if len(curve.frame)]
    _widgets.chart(title, lambda: _charts.lines(drawn, height=height) if drawn else None, key=title)


def _details(run: dict[str, Any]) -> None:
    layers, configuration, log = st.tabs(["Layers", "Configuration", "Log"])
    with layers:
        _layers()
    with configuration:
        options = [(_option_label(name), str(value)) for name, value in run["config"].items()]
        facts = [(name, str(value)) for name, value in run["environment"].items()]
        for column, title, rows in zip(st.columns(2), ("Options", "Environment"), (options, facts), strict=True):
            column.dataframe(pd.DataFrame(rows, columns=[title, "Value"], dtype=str), hide_index=True, height="content")
    with log:
        text = queries.log_tail(run_id)
        st.code(text or "Nothing was printed yet.", language=None, height=360)


def _layers() -> None:
    last = queries.layers_last(run_id)
    if last.empty:
        st.caption("No layer has been recorded: a baseline has none, and others record at the first iterations.")
        return
    history = queries.layer_frame(run_id)
    if (last["error_bound"] > 0).any():
        _widgets.chart("Error bounds", lambda: _charts.bounds(history), key="bounds")
    factor, unit = _charts.scale(last["saved_bytes"], "bytes")
    shown = last.assign(saved_bytes=last["saved_bytes"] * factor, held_bytes=last["held_bytes"] * factor)
    sigmas = [name for name in SIGMAS if last[name].notna().any()]
    labels = {name: _short_label(name).replace("(bytes)", f"({unit})") for name in (*LAYER_COLUMNS, *sigmas)}
    formats = dict.fromkeys(("saved_bytes", "held_bytes", "compression_ratio", "bits_per_value"), "%.2f")
    formats |= dict.fromkeys(("error_bound", *sigmas), "%.3g")
    columns: dict[str, Any] = {
        name: st.column_config.NumberColumn(label.removesuffix(SPREAD), format=formats[name], help=label)
        if name in formats
        else label
        for name, label in labels.items()
    }
    st.dataframe(
        shown[["name", *labels]],
        column_config={"name": "Layer", **columns},
        hide_index=True,
        height=520,
        placeholder="–",
    )


def _short_label(name: str) -> str:
    """Of "Saved for backward, really held (bytes)" what stands behind the comma: a table has little room."""
    return axis_label(LayerMetrics, name).rpartition(", ")[2].capitalize()


def _option_label(name: str) -> str:
    if name not in FIELDS:
        return name
    facts = FIELDS[name].metadata
    return f"{facts['label']} ({facts['unit']})" if facts["unit"] else facts["label"]


asked = _widgets.asked_runs(st.query_params.get("run", ""))
found = queries.run(asked[0]) if asked else None
_widgets.page_setup(f"#{found['id']} {_widgets.plain(_charts.middle_cut(found['name'], 60))}" if found else "Run")
if found is None:
    text = f"There is no run #{asked[0]}; it may have been deleted." if asked else "The address names no run (?run=1)."
    _widgets.empty("No such run", text, "runs.py", "Choose one from the list")
run_id = found["id"]
live = found["status"] in _widgets.WAITING
_widgets.polling(_draw, live, charts=True)
