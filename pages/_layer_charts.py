"""Charts of the Layers page: heat map over layer and step, events on the same axis, one layer's curves, its error.

DataFrame in, Plotly figure out, as in _charts.py. Colours of the heat maps are told apart with any colour vision:
Cividis where more is more, blue over grey to orange where one is the middle.
"""

import math

import numpy as np
import pandas as pd
import plotly.graph_objects as go

from comet_core.metrics import AUDIT_BINS, LayerMetrics, axis_label
from pages._charts import COLORS, GREY, frame_it, log_ticks, middle_cut, plain

DIVERGING = [[0.0, "#2A87C8"], [0.5, "#DDDDDD"], [1.0, "#D55E00"]]
STEP = axis_label(LayerMetrics, "step")


def heat_map(
    cells: pd.DataFrame, layers: list[str], column: str, label: str, *, middle: bool = False, turns: bool = False
) -> go.Figure:
    """`column` of `cells` (columns step, name) over layer and step, colours by its logarithm.

    `middle`: 1 is grey. `turns`: the steps are a layer's first audit, its second and so on.
    """
    axis = "Audit of the layer" if turns else STEP
    positive = cells[cells[column] > 0]
    grid = positive.pivot_table(index="name", columns="step", values=column).reindex(index=layers)
    values = np.log10(grid.to_numpy(dtype=float))
    figure = go.Figure()
    low, high = (np.nanmin(values), np.nanmax(values)) if np.isfinite(values).any() else (-1.0, 1.0)
    if middle:
        high = max(abs(low), abs(high), math.log10(2))
        low = -high
    ticks = [tick for tick in log_ticks(positive[column]) if low <= math.log10(tick) <= high]
    scale = dict(tickvals=[math.log10(tick) for tick in ticks], ticktext=[f"{tick:g}" for tick in ticks], thickness=12)
    figure.add_heatmap(
        x=[f"{step:,}" for step in grid.columns], y=[plain(middle_cut(name)) for name in layers], z=values,
        customdata=grid.to_numpy(dtype=float), zmin=low, zmax=high, xgap=1, ygap=1,
        colorscale=DIVERGING if middle else "Cividis", colorbar=scale,
        hovertemplate=f"%{{y}}<br>{axis.lower()} %{{x}}: %{{customdata:.3~g}}<extra></extra>", hoverongaps=False,
    )  # fmt: skip
    frame_it(figure, max(280, 120 + 17 * len(layers)), label)
    figure.update_xaxes(title_text=axis, type="category")
    figure.update_yaxes(autorange="reversed", type="category", dtick=1)
    return figure


def events(found: pd.DataFrame) -> go.Figure:
    """Decisions over the step, a line a kind."""
    figure = go.Figure()
    for place, (kind, rows) in enumerate(found.groupby("kind", sort=False)):
        told = zip(rows["layer"], rows["message"], strict=True)
        texts = [plain(f"{layer or 'all layers'}: {text}") for layer, text in told]
        figure.add_scatter(
            x=rows["step"], y=[kind] * len(rows), mode="markers", name=str(kind), text=texts,
            marker=dict(color=COLORS[place % len(COLORS)], size=9, symbol="line-ns-open", line_width=2),
            hovertemplate="step %{x}<br>%{text}<extra></extra>",
        )  # fmt: skip
    frame_it(figure, 130 + 26 * found["kind"].nunique(), "Decisions of the controller")
    figure.update_xaxes(title_text=STEP)
    figure.update_layout(showlegend=False, hovermode="closest")
    return figure


def errors(layers: pd.DataFrame, audits: pd.DataFrame, name: str) -> go.Figure:
    """One layer's gradient error over the step: allowed, predicted, measured, and the noise that is there anyway."""
    figure = go.Figure()
    for place, (column, word, dash) in enumerate(
        (("gradient_noise", "sampling noise", "dot"), ("target_sigma", "allowed", "dash"),
         ("predicted_sigma", "predicted", "solid"))
    ):  # fmt: skip
        rows = layers[layers[column] > 0]
        color = (GREY, COLORS[4], COLORS[0])[place]
        figure.add_scatter(
            x=rows["step"], y=rows[column], mode="lines", name=word, line=dict(color=color, dash=dash, shape="hv")
        )
    rows = audits[audits["measured_sigma"] > 0]
    figure.add_scatter(
        x=rows["step"], y=rows["measured_sigma"], mode="markers", name="measured by audits",
        marker=dict(color=COLORS[1], size=7),
    )  # fmt: skip
    frame_it(figure, 340, f"Gradient error of {plain(middle_cut(name))} (standard deviation)")
    figure.update_xaxes(title_text=STEP)
    drawn = pd.concat([layers[name] for name in ("gradient_noise", "target_sigma", "predicted_sigma")])
    drawn = pd.concat([drawn, rows["measured_sigma"]])
    figure.update_yaxes(type="log", tickformat="~g", tickvals=log_ticks(drawn[drawn > 0]))
    figure.update_traces(hovertemplate="step %{x}: %{y:.3~g}<extra>%{fullData.name}</extra>")
    return figure


def histogram(audit: pd.Series) -> go.Figure | None:
    """The audit's error in its own standard deviations, beside a normal distribution; None where it was zero."""
    if not isinstance(audit["error_histogram"], str):
        return None
    counts = np.array([int(count) for count in audit["error_histogram"].split(",")])
    edges = np.linspace(-4, 4, AUDIT_BINS + 1)
    centres, width = (edges[1:] + edges[:-1]) / 2, edges[1] - edges[0]
    figure = go.Figure()
    figure.add_bar(
        x=centres, y=100 * counts / max(counts.sum(), 1), width=width, name="measured",
        marker=dict(color=COLORS[0], line_width=0), hovertemplate="%{x:.2~f}: %{y:.2~f} %<extra></extra>",
    )  # fmt: skip
    normal = 100 * width * np.exp(-(centres**2) / 2) / math.sqrt(2 * math.pi)
    figure.add_scatter(x=centres, y=normal, mode="lines", name="normal", line=dict(color=COLORS[1], shape="spline"))
    frame_it(figure, 340, f"Error of the gradient at step {audit['step']:,}")
    figure.update_xaxes(title_text="Error, in its standard deviations")
    figure.update_yaxes(title_text="Share of the elements (%)")
    figure.update_layout(bargap=0)
    return figure
