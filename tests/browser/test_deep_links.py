"""The first request that a fresh server gets is a deep link: the page comes inside its frame, whichever it is.

With a folder `pages/` beside the script that runs, Streamlit would answer with the page alone (DESIGN section 4).
"""

import pytest
from playwright.sync_api import Page, expect

from tests.browser.conftest import serve, settled

pytestmark = pytest.mark.browser

TITLES = {
    "": "COMET Lab",
    "new_run": "New run",
    "runs": "Runs",
    "run_detail": "Run",
    "compare": "Compare",
    "trade_offs": "Trade-offs",
    "layers": "Layers",
    "codec_lab": "Codec lab",
    "about": "About",
}


@pytest.mark.parametrize("path", TITLES)
def test_a_fresh_server_answers_a_deep_link_inside_the_frame(path, page: Page, tmp_path):
    with serve(tmp_path / "lab") as lab:
        page.goto(f"{lab.url}/{path}")
        expect(page.get_by_role("heading", level=1)).to_have_text(TITLES[path])
        expect(page.get_by_test_id("stSidebarNav").get_by_role("link", name="Trade-offs")).to_be_visible()
        settled(page)
        page.goto("about:blank")  # before the server goes
