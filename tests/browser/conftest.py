"""A real server on a fresh lab, a browser that fails on anything it complains about, and pictures of what it saw."""

import os
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.request
import zipfile
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Page, expect

ROOT = Path(__file__).resolve().parents[2]
ARTIFACTS = Path(os.environ.get("COMET_ARTIFACTS") or Path(__file__).parent / "artifacts")
START_SECONDS = 60
expect.set_options(timeout=30_000)  # two cores train while the pages answer
# Streamlit looks for its server below the page's own address first, and finds it one level up.
HARMLESS = re.compile(r"/[a-z_]+/_stcore/(health|host-config)$")


@dataclass
class Lab:
    url: str
    home: Path
    log: Path


@contextmanager
def serve(home: Path) -> Iterator[Lab]:
    """`python -m storage serve` with two slots; ended in order, and anything it complained about fails the test."""
    with closing(socket.socket()) as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    home.mkdir(parents=True, exist_ok=True)
    lab = Lab(f"http://127.0.0.1:{port}", home, home / "serve.log")
    command = [sys.executable, "-m", "storage", "serve", "--port", str(port), "--slots", "2"]
    environment = {**os.environ, "COMET_HOME": str(home), "PYTHONWARNINGS": "default"}
    with lab.log.open("w") as log:
        process = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=log, stderr=subprocess.STDOUT)
    try:
        deadline = time.monotonic() + START_SECONDS
        while not _answers(lab.url):
            assert process.poll() is None and time.monotonic() < deadline, lab.log.read_text()
            time.sleep(0.1)
        yield lab
    finally:
        process.send_signal(signal.SIGTERM)
        with suppress(subprocess.TimeoutExpired):
            process.wait(30)
        process.kill()
    said = lab.log.read_text()
    assert not re.search(r"Traceback|Error|again in", said), said


def _answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/_stcore/health", timeout=2) as answer:
            return answer.status == 200
    except OSError:
        return False


@pytest.fixture(scope="session")
def browser_context_args(browser_context_args: dict[str, Any]) -> dict[str, Any]:
    return {**browser_context_args, "viewport": {"width": 1440, "height": 1100}}


@pytest.fixture
def page(page: Page) -> Iterator[Page]:
    """The browser's page; errors on its console, exceptions in it and requests to other machines fail the test."""
    complaints: list[str] = []

    def heard(message: Any) -> None:
        if message.type == "error" and not HARMLESS.search(message.location.get("url", "")):
            complaints.append(f"{message.text} {message.location}")

    def asked(request: Any) -> None:
        if not request.url.startswith(("http://127.0.0.1:", "data:", "blob:")):
            complaints.append(f"request to {request.url}")

    page.on("console", heard)
    page.on("pageerror", lambda error: complaints.append(f"{error}"))
    page.on("request", asked)
    page.set_default_timeout(30_000)
    yield page
    assert complaints == []


def settled(page: Page) -> None:
    """Wait until the page's script has run to its end and everything is drawn."""
    expect(page.get_by_test_id("stException")).to_have_count(0)
    expect(page.locator("[data-testid=stApp][data-test-script-state=notRunning]")).to_be_visible()
    expect(page.locator("[data-testid=stSkeleton], [data-stale=true]")).to_have_count(0)
    page.wait_for_function(
        "[...document.querySelectorAll('[data-testid=stPlotlyChart]')]"
        ".every(chart => chart.querySelector('.js-plotly-plot')?.calcdata)"
    )


def picture(page: Page, name: str) -> None:
    """A picture of the whole page in the artifacts: Streamlit scrolls inside, so the window grows to its height."""
    settled(page)
    ARTIFACTS.mkdir(parents=True, exist_ok=True)
    size = page.viewport_size
    assert size is not None
    main = "document.querySelector('[data-testid=stMain]')"
    height = max(700, page.evaluate(f"{main}.scrollHeight"))
    page.set_viewport_size({"width": size["width"], "height": height})
    page.wait_for_function(f"{main}.clientHeight >= {height} - 1")
    settled(page)
    page.screenshot(path=ARTIFACTS / f"{name}.png")
    page.set_viewport_size(size)


@pytest.fixture(scope="session")
def images(tmp_path_factory) -> Path:
    """A zip of labelled images: the one that COMET_TEST_IMAGES names, else handwritten digits."""
    given = os.environ.get("COMET_TEST_IMAGES")
    if given:
        return Path(given)
    from PIL import Image
    from sklearn.datasets import load_digits

    digits = load_digits()
    path = tmp_path_factory.mktemp("images") / "digits.zip"
    with zipfile.ZipFile(path, "w") as archive:
        for number, (pixels, label) in enumerate(zip(digits.images, digits.target, strict=True)):
            picture_file = BytesIO()
            Image.fromarray((pixels * 15.9).astype("uint8")).resize((32, 32)).save(picture_file, "PNG")
            part = "test" if number % 5 == 0 else "train"
            archive.writestr(f"{part}/{label}/{number}.png", picture_file.getvalue())
    return path
