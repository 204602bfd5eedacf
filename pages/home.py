"""What is the lab doing, what came out last, and how do I start?"""

import pandas as pd
import streamlit as st

from pages import _charts, _widgets
from storage import queries

ENDED = ("finished", "failed", "lost", "stopped")


def _less(mine: float | None, other: float | None) -> str:
    if mine is None or not other:
        return ""
    change = 100 * (mine - other) / other
    return f" ({abs(change):.0f} % {'less' if change < 0 else 'more'})"


def _twin_sentence(run: pd.Series, twin: pd.Series) -> str:
    """What compression saved and what it cost, of what both runs measured."""
    parts = []
    texts = {
        "max_held_bytes": ("bytes", "kept **{}** for backward where its twin kept {}"),
        "peak_rss_above_start_bytes": ("bytes", "peaked **{}** above its start, the twin {}"),
        "last_test_accuracy": ("fraction", "reached **{}** on the test images, the twin {}"),
    }
    for column, (unit, text) in texts.items():
        mine, other = _widgets.measured(run, column), _widgets.measured(twin, column)
        if mine is not None and other is not None:
            less = _less(mine, other) if unit == "bytes" else ""
            parts.append(text.format(_charts.number_text(mine, unit), _charts.number_text(other, unit)) + less)
    return f"{_widgets.run_label(run['id'], run['name'])} " + ("; it ".join(parts) or "has a finished twin") + "."


def _last_twins(finished: pd.DataFrame) -> tuple[pd.Series, pd.Series] | None:
    rows = {row["id"]: row for _, row in finished.iterrows()}
    for row in rows.values():
        if row["policy"] != "baseline" and not pd.isna(row["twin_id"]) and row["twin_id"] in rows:
            return row, rows[row["twin_id"]]
    return None


def _row(run: pd.Series, text: str) -> None:
    name, status, rest = st.columns([5, 2, 3] if text else [5, 2, 0.1], vertical_alignment="center")
    label = _widgets.run_label(run["id"], run["name"])
    name.page_link("run_detail.py", label=label, query_params={"run": str(run["id"])})
    with status:
        _widgets.badge(run["status"])
    rest.caption(text)


def _now() -> None:
    live = queries.runs_frame(status=_widgets.WAITING, limit=6)
    if live.empty:
        if was_live:
            st.rerun()  # something came to its end: the rest of the page has news, and polling stops
        st.caption("Nothing trains and nothing waits.")
        return
    _widgets.scheduler_notice()
    for _, run in live.iterrows():
        with st.container(border=True):
            _row(run, "")
            _widgets.progress(run)


_widgets.page_setup("COMET Lab")
with st.container(horizontal=True, vertical_alignment="center", horizontal_alignment="distribute"):
    st.markdown("Train with compressed activations; see what it saves and what it costs.", width="content")
    if st.button("New run", type="primary", icon=":material/rocket_launch:"):
        st.switch_page("new_run.py")

counts = queries.live_counts()
was_live = sum(counts.values()) > 0
ended = queries.runs_frame(status=ENDED, limit=50)
if not was_live and ended.empty:
    _widgets.empty(
        "No runs yet",
        "A first run trains a small network on handwritten digits twice, with and without compressed activations. "
        "It takes a minute or two and needs no network.",
        "new_run.py",
        "Set up a first run",
        {"preset": "quick"},
    )

trains = counts["starting"] + counts["running"] + counts["stopping"]
_widgets.figures(
    [
        ("Training now", f"{trains}", None),
        ("Waiting", f"{counts['queued']}", "Queued runs; they start as slots become free."),
        ("Finished", f"{queries.count_runs(status=('finished',)):,}", None),
        ("Failed or lost", f"{queries.count_runs(status=('failed', 'lost')):,}", "Lost: the process vanished."),
    ]
)

twins = _last_twins(ended[ended["status"] == "finished"])
if twins:
    run, twin = twins
    with st.container(border=True):
        st.markdown("##### What compression did last")
        st.markdown(_twin_sentence(run, twin))
        both = {"runs": f"{run['id']},{twin['id']}"}
        st.page_link("compare.py", label="Compare the two", icon=":material/arrow_forward:", query_params=both)

now, last = st.columns(2, gap="medium")
with now:
    st.subheader("Now", anchor=False)
    _widgets.polling(_now, was_live)
with last:
    st.subheader("Ended last", anchor=False)
    if ended.empty:
        st.caption("Nothing has come to its end yet.")
    else:
        with st.container(border=True, gap=None):
            for _, row in ended.head(6).iterrows():
                accuracy = _widgets.number(row, "last_test_accuracy", "fraction")
                _row(row, f"{accuracy}, {_widgets.moment(row['finished_at'])}")
