"""In what do these runs differ, and what did that do to accuracy, memory and time?"""

import pandas as pd
import streamlit as st

from comet_core.metrics import EvalMetrics, StepMetrics
from pages import _charts, _widgets
from pages._charts import SUMMARY, Curve
from storage import queries

Summary = dict[int, pd.Series]  # a run's figures by its id
TIMINGS = ("step_seconds", "wall_seconds")
NUM_OFFERED = 200


def _cell(value: object) -> str:
    return _charts.ABSENT if value is None else str(value) if value != "" else "(empty)"


def _differences() -> None:
    st.subheader("What differs", anchor=False)
    options = queries.config_differences(ids)
    if options.empty:
        st.caption("The runs have the same configuration.")
        return
    options = options.map(_cell).rename(columns=names)
    st.dataframe(options.rename_axis(index="Option"), height="content")


def _curves(summary: Summary) -> None:
    charted = {run_id: _charts.run_name(run_id, run["name"], 22) for run_id, run in summary.items()}
    steps = {run_id: queries.step_frame(run_id, STEP_COLUMNS) for run_id in ids}
    evals = {run_id: queries.eval_frame(run_id) for run_id in ids}
    on_gpu = any(frame["peak_allocated_bytes"].notna().any() for frame in steps.values())
    peaks = {i: _charts.peaks(steps[i], on_gpu, _widgets.measured(summary[i], "start_rss_bytes")) for i in ids}
    cards = [
        ("Training loss", steps, StepMetrics, "train_loss"),
        ("Test accuracy", evals, EvalMetrics, "test_accuracy"),
        ("Saved for backward, really held", steps, StepMetrics, "held_bytes"),
        ("Peak memory", {i: peak[0] for i, peak in peaks.items()}, StepMetrics, peaks[ids[0]][1]),
        ("Compression ratio, whole graph", steps, StepMetrics, "compression_ratio"),
        ("Compression ratio, convolution inputs", steps, StepMetrics, "conv_input_ratio"),
    ]
    places = [column for _ in range(3) for column in st.columns(2, gap="medium")]
    for place, (title, frames, metric, column) in zip(places, cards, strict=True):
        curves = [
            Curve(
                frame=frames[i], metric=metric, column=column, name=charted[i], markers=metric is EvalMetrics,
                label=peaks[i][2] if title == "Peak memory" else "",
                color=_charts.run_style(i)[0], dash=_charts.run_style(i)[1],
            )
            for i in ids if frames[i][column].notna().any() or frames[i]["nonfinite"].notna().any()
        ]  # fmt: skip
        with place:
            _widgets.chart(title, lambda drawn=curves: _charts.lines(drawn) if drawn else None, key=title)  # type: ignore[misc]


def _headline(summary: Summary, run_id: int) -> None:
    """Of two runs, what a person asks first: the figure of one and its difference to the baseline."""
    on_gpu = all(_widgets.measured(run, "peak_allocated_bytes") is not None for run in summary.values())
    shared = any(run["timings_shared"] for run in summary.values())
    figures = [
        ("max_held_bytes", "Held for backward"),
        ("peak_allocated_bytes", "Peak on the GPU") if on_gpu else ("peak_rss_above_start_bytes", "Peak above start"),
        ("last_test_accuracy", "Test accuracy"),
        ("step_seconds", "Step time"),
    ]
    for place, (column, label) in zip(st.columns(4), figures, strict=True):
        unit, more_is_better = SUMMARY[column][1:]
        value, other = (_widgets.measured(summary[i], column) for i in (run_id, baseline))
        absolute, percent = _difference(value, other, unit)
        known = value is not None and other is not None and not (column in TIMINGS and shared)
        place.metric(
            f"{label}, \\#{run_id}", _charts.number_text(value, unit), border=True, height="stretch",
            delta=(absolute if unit == "fraction" else percent).replace("−", "-") if known else None,
            delta_color="off" if value == other else "normal" if more_is_better else "inverse",
            delta_description=f"to #{baseline}" if known else "shared, not compared" if column in TIMINGS else None,
        )  # fmt: skip


