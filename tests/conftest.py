"""What every test gets: a lab folder of its own, Chromium from the system, and honest skips.

A test that lacks a tool (Chromium, PostgreSQL, a data set) says `pytest.skip("missing tool: <name>, <how to get it>")`.
On a desk that is a skip. With CI=true it is a failure, because there a skip hides that nothing was tested. A missing
GPU is no missing tool: tests marked `gpu` are skipped everywhere without one.

Imports nothing beside pytest, so that tests marked `gpu` run where only the engine's libraries are.
"""

import os
import shutil

import pytest

# Before anything loads OpenMP, also in the processes that tests start: threads that wait by spinning starve the others.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

MISSING_TOOL = "missing tool:"


def _fail_for_missing_tool(report: pytest.TestReport | pytest.CollectReport) -> None:
    if os.environ.get("CI") != "true" or report.outcome != "skipped" or not isinstance(report.longrepr, tuple):
        return
    path, line, reason = report.longrepr
    if MISSING_TOOL in reason:
        report.outcome = "failed"
        report.longrepr = f"{path}:{line}: {reason} (with CI=true a missing tool is a failure)"


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport():
    report = yield
    _fail_for_missing_tool(report)
    return report


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report():
    report = yield
    _fail_for_missing_tool(report)
    return report


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("gpu"):
        import torch

        if not torch.cuda.is_available():
            pytest.skip("needs a CUDA GPU")


@pytest.fixture(scope="session", autouse=True)
def _lab_environment(tmp_path_factory):
    """No test reads or writes the lab of whoever runs it, nor do session and module fixtures."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("COMET_HOME", str(tmp_path_factory.mktemp("comet_home")))
        patch.delenv("COMET_DATABASE_URL", raising=False)
        patch.delenv("PORT", raising=False)
        yield


@pytest.fixture(autouse=True)
def comet_home(tmp_path_factory, monkeypatch):
    """The empty folder that COMET_HOME names during this test."""
    home = tmp_path_factory.mktemp("comet_home")
    monkeypatch.setenv("COMET_HOME", str(home))
    return home


@pytest.fixture(scope="session")
def browser_type_launch_args() -> dict:
    """Read by pytest-playwright: the system's Chromium, silent towards the network."""
    chromium = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if chromium is None:
        pytest.skip(f"{MISSING_TOOL} chromium (on Debian: apt-get install chromium)")
    switches = "no-sandbox disable-gpu disable-quic no-first-run"
    silent = "disable-background-networking disable-component-update disable-sync"
    return {"executable_path": chromium, "args": [f"--{name}" for name in f"{switches} {silent}".split()]}
