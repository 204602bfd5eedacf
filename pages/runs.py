"""Which runs are there, how do they stand, and which ones do I want to look at?"""

from collections.abc import Callable, Sequence
from typing import Any

import pandas as pd
import streamlit as st

from pages import _widgets
from storage import queries, runs

PAGE_SIZE = 50
COLUMNS: dict[str, Any] = {
    "link": st.column_config.LinkColumn("Run", display_text=r"run=(\d+)", width=60, help="Opens in a new tab."),
    "name": st.column_config.TextColumn("Name", width=210),
    "status": st.column_config.MultiselectColumn(
        "Status", options=list(_widgets.BADGES), color=[color for _, color in _widgets.BADGES.values()], width=95
    ),
    "progress": st.column_config.ProgressColumn("Progress", format="percent", min_value=0.0, max_value=1.0, width=90),
    "last_test_accuracy": st.column_config.NumberColumn("Accuracy", format="%.2f %%", help="On test images.", width=90),
    "compression_ratio": st.column_config.NumberColumn("Ratio", format="%.2fx", help="Of the whole graph.", width=80),
    "max_held_bytes": st.column_config.NumberColumn("Held", format="%.1f MiB", help="For backward, at most.", width=90),
    "peak_rss_above_start_bytes": st.column_config.NumberColumn(
        "Peak", format="%.0f MiB", help="Resident memory above the start.", width=90
    ),
    "step_seconds": st.column_config.NumberColumn("Step", format="%.3f s", width=80),
    "policy": st.column_config.TextColumn("Policy", width=90),
    "dataset": st.column_config.TextColumn("Data set", width=100),
    "model": st.column_config.TextColumn("Network", width=90),
    "timings_shared": st.column_config.CheckboxColumn("Shared", help="Step time beside other runs.", width=70),
    "created_at": st.column_config.DatetimeColumn("Created", format="YYYY-MM-DD HH:mm"),
}


def _table(found: pd.DataFrame) -> pd.DataFrame:
    shown = found.assign(
        link=[f"run_detail?run={run_id}" for run_id in found["id"]],
        status=pd.Series([[status] for status in found["status"]], index=found.index, dtype="object"),
        progress=(found["last_step"] / found["num_steps_total"]).clip(0, 1),
        last_test_accuracy=found["last_test_accuracy"] * 100,
        max_held_bytes=found["max_held_bytes"] / 2**20,
        peak_rss_above_start_bytes=found["peak_rss_above_start_bytes"] / 2**20,
        created_at=pd.to_datetime(found["created_at"], unit="s", utc=True),
    )
    return shown[list(COLUMNS)]


def _each(run_ids: Sequence[int], change: Callable[[int], object], done: str) -> None:
    """Do something to each of these runs; what was refused is said, the others are done."""
    count = 0
    for run_id in run_ids:
        try:
            change(run_id)
            count += 1
        except runs.RunStateError as error:
            st.toast(_widgets.plain(error), icon=":material/error:")
    if count:
        st.toast(f"{done} {count} {'run' if count == 1 else 'runs'}.", icon=":material/check:")
        st.rerun()


def _actions(chosen: pd.DataFrame) -> None:
    ids = chosen["id"].tolist()
    with st.container(horizontal=True, vertical_alignment="center"):
        if st.button("Open", icon=":material/monitoring:", disabled=len(ids) != 1, type="primary"):
            st.switch_page("run_detail.py", query_params={"run": str(ids[0])})
        if st.button("Compare", icon=":material/stacked_line_chart:", disabled=len(ids) < 2):
            st.switch_page("compare.py", query_params={"runs": ",".join(map(str, sorted(ids)))})
        stoppable = chosen.loc[chosen["status"].isin(["queued", "starting", "running"]), "id"].tolist()
        if st.button("Stop", icon=":material/stop:", disabled=not stoppable):
            _each(stoppable, runs.request_stop, "Stopping")
        with st.popover("Delete", icon=":material/delete:", disabled=not ids):
            st.markdown(f"Delete {', '.join(f'#{run_id}' for run_id in ids)} with all measurements and logs?")
            if st.button("Delete for good", type="primary"):
                _each(ids, runs.delete_run, "Deleted")
        st.caption(f"{len(ids)} chosen" if ids else "Tick rows to open, compare, stop or delete them.")


def _list() -> None:
    found = queries.runs_frame(**filters, limit=PAGE_SIZE, offset=PAGE_SIZE * (page - 1))
    ids = found["id"].tolist()
    bar = st.container()
    picked = st.dataframe(
        _table(found), column_config=COLUMNS, hide_index=True, height="content", on_select="rerun",
        selection_mode="multi-row", placeholder="–", key=f"table-{'-'.join(map(str, ids))}",
    )  # fmt: skip
    with bar:
        _actions(found.iloc[[row for row in picked["selection"]["rows"] if row < len(found)]])
    if live and not sum(queries.live_counts().values()):
        st.rerun()


_widgets.page_setup("Runs")
live = sum(queries.live_counts().values()) > 0
if not queries.count_runs():
    text = "Every run that is launched stands here, with what it measured."
    _widgets.empty("No runs yet", text, "new_run.py", "Set up a first run")

known = queries.filter_values()
places = st.columns([2, 2, 1, 1, 1])
search = places[0].text_input("Search", key="search", placeholder="name or number", bind="query-params")
status = places[1].multiselect("Status", known["status"], key="status", placeholder="Any", bind="query-params")
model, dataset, policy = (
    place.selectbox(label, known[name], index=None, key=name, placeholder="Any", bind="query-params")
    for place, name, label in zip(
        places[2:], ("model", "dataset", "policy"), ("Network", "Data set", "Policy"), strict=True
    )
)
filters: dict[str, Any] = dict(search=search, status=status)
filters |= dict(model=model or "", dataset=dataset or "", policy=policy or "")
total = queries.count_runs(**filters)
if not total:
    st.info("No run passes these filters. Clear one of them to see more.", icon=":material/filter_alt_off:")
    st.stop()
num_pages = -(-total // PAGE_SIZE)
page = 1
if num_pages > 1:
    st.session_state["page"] = min(st.session_state.get("page", 1), num_pages)
    page = int(st.number_input("Page", 1, num_pages, key="page", bind="query-params", width=140))
first = PAGE_SIZE * (page - 1) + 1
st.caption(f"showing {first:,} to {min(total, first + PAGE_SIZE - 1):,} of {total:,} runs")
if live:
    _widgets.scheduler_notice()
_widgets.polling(_list, live)
