"""What is the lab doing, what came out last, and how do I start?"""

import pandas as pd
import streamlit as st

from pages import _charts, _widgets
from storage import queries

ENDED = ("finished", "failed", "lost", "stopped")
# Figure of the summary -> its unit, and how two runs say it
SENTENCES = {
    "max_held_bytes": ("bytes", "kept **{}** for backward where its twin kept {}"),
    "peak_rss_above_start_bytes": ("bytes", "peaked **{}** above its start, the twin {}"),
    "last_test_accuracy": ("fraction", "reached **{}** on the test images, the twin {}"),
}


def _draw() -> None:
    counts = queries.live_counts()
    ended = queries.runs_frame(status=ENDED, limit=50)
    trains = counts["starting"] + counts["running"] + counts["stopping"]
    _widgets.figures(
        [
            ("Training now", f"{trains}", None),
            ("Waiting", f"{counts['queued']}", "Queued runs; they start as slots become free."),
            ("Finished", f"{queries.count_runs(status=('finished',)):,}", None),
            ("Failed or lost", f"{queries.count_runs(status=('failed', 'lost')):,}", "Lost: the process vanished."),
        ]
    )
    _last_twins(ended[ended["status"] == "finished"])
    now, last = st.columns(2, gap="medium")
    with now:
        st.subheader("Now", anchor=False)
        _now()
    with last:
        st.subheader("Ended last", anchor=False)
        _ended(ended.head(6))
    if live and not sum(counts.values()):
        st.rerun()  # polling stops


def _last_twins(finished: pd.DataFrame) -> None:
    """What compression did in the last pair of twins that both finished."""
    rows = {run["id"]: run for _, run in finished.iterrows()}
    pairs = ((run, rows.get(run["twin_id"])) for run in rows.values() if run["policy"] != "baseline")
    run, twin = next(((run, twin) for run, twin in pairs if twin is not None), (None, None))
    if run is None or twin is None:
        return
    parts = []
    for column, (unit, text) in SENTENCES.items():
        mine, other = _widgets.measured(run, column), _widgets.measured(twin, column)
        if mine is not None and other is not None:
            change = 100 * (mine - other) / other if unit == "bytes" and other else None
            more = "" if change is None else f" ({abs(change):.0f} % {'less' if change < 0 else 'more'})"
            parts.append(text.format(_charts.number_text(mine, unit), _charts.number_text(other, unit)) + more)
    with st.container(border=True):
        st.markdown("##### What compression did last", anchors=False)
        st.markdown(f"{_widgets.run_label(run['id'], run['name'])} {'; it '.join(parts) or 'finished like its twin'}.")
        both = {"runs": f"{run['id']},{twin['id']}"}
        st.page_link("compare.py", label="Compare the two", icon=":material/arrow_forward:", query_params=both)


def _now() -> None:
    running = queries.runs_frame(status=_widgets.WAITING, limit=6)
    if running.empty:
        st.caption("Nothing trains and nothing waits.")
        return
    _widgets.scheduler_notice()
    for _, run in running.iterrows():
        with st.container(border=True):
            _row(run)
            _widgets.progress(run)


def _ended(ended: pd.DataFrame) -> None:
    if ended.empty:
        st.caption("Nothing has come to its end yet.")
        return
    with st.container(border=True, gap="xsmall"):
        for _, run in ended.iterrows():
            accuracy = _widgets.number(run, "last_test_accuracy", "fraction")
            _row(run, f"{accuracy}, {_widgets.moment(run['finished_at'])}")


def _row(run: pd.Series, text: str = "") -> None:
    name, status, rest = st.columns([5, 2, 3], vertical_alignment="center")
    label = _widgets.run_label(run["id"], run["name"])
    name.page_link("run_detail.py", label=label, query_params={"run": str(run["id"])})
    with status:
        _widgets.badge(run["status"])
    rest.caption(text)


_widgets.page_setup("COMET Lab")
with st.container(horizontal=True, vertical_alignment="center", horizontal_alignment="distribute"):
    st.markdown("Train with compressed activations; see what it saves and what it costs.", width="content")
    if st.button("New run", type="primary", icon=":material/rocket_launch:"):
        st.switch_page("new_run.py")
if not queries.count_runs():
    _widgets.empty(
        "No runs yet",
        "A first run trains a small network on handwritten digits twice, with and without compressed activations. "
        "It takes a minute or two and needs no network.",
        "new_run.py",
        "Set up a first run",
        {"preset": "quick"},
    )
live = sum(queries.live_counts().values()) > 0
_widgets.polling(_draw, live)
