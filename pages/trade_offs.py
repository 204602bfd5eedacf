"""How much accuracy does less memory cost?"""

import pandas as pd
import streamlit as st

from pages import _charts, _widgets
from pages._charts import SUMMARY
from storage import queries

COSTS = {
    "peak_rss_above_start_bytes": "Peak above start",
    "peak_allocated_bytes": "Peak on the GPU",
    "max_held_bytes": "Held for backward",
    "compression_ratio": "Compression ratio",
}
VALUE = "last_test_accuracy"


def _table() -> None:
    """The same points as text, the best accuracy first."""
    rows = [
        {
            "Run": f"run_detail?run={run['id']}",
            "Name": run["name"],
            "Policy": run["policy"],
            SUMMARY[VALUE][0]: _widgets.number(run, VALUE, "fraction"),
            SUMMARY[cost][0]: _widgets.number(run, cost, SUMMARY[cost][1]),
            "On the front": on_front,
        }
        for (_, run), on_front in zip(points.iterrows(), _charts.on_front(points, cost, VALUE), strict=True)
    ]
    link = st.column_config.LinkColumn("Run", display_text=r"run=(\d+)", width=60, help="Opens in a new tab.")
    st.dataframe(pd.DataFrame(rows), hide_index=True, column_config={"Run": link}, height="content")


_widgets.page_setup("Trade-offs")
finished = queries.trade_off_frame()
if finished.empty:
    text = "Every finished run is a point here: its test accuracy against the memory it took."
    _widgets.empty("No finished run yet", text, "new_run.py", "Set up a run with its twin")

places = st.columns([1, 1, 3], vertical_alignment="bottom")
datasets = sorted(set(finished["dataset"]))
dataset = places[0].selectbox("Data set", datasets, index=datasets.index(finished.iloc[-1]["dataset"]))
models = sorted(set(finished.loc[finished["dataset"] == dataset, "model"]))
model = places[1].selectbox("Network", models, index=None, placeholder="Any")
chosen = finished[(finished["dataset"] == dataset) & (finished["model"].isin([model] if model else models))]
costs = [name for name in COSTS if (chosen[name].notna() & chosen[VALUE].notna()).any()]
if not costs:
    st.info("None of these runs measured both accuracy and memory.")
    st.stop()
cost = places[2].segmented_control(
    "Memory as",
    costs,
    default=costs[0],
    required=True,
    format_func=COSTS.__getitem__,
    key="memory",
    bind="query-params",
)
points = chosen[chosen[cost].notna() & chosen[VALUE].notna()].sort_values(VALUE, ascending=False)
picked = _widgets.chart(
    "Accuracy against memory", lambda: _charts.trade_offs(points, cost, VALUE), key="points", on_select="rerun",
    selection_mode="points",
)  # fmt: skip
st.caption(
    "Click a point to open its run. The dotted line joins the runs that no other one beats in both figures; the rest "
    "are faded. Accuracies of different data sets do not compare, so the page shows one at a time."
)
_table()
if picked and picked["selection"]["points"]:
    st.switch_page("run_detail.py", query_params={"run": str(picked["selection"]["points"][0]["customdata"])})
