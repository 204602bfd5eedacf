"""From an upload to a comparison: what a person does in the lab, on a real server, with real training processes."""

import re
import sqlite3
import zipfile
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Locator, Page, expect

from pages import _charts
from tests.browser.conftest import Lab, picture, serve, settled

pytestmark = pytest.mark.browser

NUM_STEPS = 12
NAME = "<b>first</b> :smile: $x$"
TRAINING_MS = 120_000


@pytest.fixture(scope="module")
def lab(tmp_path_factory) -> Iterator[Lab]:
    with serve(tmp_path_factory.mktemp("lab")) as serving:
        yield serving


def rows(lab: Lab, query: str) -> list[dict[str, Any]]:
    with closing(sqlite3.connect(f"file:{lab.home / 'comet.db'}?mode=ro", uri=True)) as database:
        database.row_factory = sqlite3.Row
        return [dict(row) for row in database.execute(query)]


def upload(page: Page, lab: Lab, file: Path) -> None:
    page.goto(f"{lab.url}/new_run?preset=images")
    page.get_by_test_id("stFileUploaderDropzoneInput").set_input_files(file)


def fill(page: Page, label: str, value: str) -> None:
    field = page.get_by_label(label, exact=True)
    field.fill(value)
    field.press("Enter")
    settled(page)


def metric(page: Page, label: str | re.Pattern[str]) -> Locator:
    return page.get_by_test_id("stMetric").filter(has=page.get_by_text(label))


def curve(page: Page, title: str, name: str) -> dict[str, list[float]]:
    """What the browser draws: the numbers of one curve of the chart with this title."""
    return page.evaluate(
        """([title, name]) => {
            const plot = [...document.querySelectorAll('.js-plotly-plot')]
                .find(plot => plot.layout.title.text.includes(title));
            const trace = plot._fullData.find(trace => trace.name.startsWith(name));
            return {x: [...trace.x], y: [...trace.y]};
        }""",
        [title, name],
    )


@pytest.mark.parametrize("content", ["no zip at all", "one class", "leaves its folder"])
def test_a_wrong_zip_is_refused_with_a_sentence_and_leaves_nothing(content, page: Page, lab: Lab, tmp_path):
    file = tmp_path / "wrong.zip"
    if content == "no zip at all":
        file.write_text("no zip")
        sentence = "'wrong.zip' is no zip file"
    else:
        with zipfile.ZipFile(file, "w") as archive:
            archive.writestr("train/cat/1.png" if content == "one class" else "../evil/1.png", b"no image")
        sentence = "has one class, 'cat'" if content == "one class" else "../evil"
    upload(page, lab, file)
    expect(page.get_by_role("alert").filter(has_text=sentence)).to_be_visible()
    page.get_by_role("button", name="Launch with baseline twin").click()
    expect(page.get_by_role("alert").filter(has_text="Nothing was launched")).to_be_visible()
    settled(page)
    picture(page, f"refused_{content.replace(' ', '_')}")
    assert rows(lab, "select * from runs") == []
    assert list((lab.home / "uploads").iterdir()) == []


