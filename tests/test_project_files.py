"""Requirements, wheel, Makefile, server settings and the test suite's own rules say the same and keep their word."""

import ast
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).resolve().parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def requirement_lines(name: str) -> list[str]:
    lines = (ROOT / name).read_text().splitlines()
    return [line for line in lines if line and not line.startswith(("#", "-r"))]


def pins() -> dict[str, Requirement]:
    requirements = [Requirement(line.split("  #")[0]) for line in requirement_lines("requirements.txt")]
    return {requirement.name: requirement for requirement in requirements}


def test_every_requirement_is_pinned_and_says_what_it_is_for():
    lines = requirement_lines("requirements.txt") + requirement_lines("requirements-dev.txt")
    assert [line for line in lines if not re.fullmatch(r"[\w\[\]-]+==[\w.]+(; .+?)?  # .+", line)] == []


def test_the_pins_lie_in_the_ranges_that_the_package_accepts():
    extras = PROJECT["optional-dependencies"]
    ranges = [Requirement(line) for line in [*PROJECT["dependencies"], *extras["lab"], *extras["gpu"]]]
    assert {accepted.name for accepted in ranges} == set(pins())
    for accepted in ranges:
        (pin,) = pins()[accepted.name].specifier
        assert accepted.specifier.contains(pin.version), f"{accepted} does not accept {pin}"
        assert accepted.marker == pins()[accepted.name].marker


def test_the_package_states_one_version():
    tree = ast.parse((ROOT / "comet_core/__init__.py").read_text())
    (version,) = [
        ast.literal_eval(node.value)
        for node in tree.body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__version__"
    ]
    assert version == PROJECT["version"]


def test_the_wheel_holds_the_whole_engine_and_nothing_else(tmp_path):
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, tmp_path)
    shutil.copytree(ROOT / "comet_core", tmp_path / "comet_core", ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("storage", "pages"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").touch()
    options = ["--no-deps", "--no-build-isolation", "--no-index", "--quiet", "--wheel-dir"]
    subprocess.run([sys.executable, "-m", "pip", "wheel", *options, tmp_path, tmp_path], check=True, timeout=120)
    (wheel,) = tmp_path.glob("*.whl")
    packed = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    sources = [file for pattern in ("*.py", "*.cu") for file in (ROOT / "comet_core").rglob(pattern)]
    assert packed == {str(file.relative_to(ROOT)) for file in sources}


def test_make_says_that_python_is_too_old(tmp_path):
    shutil.copy(ROOT / "Makefile", tmp_path)
    (tmp_path / "requirements.txt").touch()
    made = subprocess.run(["make", "setup", "PYTHON=false"], cwd=tmp_path, capture_output=True, text=True)
    assert made.returncode != 0
    assert "COMET Lab needs Python 3.11 or newer" in made.stderr
    assert not (tmp_path / ".venv").exists()


def test_the_server_knows_every_setting_and_stays_at_home():
    command = [sys.executable, "-m", "streamlit", "config", "show"]
    shown = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    assert "not a valid config option" not in shown.stdout + shown.stderr
    settings = tomllib.loads((ROOT / ".streamlit/config.toml").read_text())
    assert settings["browser"]["gatherUsageStats"] is False
    assert settings["server"]["address"] == "127.0.0.1"


def test_no_file_names_a_folder_of_somebodys_machine():
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    files = [ROOT / name for name in listed.split("\0") if name and (ROOT / name).is_file()]
    found = [
        f"{file.relative_to(ROOT)}: {match[0]!r}"
        for file in files
        for match in re.finditer(rb"(?<![\w.])/(?:root|home|work|Users)/[A-Za-z.]", file.read_bytes())
        if b"\0" not in file.read_bytes()
    ]
    assert found == []


SKIPS = """
    import pytest

    @pytest.fixture
    def tool():
        pytest.skip("missing tool: chromium")

    def test_fixture(tool): ...
    def test_body(): pytest.skip("missing tool: chromium")
    @pytest.mark.skipif(True, reason="missing tool: chromium")
    def test_mark(): ...
"""
OTHER_SKIPS = """
    import pytest
    import torch

    def test_other(): pytest.skip("needs Linux")
    @pytest.mark.gpu
    def test_gpu(): assert torch.cuda.is_available()
"""
MODULE_SKIP = "import pytest; pytest.skip('missing tool: chromium', allow_module_level=True)"


@pytest.mark.parametrize(
    ("ci", "of_tests", "of_module"),
    [("", {"skipped": 3}, {"skipped": 1}), ("true", {"failed": 1, "errors": 2}, {"errors": 1})],
)
def test_a_missing_tool_is_a_skip_on_a_desk_and_a_failure_in_ci(pytester, monkeypatch, ci, of_tests, of_module):
    monkeypatch.setenv("CI", ci)
    pytester.makeconftest((ROOT / "tests/conftest.py").read_text())
    for source, expected in ((SKIPS, of_tests), (MODULE_SKIP, of_module)):
        pytester.makepyfile(source)
        result = pytester.runpytest("-p", "no:playwright", "-rs")
        result.assert_outcomes(**expected)
        result.stdout.fnmatch_lines("*missing tool: chromium*")


def test_other_skips_stay_skips_in_ci(pytester, monkeypatch):
    monkeypatch.setenv("CI", "true")
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    pytester.makeconftest((ROOT / "tests/conftest.py").read_text())
    pytester.makepyfile(OTHER_SKIPS)
    pytester.runpytest("-p", "no:playwright").assert_outcomes(skipped=2)
