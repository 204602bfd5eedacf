"""The README's tree names every module, with the first line of its docstring."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
ENTRY = re.compile(r"(?P<indent> *)(?P<name>\S+)(?: +(?P<purpose>\S.*))?")


def purposes_in_the_readme() -> dict[str, str]:
    block = (ROOT / "README.md").read_text().split("## The tree\n")[1].split("```")[1]
    entries: dict[str, str] = {}
    folders: list[str] = []
    for line in block.strip("\n").splitlines():
        entry = ENTRY.fullmatch(line)
        assert entry, f"not a line of the tree: {line!r}"
        folders = folders[: len(entry["indent"]) // 4]
        entries["".join([*folders, entry["name"]])] = entry["purpose"] or ""
        folders += [entry["name"]] if entry["name"].endswith("/") else []
    return entries


def purposes_in_the_code() -> dict[str, str]:
    patterns = ("app.py", "comet_core/**/*.py", "storage/**/*.py", "pages/**/*.py")
    sources = {file.relative_to(ROOT): file.read_text() for pattern in patterns for file in ROOT.glob(pattern)}
    return {
        str(file): (ast.get_docstring(ast.parse(source)) or "no docstring").splitlines()[0]
        for file, source in sources.items()
        if "migrations" not in file.parts and source.strip()
    }


def test_the_tree_names_every_module_and_repeats_its_purpose():
    in_readme = {entry for entry in purposes_in_the_readme().items() if entry[0].endswith(".py")}
    in_code = set(purposes_in_the_code().items())
    assert sorted(in_code - in_readme) == [], "these stand in the code alone"
    assert sorted(in_readme - in_code) == [], "these stand in the README alone"


@pytest.mark.parametrize("name", purposes_in_the_readme())
def test_what_the_tree_names_exists(name):
    assert (ROOT / name).exists()
