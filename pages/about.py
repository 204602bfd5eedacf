"""Which versions run here, and where does everything lie?"""

import os
import platform
from importlib.metadata import version
from urllib.parse import urlsplit

import pandas as pd
import streamlit as st

from comet_core import __version__
from comet_core.config import comet_home
from pages import _widgets
from storage import queries

LIBRARIES = ("torch", "torchvision", "numba", "zstandard", "streamlit", "plotly", "pandas", "SQLAlchemy")


def _database() -> str:
    """Where the database is, without user, password and options."""
    given = urlsplit(os.environ.get("COMET_DATABASE_URL", ""))
    if not given.scheme:
        return str(comet_home() / "comet.db")
    if given.scheme.startswith("sqlite"):
        return given.path.removeprefix("/")
    port = f":{given.port}" if given.port else ""
    return f"{given.scheme}://{given.hostname or ''}{port}{given.path}"


_widgets.page_setup("About")
st.markdown(
    "COMET Lab trains neural networks whose saved activations are compressed within error bounds, and shows in the "
    "browser what that saves and what it costs."
)
_widgets.figures(
    [
        ("COMET Lab", __version__, None),
        ("Runs", f"{queries.count_runs():,}", None),
        ("Slots", os.environ.get("COMET_SLOTS") or "1", "Runs that train at the same time; COMET_SLOTS sets it."),
        ("Processor cores", f"{os.cpu_count()}", None),
    ]
)
places, versions = st.columns(2, gap="medium")
with places:
    st.subheader("Places", anchor=False)
    st.caption("Database")
    st.code(_database(), language=None, wrap_lines=True)
    st.caption("Uploads, checkpoints and logs (COMET_HOME)")
    st.code(str(comet_home()), language=None, wrap_lines=True)
    _widgets.scheduler_notice()
    st.caption("Nothing leaves this machine: Streamlit's usage statistics are switched off.")
with versions:
    st.subheader("Versions", anchor=False)
    rows = {"Python": platform.python_version(), **{name: version(name) for name in LIBRARIES}}
    st.dataframe(pd.DataFrame(rows.items(), columns=["Software", "Version"]), hide_index=True)
