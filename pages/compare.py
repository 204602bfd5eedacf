"""In what do these runs differ, and what did that do to accuracy, memory and time?"""

import pandas as pd
import streamlit as st

from comet_core.metrics import EvalMetrics, StepMetrics
from pages import _charts, _widgets
from pages._charts import SUMMARY, Curve
from storage import queries

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


def _curves() -> None:
    steps = {run_id: queries.step_frame(run_id, STEP_COLUMNS) for run_id in ids}
    evals = {run_id: queries.eval_frame(run_id) for run_id in ids}
    peak = next(
        (n for n in ("peak_allocated_bytes", "peak_rss_bytes") if any(f[n].notna().any() for f in steps.values())),
        "peak_rss_bytes",
    )
    cards = [
        ("Training loss", steps, StepMetrics, "train_loss"),
        ("Test accuracy", evals, EvalMetrics, "test_accuracy"),
        ("Saved for backward, really held", steps, StepMetrics, "held_bytes"),
        ("Peak memory", steps, StepMetrics, peak),
        ("Compression ratio, whole graph", steps, StepMetrics, "compression_ratio"),
        ("Compression ratio, convolution inputs", steps, StepMetrics, "conv_input_ratio"),
    ]
    places = [column for _ in range(3) for column in st.columns(2, gap="medium")]
    for place, (title, frames, metric, column) in zip(places, cards, strict=True):
        curves = [
            Curve(
                frame=frames[i], metric=metric, column=column, name=names[i], markers=metric is EvalMetrics,
                color=_charts.run_style(i)[0], dash=_charts.run_style(i)[1],
            )
            for i in ids if frames[i][column].notna().any() or frames[i]["nonfinite"].notna().any()
        ]  # fmt: skip
        with place:
            _widgets.chart(title, lambda drawn=curves: _charts.lines(drawn) if drawn else None, key=title)  # type: ignore[misc]


def _row(column: str, baseline: int) -> dict[str, str]:
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
    return absolute.replace("-", "−"), f"{100 * change / reference:+.1f} %".replace(
        "-", "−"
    ) if reference else _charts.ABSENT


def _table() -> None:
    st.subheader("Figures", anchor=False)
    plain_runs = [i for i in ids if summary[i]["policy"] == "baseline"]
    first = ids.index(plain_runs[0]) if plain_runs else 0
    baseline = st.selectbox("Differences to", ids, index=first, format_func=names.__getitem__, width=420)
    rows = [_row(column, baseline) for column in SUMMARY if frame[column].notna().any()]
    st.dataframe(pd.DataFrame(rows), hide_index=True, height="content")
    if frame["timings_shared"].any():
        st.caption(
            "Shared: other runs computed at the same time, so these times say nothing about the run and are not "
            "compared. Train with one slot for times that count."
        )


def _draw() -> None:
    _curves()
    if live and not (queries.runs_frame(run_ids=ids)["status"].isin(_widgets.WAITING)).any():
        st.rerun()


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
ids: list[int] = st.multiselect(
    "Runs", list(names), default=asked["id"].tolist(), format_func=names.__getitem__, placeholder="Choose two or more"
)
st.query_params["runs"] = ",".join(map(str, ids))
if len(ids) < 2:
    st.info("Choose two or more runs: their configurations, curves and figures stand side by side here.")
    st.stop()
frame = queries.summary_frame(ids)
summary = {run["id"]: run for _, run in frame.iterrows()}
live = bool(frame["status"].isin(_widgets.WAITING).any())
_differences()
st.subheader("Curves", anchor=False)
_widgets.polling(_draw, live)
_table()