def test_upload_launch_watch_compare(page: Page, lab: Lab, images: Path):
    upload(page, lab, images)
    expect(page.get_by_text(re.compile(r"^\d+ classes, [\d,]+ training and [\d,]+ test images"))).to_be_visible(
        timeout=60_000
    )
    fill(page, "Epochs", "1")
    fill(page, "Steps an epoch at most (steps)", str(NUM_STEPS))
    fill(page, "Batch size (images)", "64")
    fill(page, "Name", NAME)
    picture(page, "new_run")
    page.get_by_role("button", name="Launch with baseline twin").click()
    expect(page.get_by_text("are queued")).to_be_visible(timeout=60_000)
    mine, twin = (row["id"] for row in rows(lab, "select id from runs order by id"))

    page.get_by_role("link", name="Home").click()
    live = page.locator(".stMarkdownBadge", has_text=re.compile("starting|running"))
    expect(live).to_have_count(2, timeout=TRAINING_MS)
    picture(page, "home_live")
    page.get_by_role("link", name=f"#{mine} {NAME}").click()
    expect(page.get_by_role("heading", level=1)).to_have_text(f"#{mine} {NAME}")
    expect(page.get_by_test_id("stPlotlyChart").first).to_be_visible(timeout=TRAINING_MS)
    picture(page, "run_live")
    # While a page is drawn anew, parts of the old one may stand beside the new for a moment.
    finished = page.locator(".stMarkdownBadge", has_text="finished")
    expect(finished).to_have_count(1, timeout=TRAINING_MS)
    expect(page.get_by_role("button", name="Stop")).to_have_count(0)
    picture(page, "run")
    page.goto(f"{lab.url}/run_detail?run={twin}")
    expect(finished).to_have_count(1, timeout=TRAINING_MS)

    figures = {row["run_id"]: row for row in rows(lab, "select * from run_summary")}
    assert {row["status"] for row in rows(lab, "select status from runs")} == {"finished"}
    page.get_by_role("link", name=f"Compare with twin #{mine}").click()
    expect(page.get_by_role("heading", level=1)).to_have_text("Compare")
    settled(page)
    held = figures[mine]["max_held_bytes"]
    expect(metric(page, f"Held for backward, #{mine}")).to_contain_text(_charts.number_text(held, "bytes"))
    percent = 100 * (held - figures[twin]["max_held_bytes"]) / figures[twin]["max_held_bytes"]
    expect(metric(page, f"Held for backward, #{mine}")).to_contain_text(f"{percent:+.1f} %")
    accuracy = _charts.number_text(figures[mine]["last_test_accuracy"], "fraction")
    expect(metric(page, f"Test accuracy, #{mine}")).to_contain_text(accuracy)
    expect(page.get_by_text("Shared: other runs computed at the same time")).to_be_visible()
    for run_id in (mine, twin):
        steps = rows(
            lab, f"select step, train_loss, held_bytes from step_metrics where run_id = {run_id} order by step"
        )
        assert len(steps) == NUM_STEPS
        drawn = curve(page, "Training loss", f"#{run_id} ")
        assert drawn == {"x": [row["step"] for row in steps], "y": [row["train_loss"] for row in steps]}
        drawn = curve(page, "Saved for backward, really held", f"#{run_id} ")
        assert drawn["y"] == pytest.approx([row["held_bytes"] / 2**20 for row in steps])
    picture(page, "compare")

    page.get_by_role("link", name="Trade-offs").click()
    expect(page.get_by_role("heading", level=1)).to_have_text("Trade-offs")
    picture(page, "trade_offs")
    points = page.evaluate(
        "(() => { const points = document.querySelector('.js-plotly-plot')._fullData.at(-1);"
        " return {ids: [...points.customdata], y: [...points.y]}; })()"
    )
    expected = {run_id: 100 * row["last_test_accuracy"] for run_id, row in figures.items()}
    assert dict(zip(points["ids"], points["y"], strict=True)) == pytest.approx(expected)
    page.locator(".js-plotly-plot .points path").last.click(force=True)
    expect(page).to_have_url(re.compile(rf"run_detail\?run={points['ids'][-1]}$"))
    settled(page)

    page.get_by_role("link", name="Runs").click()
    picture(page, "runs")
    page.get_by_role("link", name="Home").click()
    expect(page.get_by_text("What compression did last")).to_be_visible()
    picture(page, "home")
    page.get_by_role("link", name="About").click()
    expect(page.get_by_test_id("stMetric").filter(has_text="Slots")).to_contain_text("2")  # as `serve` was told
    picture(page, "about")
    page.emulate_media(color_scheme="dark")
    for name in ("compare", "run_detail"):
        page.goto(f"{lab.url}/{name}?runs={mine},{twin}&run={mine}")
        picture(page, f"{name}_dark")
