"""Frame of the app: which pages there are, under which address, and what stands around each of them.

Home is the default page and answers at `/` only. A page runs only from here: `_widgets.page_setup` refuses otherwise.
"""

from pathlib import Path

import streamlit as st

from pages import _widgets

HERE = Path(__file__).parent
# Less empty space around the page than Streamlit's own, and figures that fit six in a row.
STYLE = """<style>
[data-testid=stMainBlockContainer] {padding: 3.5rem 2.5rem 2rem}
[data-testid=stMetricValue] {font-size: 1.7rem}
</style>"""

# Icons lie here: one named by ":material/...:" would be fetched from a server of Google.
st.set_page_config(page_title="COMET Lab", page_icon=str(HERE / "icon.svg"), layout="wide", initial_sidebar_state=230)
st.logo(str(HERE / "logo.svg"), icon_image=str(HERE / "icon.svg"), size="large")
st.html(STYLE)

PAGES = {
    "": [
        st.Page("home.py", title="Home", icon=":material/home:", default=True),
        st.Page("new_run.py", title="New run", icon=":material/rocket_launch:", url_path="new_run"),
    ],
    "Results": [
        st.Page("runs.py", title="Runs", icon=":material/list:", url_path="runs"),
        st.Page("run_detail.py", title="Run", url_path="run_detail", visibility="hidden"),
        st.Page("compare.py", title="Compare", icon=":material/stacked_line_chart:", url_path="compare"),
        st.Page("trade_offs.py", title="Trade-offs", icon=":material/scatter_plot:", url_path="trade_offs"),
        st.Page("layers.py", title="Layers", icon=":material/layers:", url_path="layers"),
    ],
    "Lab": [
        st.Page("codec_lab.py", title="Codec lab", icon=":material/compress:", url_path="codec_lab"),
        st.Page("about.py", title="About", icon=":material/info:", url_path="about"),
    ],
}

page = st.navigation(PAGES)
_widgets.open_page()
page.run()
