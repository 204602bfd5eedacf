"""DataFrame in, Plotly figure out: every chart of the lab, and how numbers are written. No Streamlit inside.

A run has one colour and one dash, made from its id, on every page. The colours are Okabe and Ito's, told apart with any
kind of colour vision; without black and yellow and with a lighter blue, so that all show on light and on dark ground.
Labels come from the metrics' own metadata. Plotly reads a small HTML in its texts: every name passes through `plain`.
A value that is not finite is a gap with a cross in it; one that was not measured is left out.
"""

import html
import math
from collections.abc import Sequence
from dataclasses import dataclass, fields

import numpy as np
import pandas as pd
import plotly.graph_objects as go

from comet_core.metrics import PEAK_PARTS, LayerMetrics, axis_label

COLORS = ("#2A87C8", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
DASHES = ("solid", "dash", "dot", "dashdot", "longdash", "longdashdot")
GREY = "#8796A5"
BYTE_UNITS = ("bytes", "KiB", "MiB", "GiB", "TiB")
ABSENT = "–"

# Figures of a whole run: column of the summary -> (label, unit, whether more is better)
SUMMARY = {
    "last_test_accuracy": ("Test accuracy at the end", "fraction", True),
    "best_test_accuracy": ("Best test accuracy", "fraction", True),
    "last_train_loss": ("Training loss at the end", "", False),
    "compression_ratio": ("Compression ratio, whole graph", "x", True),
    "conv_input_ratio": ("Compression ratio, convolution inputs", "x", True),
    "max_saved_bytes": ("Saved for backward, uncompressed", "bytes", False),
    "max_held_bytes": ("Saved for backward, really held", "bytes", False),
    "peak_rss_above_start_bytes": ("Peak resident memory above the start", "bytes", False),
    "peak_rss_bytes": ("Peak resident memory of the process", "bytes", False),
    "peak_allocated_bytes": ("Peak allocated on the GPU", "bytes", False),
    "step_seconds": ("Step time", "s", False),
    "wall_seconds": ("Time since the start", "s", False),
}

# The parts of a peak in words that fit below a bar, and which of them the hollow bar stands beside
PART_WORDS = dict(
    zip(PEAK_PARTS, ("parameters", "optimizer", "gradients", "batch", "held", "scratch", "other"), strict=True)
)
HELD = "peak_held_bytes"


@dataclass(frozen=True, kw_only=True)
class Curve:
    """One column of one frame over its steps, as it is drawn."""

    frame: pd.DataFrame
    metric: type
    column: str
    name: str
    color: str
    dash: str = "solid"
    markers: bool = False
    filled: bool = False
    opacity: float = 1.0
    label: str = ""  # instead of the column's own


def run_style(run_id: int) -> tuple[str, str]:
    """Colour and dash of a run, the same everywhere; 36 runs in a row differ in one or the other."""
    turn, color = divmod(run_id - 1, len(COLORS))
    return COLORS[color], DASHES[turn % len(DASHES)]


def plain(text: str) -> str:
    """The text as Plotly shows it letter for letter."""
    return html.escape(text, quote=False)


def middle_cut(text: str, length: int = 36) -> str:
    """Long names keep both ends: what differs often stands last."""
    half = (length - 1) // 2
    return text if len(text) <= length else f"{text[: length - 1 - half]}…{text[-half:]}"


def run_name(run_id: int, name: str, length: int = 36) -> str:
    return f"#{run_id} {middle_cut(name, length)}"


def scale(values: Sequence[float] | np.ndarray | pd.Series, unit: str) -> tuple[float, str]:
    """The factor and the unit that make numbers readable: bytes in KiB to TiB by the largest, fractions in percent."""
    if unit == "fraction":
        return 100.0, "%"
    if unit != "bytes":
        return 1.0, unit
    sizes = np.abs(np.asarray(values, dtype=float))
    largest = sizes[np.isfinite(sizes)].max(initial=0.0)
    power = min(len(BYTE_UNITS) - 1, int(math.log2(largest) // 10) if largest >= 1 else 0)
    return 1024.0**-power, BYTE_UNITS[power]


def number_text(value: float | None, unit: str = "") -> str:
    """A number as people read it: "61.3 %", "14.9x", "12.3 MiB", "2 min 5 s". None was not measured: a dash."""
    if value is None:
        return ABSENT
    if not math.isfinite(value):
        return "NaN" if math.isnan(value) else "∞" if value > 0 else "−∞"
    if unit == "s":
        return _time_text(value)
    factor, shown = scale([value], unit)
    scaled = value * factor
    if unit == "fraction":
        return f"{scaled:.2f} %"
    if unit == "x":
        return f"{scaled:.2f}x"
    if unit == "bytes":
        digits = 0 if shown == "bytes" or abs(scaled) >= 99.95 else 1 if abs(scaled) >= 9.995 else 2
        return f"{scaled:,.{digits}f} {shown}"
    text = f"{scaled:,.0f}" if float(scaled).is_integer() and abs(scaled) < 1e15 else f"{scaled:,.4g}"
    return f"{text} {shown}".rstrip()


def _time_text(seconds: float) -> str:
    if abs(seconds) < 0.9995:
        return f"{1000 * seconds:.3g} ms"
    if abs(seconds) < 59.95:
        return f"{seconds:.1f} s" if abs(seconds) < 9.95 else f"{seconds:.0f} s"
    minutes, rest = divmod(round(abs(float(seconds))), 60)
    hours, minutes = divmod(minutes, 60)
    sign = "−" if seconds < 0 else ""
    return f"{sign}{hours} h {minutes} min" if hours else f"{sign}{minutes} min {rest} s"


def peaks(steps: pd.DataFrame, on_gpu: bool, start_rss_bytes: float | None) -> tuple[pd.DataFrame, str, str]:
    """Peak memory as it is drawn: frame, column, label. Without a GPU what counts is what training added."""
    if on_gpu or start_rss_bytes is None:
        return steps, "peak_allocated_bytes" if on_gpu else "peak_rss_bytes", ""
    above = steps.assign(peak_rss_bytes=steps["peak_rss_bytes"] - start_rss_bytes)
    return above, "peak_rss_bytes", SUMMARY["peak_rss_above_start_bytes"][0]


def lines(curves: Sequence[Curve], height: int = 300) -> go.Figure:
    """Curves of one unit over the step. The title is the label of their columns, or what the labels have in common.

    Where curves were thinned, the corner says how many points are shown.
    """
    label, unit = _shared_label(curves)
    factor, shown = scale(np.concatenate([curve.frame[curve.column].to_numpy(float) for curve in curves]), unit)
    figure = go.Figure()
    for curve in curves:
        _add_curve(figure, curve, factor, shown)
    frame_it(figure, height + 18 * max(0, len(curves) - 2), f"{label} ({shown})" if shown else label)
    figure.update_xaxes(title_text=axis_label(curves[0].metric, "step"), rangemode="tozero")
    figure.update_yaxes(rangemode="tozero" if unit else "normal")
    figure.update_layout(hovermode="x unified", showlegend=len(curves) > 1)
    frames = {id(curve.frame): curve.frame for curve in curves}.values()
    _say_how_many(figure, sum(map(len, frames)), sum(frame.attrs.get("total", len(frame)) for frame in frames))
    return figure


def left_out(peaks: pd.DataFrame) -> pd.Series:
    """What a waterfall begins above: the process before training, without the parameters it had; 0 on a GPU."""
    before = peaks["start_rss_bytes"] - peaks["parameter_bytes"]
    return before.where(peaks["peak_allocated_bytes"].isna(), 0.0).fillna(0.0)


def waterfall(peaks: pd.DataFrame, height: int = 400) -> go.Figure:
    """How the parts of a peak add up to it: rows of `queries.peak_frame`, a colour a run, runs side by side.

    The hollow bar is what the held bytes stand for, uncompressed. Other may go down: memory that was used again.
    """
    before = left_out(peaks)
    tops = peaks["peak_allocated_bytes"].fillna(peaks["peak_rss_bytes"]) - before
    parts = peaks[list(PEAK_PARTS)].assign(other_bytes=peaks["other_bytes"] - before)
    bases = parts.cumsum(axis=1) - parts
    factor, unit = scale(pd.concat([tops, bases[HELD] + peaks["peak_saved_bytes"]]), "bytes")
    figure = go.Figure()
    words = [*PART_WORDS.values(), "peak"]
    hollow = peaks.index[peaks["peak_saved_bytes"] > peaks[HELD]]
    for place, run_id, name in zip(peaks.index, peaks["id"], peaks["name"], strict=True):
        color, _ = run_style(run_id)
        label = plain(run_name(run_id, name))
        sizes = [*parts.loc[place], tops[place]]
        if place in hollow:
            raw = peaks["peak_saved_bytes"][place]
            figure.add_bar(
                x=[PART_WORDS[HELD]], y=[raw * factor], base=[bases[HELD][place] * factor], offsetgroup=str(run_id),
                name="held, uncompressed", marker=dict(color="rgba(0,0,0,0)", line=dict(color=GREY, width=1.5)),
                hovertemplate=f"{label}<br>uncompressed: {number_text(raw, 'bytes')}<extra></extra>",
                legendrank=2000, showlegend=bool(place == hollow[0]),
            )  # fmt: skip
        figure.add_bar(
            x=words, y=[size * factor for size in sizes], base=[*(bases.loc[place] * factor), 0.0], name=label,
            offsetgroup=str(run_id), marker=dict(color=color, opacity=[*[1.0] * (len(words) - 2), 0.45, 1.0]),
            text=[_short(size * factor) for size in sizes], textposition="outside", cliponaxis=False,
            customdata=[number_text(size, "bytes") for size in sizes],
            hovertemplate="%{fullData.name}<br>%{x}: %{customdata}<extra></extra>",
        )  # fmt: skip
    on_gpu = peaks["peak_allocated_bytes"].notna().all()
    where = "Allocated on the GPU" if on_gpu else "Resident above libraries and data" if before.any() else "Resident"
    frame_it(figure, height, f"What the peak consists of ({unit})")
    figure.update_layout(barmode="group", bargap=0.25, showlegend=True)
    figure.update_xaxes(categoryorder="array", categoryarray=words)
    figure.update_yaxes(title_text=f"{where} ({unit})")
    return figure


def _short(value: float) -> str:
    """A number that fits above a bar; nothing where there is no bar."""
    return f"{value:.3g}" if abs(value) >= 1 else f"{value:.2f}" if value else ""


def bounds(layers: pd.DataFrame, height: int = 340) -> go.Figure:
    """Error bound of every layer over the step, on a log axis; colours run through the layers in their order."""
    bounded = layers[layers["error_bound"] > 0]
    figure = go.Figure()
    names = list(dict.fromkeys(bounded["name"]))
    for place, name in enumerate(names):
        rows = bounded[bounded["name"] == name]
        depth = place / max(1, len(names) - 1)
        figure.add_scatter(
            x=rows["step"], y=rows["error_bound"], mode="lines+markers", name=plain(middle_cut(name)),
            line=dict(color=_between(COLORS[0], COLORS[4], depth), width=1.5, shape="hv"), marker_size=4,
            )  # fmt: skip
    frame_it(figure, height, f"{axis_label(LayerMetrics, 'error_bound')} of each layer")
    figure.update_xaxes(title_text=axis_label(LayerMetrics, "step"))
    figure.update_yaxes(type="log", tickformat="~g", tickvals=log_ticks(bounded["error_bound"]))
    figure.update_layout(showlegend=False, hovermode="closest")
    figure.update_traces(hovertemplate="%{fullData.name}<br>step %{x}: bound %{y:.3~g}<extra></extra>")
    return figure


def log_ticks(values: pd.Series) -> list[float]:
    """1, 2, 5 of every decade in sight; of more than three decades 1 alone."""
    if values.empty:
        return []
    low, high = math.floor(math.log10(values.min())), math.ceil(math.log10(values.max()))
    return [m * 10.0**power for power in range(low, high + 1) for m in ((1, 2, 5) if high - low <= 3 else (1,))]


def pareto(cost: Sequence[float] | pd.Series, value: Sequence[float] | pd.Series) -> np.ndarray:
    """Which points no other one beats: less or equal cost and more or equal value, one of the two strictly."""
    costs, values = np.asarray(cost, dtype=float), np.asarray(value, dtype=float)
    as_good = (costs[None] <= costs[:, None]) & (values[None] >= values[:, None])
    better = (costs[None] < costs[:, None]) | (values[None] > values[:, None])
    return ~(as_good & better).any(axis=1) & np.isfinite(costs) & np.isfinite(values)


def on_front(runs: pd.DataFrame, x: str, y: str) -> np.ndarray:
    """Which runs no other one beats in two figures of the summary; more is better in `y`."""
    return pareto(-runs[x] if SUMMARY[x][2] else runs[x], runs[y])


def trade_offs(runs: pd.DataFrame, x: str, y: str, height: int = 500) -> go.Figure:
    """Runs as points of two figures of the summary, the Pareto front marked; `customdata` of a point is its run id."""
    figure = go.Figure()
    runs = runs[np.isfinite(runs[x]) & np.isfinite(runs[y])]
    (x_label, x_unit, _), (y_label, y_unit, _) = SUMMARY[x], SUMMARY[y]
    (x_factor, x_shown), (y_factor, y_shown) = scale(runs[x], x_unit), scale(runs[y], y_unit)
    best = on_front(runs, x, y)
    front = runs[best].sort_values([x, y])
    figure.add_scatter(
        x=front[x] * x_factor, y=front[y] * y_factor, mode="lines", name="Pareto front",
        line=dict(color=GREY, width=2, dash="dot"), hoverinfo="skip",
    )  # fmt: skip
    symbols = {policy: "square" if policy == "baseline" else "circle" for policy in runs["policy"]}
    for policy, symbol in symbols.items():
        figure.add_scatter(
            x=[None], y=[None], mode="markers", name=plain(policy), marker=dict(color=GREY, symbol=symbol, size=12)
        )
    colors = [run_style(run_id)[0] for run_id in runs["id"]]
    names = [plain(run_name(run_id, name)) for run_id, name in zip(runs["id"], runs["name"], strict=True)]
    facts = [
        f"{name}<br>{x_label}: {number_text(cost, x_unit)}<br>{y_label}: {number_text(value, y_unit)}"
        for name, cost, value in zip(names, runs[x], runs[y], strict=True)
    ]
    figure.add_scatter(
        x=runs[x] * x_factor, y=runs[y] * y_factor, customdata=runs["id"].tolist(), mode="markers+text",
        text=[f"#{run_id}" if on_front else "" for run_id, on_front in zip(runs["id"], best, strict=True)],
        textposition="top center", hovertext=facts, hovertemplate="%{hovertext}<extra></extra>", showlegend=False,
        marker=dict(
            color=colors, symbol=[symbols[policy] for policy in runs["policy"]], size=[15 if on else 11 for on in best],
            opacity=[1.0 if on else 0.55 for on in best],
            line=dict(color=GREY, width=[2.5 if on else 0 for on in best]),
        ),
    )  # fmt: skip
    frame_it(figure, height, f"{y_label} against {x_label[0].lower()}{x_label[1:]}")
    figure.update_xaxes(title_text=f"{x_label} ({x_shown})", rangemode="tozero")
    figure.update_yaxes(title_text=f"{y_label} ({y_shown})")
    figure.update_layout(hovermode="closest", clickmode="event+select", dragmode="zoom")
    return figure


def _shared_label(curves: Sequence[Curve]) -> tuple[str, str]:
    """Label and unit: "Saved for backward, uncompressed" and "Saved for backward, really held" share their head."""
    facts = [next(entry.metadata for entry in fields(c.metric) if entry.name == c.column) for c in curves]
    texts = list(dict.fromkeys(c.label or fact["label"] for c, fact in zip(curves, facts, strict=True)))
    heads = list(dict.fromkeys(text.partition(",")[0] for text in texts))
    if len(texts) == 1 or len(heads) == 1:
        return (texts if len(texts) == 1 else heads)[0], facts[0]["unit"]
    return texts[0].rpartition(" ")[2].capitalize(), facts[0]["unit"]


def _add_curve(figure: go.Figure, curve: Curve, factor: float, unit: str) -> None:
    values = curve.frame[curve.column].to_numpy(float)
    finite = np.isfinite(values)
    odd = np.isinf(values)
    if "nonfinite" in curve.frame:
        named = curve.frame["nonfinite"].astype("object").fillna("").astype(str).str.split()
        odd |= ~finite & named.map(lambda entries: any(entry.startswith(f"{curve.column}=") for entry in entries))
    shown = curve.frame.loc[finite | odd, "step"]
    heights = pd.Series(np.where(finite, values * factor, np.nan), index=curve.frame.index)
    name = plain(curve.name)
    figure.add_scatter(
        x=shown, y=heights.loc[shown.index], mode="lines+markers" if curve.markers else "lines", name=name,
        connectgaps=False, opacity=curve.opacity, line=dict(color=curve.color, dash=curve.dash, width=2.5),
        fill="tozeroy" if curve.filled else None, fillcolor=_faded(curve.color), marker_size=7,
        hovertemplate=f"%{{y:.4~g}} {unit}".rstrip(),
    )  # fmt: skip
    if odd.any():
        figure.add_scatter(
            x=curve.frame.loc[odd, "step"], y=heights.ffill().bfill().fillna(0.0)[odd], mode="markers", name=name,
            marker=dict(color=curve.color, symbol="x-thin", size=9, line=dict(color=curve.color, width=2.5)),
            showlegend=False, customdata=[number_text(value) for value in values[odd]], hovertemplate="%{customdata}",
        )  # fmt: skip


def frame_it(figure: go.Figure, height: int, title: str) -> None:
    """What every chart has around it: title, margins, legend above, quiet grid."""
    figure.update_layout(
        height=height, margin=dict(l=4, r=12, t=64, b=4), uirevision="keep", hoverlabel_namelength=-1,
        title=dict(text=title, x=0, xref="container", y=1, yref="container", yanchor="top", font_size=15),
        legend=dict(orientation="h", x=0, y=1.02, xanchor="left", yanchor="bottom", title_text=""),
    )  # fmt: skip
    figure.update_xaxes(showgrid=False, automargin=True)
    figure.update_yaxes(automargin=True)


def _say_how_many(figure: go.Figure, shown: int, total: int) -> None:
    if shown < total:
        figure.add_annotation(
            text=f"showing {shown:,} of {total:,} points", xref="paper", yref="paper", x=1, y=1.02, xanchor="right",
            yanchor="bottom", showarrow=False, font=dict(size=11, color=GREY),
        )  # fmt: skip


def _rgb(color: str) -> tuple[int, int, int]:
    return int(color[1:3], 16), int(color[3:5], 16), int(color[5:7], 16)


def _faded(color: str) -> str:
    return f"rgba({', '.join(map(str, _rgb(color)))}, 0.15)"


def _between(start: str, end: str, share: float) -> str:
    mixed = (round(a + (b - a) * share) for a, b in zip(_rgb(start), _rgb(end), strict=True))
    return f"rgb({', '.join(map(str, mixed))})"
