"""The codec lab in a browser: an upload is measured and drawn; one that can run code is refused; nothing stays."""

import io
import pickle
import re
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from playwright.sync_api import Page, expect

from tests.browser.conftest import Lab, picture, serve, settled

pytestmark = pytest.mark.browser
MEASURING_MS = 120_000


@pytest.fixture(scope="module")
def lab(tmp_path_factory) -> Iterator[Lab]:
    with serve(tmp_path_factory.mktemp("lab")) as serving:
        yield serving


def upload(page: Page, lab: Lab, file: Path) -> None:
    page.goto(f"{lab.url}/codec_lab?lab_source=Upload&lab_codecs=error_bounded&lab_codecs=lossless")
    page.get_by_test_id("stFileUploaderDropzoneInput").set_input_files(file)
    expect(page.get_by_text(file.name)).to_be_visible()
    settled(page)
    page.get_by_role("button", name="Measure").click()


def left_behind(lab: Lab) -> list[Path]:
    return list((lab.home / "codec_lab").iterdir())


def test_an_uploaded_tensor_is_measured_and_drawn(page: Page, lab: Lab, tmp_path):
    values = np.random.default_rng(0).normal(size=(4, 8, 32, 32)).astype(np.float32)
    np.save(tmp_path / "mine.npy", values)
    upload(page, lab, tmp_path / "mine.npy")
    expect(page.get_by_test_id("stPlotlyChart")).to_have_count(4, timeout=MEASURING_MS)
    expect(page.get_by_test_id("stMarkdown").get_by_text("mine.npy", exact=True)).to_be_visible()
    expect(page.get_by_text("float32, 4 x 8 x 32 x 32")).to_be_visible()
    settled(page)
    drawn = page.evaluate(
        "Object.fromEntries(document.querySelector('.js-plotly-plot')._fullData"
        ".map(trace => [trace.name, [...trace.y]]))"
    )
    assert drawn.keys() == {"error_bounded", "lossless", "entropy of the codes", "entropy given the neighbours"}
    order0 = drawn["entropy of the codes"]
    # of a normal distribution with steps of twice the bound: h = log2(sqrt(2 pi e) / step)
    steps = 2 * np.ptp(values) * np.array([1e-4, 3e-4, 1e-3, 3e-3, 1e-2, 3e-2])
    expected = np.log2(np.sqrt(2 * np.pi * np.e) / steps)
    assert order0[2:] == pytest.approx(expected[2:], abs=0.1)  # finer steps meet too few values
    assert left_behind(lab) == []
    picture(page, "codec_lab")
    page.emulate_media(color_scheme="dark")
    picture(page, "codec_lab_dark")
    page.set_viewport_size({"width": 390, "height": 844})
    expect(page.get_by_test_id("stSidebar")).not_to_be_in_viewport()
    settled(page)
    wide = page.evaluate("document.documentElement.scrollWidth")
    assert wide <= 390
    picture(page, "codec_lab_phone")


def test_a_file_that_can_run_code_is_refused_and_removed(page: Page, lab: Lab, tmp_path):
    class Bomb:
        def __reduce__(self):
            return (exec, ("raise SystemExit('a pickle was run')",))

    content = io.BytesIO()
    np.save(content, np.array([Bomb()], dtype=object), allow_pickle=True)
    for number, data in enumerate((pickle.dumps(Bomb()), content.getvalue())):
        file = tmp_path / f"bomb{number}.npy"
        file.write_bytes(data)
        upload(page, lab, file)
        expect(
            page.get_by_role("alert").filter(has_text=re.compile(rf"{file.name} (is no whole|holds object)"))
        ).to_be_visible(timeout=MEASURING_MS)
        assert left_behind(lab) == []
    picture(page, "codec_lab_refused")


def test_a_capture_shows_its_progress_and_stops(page: Page, lab: Lab):
    page.goto(f"{lab.url}/codec_lab?lab_steps=1000")
    page.get_by_role("button", name="Measure").click(timeout=MEASURING_MS)
    expect(page.get_by_text("training resnet20")).to_be_visible(timeout=MEASURING_MS)
    page.get_by_role("button", name="Stop").click()
    expect(page.get_by_text("Stopped before anything was measured")).to_be_visible(timeout=MEASURING_MS)
    assert left_behind(lab) == []
