"""The web entry: builds the Streamlit app and its navigation, nothing else.

    streamlit run app.py

`st.App` keeps Streamlit's old page discovery out of the way: with a script beside a folder named `pages/`, a fresh
server would answer a deep link by running that page alone, without the frame and its checks. The frame is
`pages/_shell.py`; it registers the pages that lie beside it.
"""

import streamlit as st

app = st.App("pages/_shell.py")
