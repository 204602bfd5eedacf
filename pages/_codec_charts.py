"""Charts of the codec lab: rows of `bench codec` in, Plotly figure out. No Streamlit inside.

A codec has one colour in all of them. Exact results have no error, and a log axis no zero: they are left out where
errors are drawn.
"""

from collections.abc import Iterable
from typing import Any

import numpy as np
import pandas as pd
import plotly.graph_objects as go

from pages import _charts
from pages._charts import COLORS, GREY, plain

ENTROPIES = {"order0_bits": ("entropy of the codes", "dot"), "context_bits": ("entropy given the neighbours", "dash")}


def colors(codecs: Iterable[str]) -> dict[str, str]:
    """Codec -> colour, in the order in which they come."""
    return {codec: COLORS[place % len(COLORS)] for place, codec in enumerate(dict.fromkeys(codecs))}


def bits_over_bound(results: pd.DataFrame, bounds: pd.DataFrame, axis: str, height: int = 380) -> go.Figure:
    """Bits a value of each codec at each bound; codecs without a bound are level lines; the entropies lie below."""
    figure = go.Figure()
    ends = [bounds["bound"].min(), bounds["bound"].max()]
    for codec, color in colors(results["codec"]).items():
        rows = results[results["codec"] == codec].sort_values("bound")
        bounded = rows["bound"].notna().all()
        figure.add_scatter(
            x=rows["bound"] if bounded else ends,
            y=rows["bits_per_value"] if bounded else [*rows["bits_per_value"]] * 2,
            mode="lines+markers" if bounded else "lines", name=plain(codec), marker_size=8,
            line=dict(color=color, width=2.5 if bounded else 1.5, dash="solid" if bounded else "longdash"),
            hovertemplate="%{y:.3~f} bits",
        )  # fmt: skip
    for column, (name, dash) in ENTROPIES.items():
        known = bounds[bounds[column].notna()]
        if not known.empty:
            figure.add_scatter(
                x=known["bound"], y=known[column], mode="lines+markers", name=name, marker_size=5,
                line=dict(color=GREY, width=2, dash=dash), hovertemplate="%{y:.3~f} bits",
            )  # fmt: skip
    _frame_it(figure, height + 18 * max(0, len(figure.data) - 2), "Bits a value")
    figure.update_xaxes(title_text=axis, type="log", tickvals=sorted(bounds["bound"]), tickformat="~g")
    figure.update_yaxes(type="log", tickvals=_charts.log_ticks(results["bits_per_value"]), tickformat="~g")
    figure.update_layout(hovermode="x unified")
    return figure


def rate_distortion(results: pd.DataFrame, height: int = 400) -> go.Figure:
    """Error over bits a value: a line for a codec with bounds, a point for one without."""
    figure = go.Figure()
    for codec, color in colors(results["codec"]).items():
        rows = results[(results["codec"] == codec) & (results["relative_rms_error"] > 0)].sort_values("bound")
        if rows.empty:
            continue
        names = ["no bound" if pd.isna(bound) else f"bound {bound:g}" for bound in rows["bound"]]
        figure.add_scatter(
            x=rows["bits_per_value"], y=rows["relative_rms_error"], mode="lines+markers", name=plain(codec),
            line=dict(color=color, width=2.5), marker_size=9, customdata=names,
            hovertemplate="%{fullData.name}, %{customdata}<br>%{x:.3~f} bits, error %{y:.3~g}<extra></extra>",
        )  # fmt: skip
    _frame_it(figure, height, "Error over bits a value")
    figure.update_xaxes(title_text="Bits a value", rangemode="tozero")
    drawn = results.loc[results["relative_rms_error"] > 0, "relative_rms_error"]
    figure.update_yaxes(title_text="RMS error / RMS of the values", type="log", tickformat="~g")
    figure.update_yaxes(tickvals=_charts.log_ticks(drawn))
    figure.update_layout(hovermode="closest")
    return figure


def error_histogram(row: dict[str, Any], color: str, height: int = 400) -> go.Figure:
    """Share of the values over their error; `row` is one that has a histogram."""
    counts, unit = row["histogram"], row["histogram_unit"]
    edges = np.linspace(-1, 1, len(counts) + 1) * (unit or 1.0)
    figure = go.Figure()
    figure.add_bar(
        x=(edges[1:] + edges[:-1]) / 2, y=np.asarray(counts) / sum(counts) * 100, width=edges[1] - edges[0],
        marker=dict(color=color, line_width=0), hovertemplate="error %{x:.3~g}: %{y:.2~f} %<extra></extra>",
    )  # fmt: skip
    _frame_it(figure, height, f"Errors of {plain(row['codec'])}")
    figure.update_xaxes(title_text="Error" if unit else "Error, as a share of the bound")
    figure.update_yaxes(title_text="Share of the values (%)")
    figure.update_layout(bargap=0)
    return figure


def throughput(results: pd.DataFrame, height: int = 320) -> go.Figure:
    """Encoding and decoding speed of each codec, in gigabytes of original values a second."""
    figure = go.Figure()
    chosen = colors(results["codec"])
    names = [plain(_charts.middle_cut(codec, 24)) for codec in results["codec"]]
    for verb, opacity in (("encode", 1.0), ("decode", 0.55)):
        speeds = results[f"{verb}_gb_per_s"]
        figure.add_bar(
            y=names, x=speeds, orientation="h", name=verb, opacity=opacity,
            marker_color=[chosen[codec] for codec in results["codec"]], text=speeds.map("{:.2f}".format),
            textposition="outside", textfont_size=11, cliponaxis=False,
            hovertemplate=f"{verb} %{{x:.3~g}} GB/s<extra></extra>",
        )  # fmt: skip
    _frame_it(figure, max(height, 90 + 46 * len(names)), "Throughput: encode, then decode")
    figure.update_xaxes(title_text="GB/s of original values")
    figure.update_yaxes(autorange="reversed")
    figure.update_layout(barmode="group", bargap=0.25)
    return figure


def _frame_it(figure: go.Figure, height: int, title: str) -> None:
    """As all charts, but with the names below: codecs and entropies are many, and a phone needs a line for each."""
    _charts.frame_it(figure, height, title)
    shown = sum(trace.type == "scatter" for trace in figure.data) > 1
    figure.update_layout(showlegend=shown, margin_t=40, legend=dict(y=-0.18, yanchor="top", yref="paper"))
