"""The app in memory: `open_page` runs a page inside its frame and fails on any exception shown."""

from pathlib import Path

import pytest
import streamlit as st
from streamlit.testing.v1 import AppTest

from comet_core.config import RunConfig
from tests.pages import seeds

SHELL = Path(__file__).resolve().parents[2] / "pages" / "_shell.py"
HOSTILE = "<script>alert(1)</script> <b>x</b> $x$ :smile: **y**"


@pytest.fixture(autouse=True)
def _no_cache():
    st.cache_data.clear()


@pytest.fixture
def open_page():
    def opened(file: str, **query: str) -> AppTest:
        app = AppTest.from_file(str(SHELL), default_timeout=30)
        for name, value in query.items():
            app.query_params[name] = value
        app.switch_page(file).run()
        assert not app.exception, app.exception[0].message
        return app

    return opened


@pytest.fixture
def lab(comet_home) -> dict[str, int]:
    """Runs of every kind, by name."""
    nan, inf = float("nan"), float("inf")
    mine, twin = seeds.twins(RunConfig(name="mine"))
    return {
        "mine": mine,
        "twin": twin,
        "hostile": seeds.ended_run(RunConfig(name=HOSTILE), losses=[2.0] * 10 + [nan, inf, -inf] + [1.0] * 27),
        "zero": seeds.ended_run(RunConfig(name="zero", policy="baseline"), losses=[0.0] * 40),
        "failed": seeds.ended_run(RunConfig(name="failed"), end="failed"),
        "live": seeds.ended_run(RunConfig(name="live"), end="running"),
    }
