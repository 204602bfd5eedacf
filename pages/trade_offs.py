"""How much accuracy does less memory cost?"""

import streamlit as st

from pages import _charts, _widgets
from storage import queries

COSTS = ("peak_rss_above_start_bytes", "peak_allocated_bytes", "max_held_bytes", "compression_ratio")

_widgets.page_setup("Trade-offs")
finished = queries.trade_off_frame()
if finished.empty:
    text = "Every finished run is a point here: its test accuracy against the memory it took."
    _widgets.empty("No finished run yet", text, "new_run.py", "Set up a run with its twin")

places = st.columns([1, 1, 3], vertical_alignment="bottom")
latest = finished.iloc[-1]
datasets = sorted(set(finished["dataset"]))
dataset = places[0].selectbox("Data set", datasets, index=datasets.index(latest["dataset"]))
models = sorted(set(finished.loc[finished["dataset"] == dataset, "model"]))
model = places[1].selectbox("Network", models, index=None, placeholder="Any")
chosen = finished[(finished["dataset"] == dataset) & (finished["model"].isin([model] if model else models))]
costs = [name for name in COSTS if chosen[name].notna().any()]
if not costs or chosen["last_test_accuracy"].isna().all():
    st.info("None of these runs measured both accuracy and memory.")
    st.stop()
cost = places[2].segmented_control(
    "Memory as", costs, default=costs[0], required=True, format_func=lambda name: _charts.SUMMARY[name][0]
)
picked = _widgets.chart(
    "Accuracy against memory", lambda: _charts.trade_offs(chosen, cost), key="trade_offs", on_select="rerun",
    selection_mode="points",
)  # fmt: skip
st.caption(
    "Click a point to open its run. The dotted line joins the runs that no other one beats in both figures; the rest "
    "are faded. Accuracies of different data sets do not compare, so the page shows one at a time."
)
if picked and picked["selection"]["points"]:
    st.switch_page("run_detail.py", query_params={"run": str(picked["selection"]["points"][0]["customdata"])})