def _row(summary: Summary, column: str) -> dict[str, str]:
    """A figure of every run as text, and how far each run is from the baseline."""
    label, unit, _ = SUMMARY[column]
    row = {"Figure": label}
    reference = _widgets.measured(summary[baseline], column)
    for run_id in ids:
        value = _widgets.measured(summary[run_id], column)
        shared = [i for i in (run_id, baseline) if column in TIMINGS and summary[i]["timings_shared"]]
        row[names[run_id]] = _charts.number_text(value, unit) + (" (shared)" if run_id in shared else "")
        if run_id != baseline:
            row[f"#{run_id} − #{baseline}"], row[f"#{run_id} in %"] = (
                ("not compared", "") if shared and value is not None else _difference(value, reference, unit)
            )
    return row


def _difference(value: float | None, reference: float | None, unit: str) -> tuple[str, str]:
    if value is None or reference is None:
        return _charts.ABSENT, _charts.ABSENT
    change = value - reference
    absolute = f"{100 * change:+.2f} points" if unit == "fraction" else _charts.number_text(change, unit)
    if unit != "fraction" and change > 0:
        absolute = f"+{absolute}"
    percent = f"{100 * change / reference:+.1f} %" if reference else _charts.ABSENT
    return absolute.replace("-", "−"), percent.replace("-", "−")


def _table(summary: Summary) -> None:
    st.subheader("Figures", anchor=False)
    known = [name for name in SUMMARY if any(_widgets.measured(run, name) is not None for run in summary.values())]
    st.dataframe(pd.DataFrame([_row(summary, name) for name in known]), hide_index=True, height="content")
    if any(run["timings_shared"] for run in summary.values()):
        st.caption(
            "Shared: other runs computed at the same time, so these times say nothing about the run and are not "
            "compared. Train with one slot for times that count."
        )


def _draw() -> None:
    frame = queries.summary_frame(ids)
    summary: Summary = {run["id"]: run for _, run in frame.iterrows()}
    if len(summary) < len(ids):
        st.rerun()  # one was deleted
    _differences()
    if len(ids) == 2:
        _headline(summary, next(i for i in ids if i != baseline))
    st.subheader("Curves", anchor=False)
    _curves(summary)
    _table(summary)
    if live and not frame["status"].isin(_widgets.WAITING).any():
        st.rerun()  # polling stops


STEP_COLUMNS = [
    "train_loss", "held_bytes", "peak_rss_bytes", "peak_allocated_bytes", "compression_ratio", "conv_input_ratio",
]  # fmt: skip

_widgets.page_setup("Compare")
asked = queries.summary_frame(_widgets.asked_runs(st.query_params.get("runs", "")))
offered = pd.concat([asked, queries.runs_frame(limit=NUM_OFFERED)]).drop_duplicates("id")
if len(offered) < 2:
    text = "Two runs make a comparison: launch one with its baseline twin."
    _widgets.empty("Nothing to compare yet", text, "new_run.py", "Set up a run with its twin")
names = {run["id"]: _charts.run_name(run["id"], run["name"]) for _, run in offered.iterrows()}
choice, reference = st.columns([3, 1], gap="medium")
ids: list[int] = choice.multiselect(
    "Runs", list(names), default=asked["id"].tolist(), format_func=names.__getitem__, placeholder="Choose two or more"
)
st.query_params["runs"] = ",".join(map(str, ids))
if len(ids) < 2:
    st.info("Choose two or more runs: their configurations, curves and figures stand side by side here.")
    st.stop()
chosen = queries.summary_frame(ids)
live = bool(chosen["status"].isin(_widgets.WAITING).any())
plain_runs = chosen.loc[chosen["policy"] == "baseline", "id"].tolist()
first = ids.index(plain_runs[0]) if plain_runs else 0
baseline = reference.selectbox("Differences to", ids, index=first, format_func=names.__getitem__)
_widgets.polling(_draw, live, charts=True)
