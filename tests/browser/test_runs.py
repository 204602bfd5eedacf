"""The list of runs by hand: filters that live in the address, rows that are ticked, compared and deleted."""

import re
from pathlib import Path

import pytest
from playwright.sync_api import Page, expect

from comet_core.config import RunConfig
from storage import queries
from tests.browser.conftest import picture, serve, settled
from tests.pages import seeds

pytestmark = pytest.mark.browser

ROW_HEIGHT = 35


def tick(page: Page, *rows: int) -> None:
    """Click the boxes of these rows, 1 is the first: the table is drawn on a canvas."""
    settled(page)
    for row in rows:
        page.get_by_test_id("stDataFrame").click(position={"x": 16, "y": ROW_HEIGHT * (row + 0.5)})
    expect(page.get_by_text(f"{len(rows)} chosen")).to_be_visible()
    settled(page)


def test_runs_are_filtered_ticked_compared_and_deleted(page: Page, comet_home: Path):
    mine, twin = seeds.twins(RunConfig(name="mine"))
    kept = seeds.ended_run(RunConfig(name="kept"))
    with serve(comet_home) as lab:
        page.goto(f"{lab.url}/runs")
        search = page.get_by_role("textbox", name="Search")
        search.fill("mine")
        search.press("Enter")
        expect(page).to_have_url(re.compile("search=mine"))
        page.reload()
        expect(page.get_by_text("showing 1 to 2 of 2 runs")).to_be_visible()
        tick(page, 1, 2)
        picture(page, "runs_ticked")
        page.get_by_role("button", name="Compare").click()
        expect(page).to_have_url(re.compile(rf"compare\?.*runs={mine}(,|%2C){twin}"))
        page.goto(f"{lab.url}/runs")
        tick(page, 2, 3)
        page.get_by_role("button", name="Delete").click()
        expect(page.get_by_text(f"Delete #{twin}, #{mine} with all measurements and logs?")).to_be_visible()
        page.get_by_role("button", name="Delete for good").click()
        expect(page.get_by_text("showing 1 to 1 of 1 runs")).to_be_visible()
        assert queries.runs_frame()["id"].tolist() == [kept]
        settled(page)
        page.goto("about:blank")  # before the server goes
