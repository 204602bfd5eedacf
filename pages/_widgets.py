"""Shared inputs and formatting: how a page begins, how a run is named, how numbers and states look.

Names, notes and errors come from people and from the network: `plain` makes them text wherever Streamlit would read
Markdown. Tables and `st.text` show text as it is.
"""

import re
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

import pandas as pd
import plotly.graph_objects as go
import streamlit as st

from pages import _charts
from storage import queries

WAITING = ("queued", "starting", "running", "stopping")  # not at rest: a page about them polls
POLL_SECONDS = 2
BADGES = {
    "queued": (":material/schedule:", "gray"),
    "starting": (":material/hourglass_top:", "blue"),
    "running": (":material/play_arrow:", "blue"),
    "stopping": (":material/hourglass_bottom:", "orange"),
    "stopped": (":material/stop:", "gray"),
    "finished": (":material/check:", "green"),
    "failed": (":material/error:", "red"),
    "lost": (":material/link_off:", "red"),
}


def open_page() -> None:
    """Said by the frame right before it runs a page; holds for this one."""
    st.session_state["_opened_by_shell"] = True


def page_setup(title: str) -> None:
    """First call of every page: its title, and nothing at all where the frame did not run it."""
    if not st.session_state.pop("_opened_by_shell", False):
        st.error("This page opens inside the lab only: start it with `make run` and go to its front page.")
        st.stop()
    st.title(title, anchor=False)


def plain(text: object) -> str:
    """The text as Markdown shows it letter for letter: no markup, links, formulas, icons, colours, line breaks."""
    one_line = " ".join(str(text).split())
    apart = re.sub("(?<=[-<>=!~])(?=[->=])", "\u2060", one_line)  # else Streamlit makes an arrow of ->, a dash of --
    return re.sub(r"([!-/:-@\[-`{-~])", r"\\\1", apart)


def run_label(run_id: int, name: str) -> str:
    """A run in Markdown; long names lose their middle."""
    return plain(_charts.run_name(run_id, name, 30))


def number(row: Mapping[str, Any] | pd.Series, column: str, unit: str = "") -> str:
    """A figure of a run as text; of the two kinds of NaN, the measured one is written out."""
    return _charts.number_text(measured(row, column), unit)


def measured(row: Mapping[str, Any] | pd.Series, column: str) -> float | None:
    """A figure of a run, None where it was not measured."""
    value = row[column]
    if value is None or pd.isna(value):
        named = [entry.partition("=")[0] for entry in str(row.get("nonfinite") or "").split()]
        return float("nan") if column in named else None
    return float(value)


def moment(seconds: float | None) -> str:
    """A moment as people say it: "3 min ago", else date and time of the viewer's clock."""
    if seconds is None or pd.isna(seconds):
        return _charts.ABSENT
    ago = time.time() - seconds
    if ago < 60:
        return "just now"
    return f"{ago / 60:.0f} min ago" if ago < 3600 else f"{ago / 3600:.0f} h ago" if ago < 86400 else stamp(seconds)


def stamp(seconds: float) -> str:
    zone = st.context.timezone
    when = pd.Timestamp(seconds, unit="s", tz="UTC")
    return (when.tz_convert(zone) if zone else when).strftime("%Y-%m-%d %H:%M")


def badge(status: str) -> None:
    icon, color = BADGES[status]
    st.badge(status, icon=icon, color=color)  # type: ignore[arg-type]


def figures(entries: Sequence[tuple[str, str, str | None]]) -> None:
    """A row of figures: label, value, help."""
    for column, (label, value, text) in zip(st.columns(len(entries)), entries, strict=True):
        column.metric(label, value, help=text, border=True)


def chart(title: str, build: Callable[[], go.Figure | None], key: str, **options: Any) -> Any:
    """A figure in a card of its own. Nothing to draw yet, or an error while drawing, is said under `title` instead."""
    with st.container(border=True):
        try:
            figure = build()
        except Exception as error:
            st.error(f"{title} could not be drawn: {plain(f'{type(error).__name__}: {error}')}")
            return None
        if figure is None:
            st.markdown(f"**{title}**")
            st.caption("Nothing measured yet.")
            return None
        return st.plotly_chart(figure, key=key, config={"displaylogo": False}, alt=title, **options)


def polling(draw: Callable[[], None], live: bool, charts: bool = False) -> None:
    """Draw now, and again every two seconds while `live`; the rest of the page stays as it is.

    A chart that is drawn anew forgets how it was zoomed, so where there are `charts` people can stop that for a while.
    """
    text = "Charts are drawn anew every two seconds and lose their zoom; switch this off to look closer."
    follow = live and (not charts or st.toggle("Follow live", value=True, help=text))
    st.fragment(draw, run_every=POLL_SECONDS if follow else None)()


def progress(run: Mapping[str, Any] | pd.Series) -> None:
    """Where a run stands: a true share of its steps, and the time that is left at the pace so far."""
    total, done, seconds = (measured(run, name) for name in ("num_steps_total", "last_step", "wall_seconds"))
    if run["status"] == "queued":
        st.progress(0.0, "waits for a free slot")
    elif not total:
        st.progress(0.0, "starts: loading the engine and the images")
    elif not done:
        st.progress(0.0, f"first step of {total:,.0f}")
    else:
        left = _charts.number_text((seconds or 0.0) / done * (total - done), "s")
        rest = f"about {left} left" if done < total else "looking at the test images"
        epoch = measured(run, "last_epoch")
        st.progress(min(1.0, done / total), f"step {done:,.0f} of {total:,.0f}, epoch {epoch or 1:.0f}, {rest}")


def scheduler_notice() -> None:
    """Says so where runs wait and nothing will start them."""
    promise = queries.scheduler_promise()
    if promise is None or promise < time.time():
        st.warning(
            "No scheduler is at work, so queued runs do not start. `make run` starts one.", icon=":material/bedtime:"
        )


def empty(title: str, text: str, page: str, label: str, query: dict[str, str] | None = None) -> NoReturn:
    """A page without anything to show: what would stand here and what to do about it. Ends the page."""
    with st.container(border=True, horizontal_alignment="center", gap="medium"):
        st.space("small")
        st.subheader(title, anchor=False, text_alignment="center")
        st.markdown(text, text_alignment="center")
        if st.button(label, type="primary", icon=":material/arrow_forward:"):
            st.switch_page(page, query_params=query)
        st.space("small")
    st.stop()


def asked_runs(text: str) -> list[int]:
    """Run ids of an address ("1,2"), each once; what is no number is left out."""
    return list(dict.fromkeys(int(part) for part in text.split(",") if re.fullmatch("[0-9]{1,9}", part.strip())))
