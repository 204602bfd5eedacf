"""Who may import whom: the table, held against every import in every file, also those inside functions."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent

# A file may import the standard library and what every line lists whose path it starts with.
MAY_IMPORT = {
    "app.py": "streamlit",
    "comet_core/": "comet_core numpy torch torchvision numba zstandard psutil tqdm",
    "comet_core/datasets/": "PIL sklearn",
    "comet_core/checkpoints.py": "safetensors",
    "comet_core/tensor_sources.py": "safetensors",
    "comet_core/codecs/kernels/": "llvmlite",  # what numba is built on and installs
    "comet_core/codecs/kernels/cuda.py": "cupy nvidia.nvcomp",
    "storage/": "storage sqlalchemy alembic pandas numpy psutil"
    " comet_core.__version__ comet_core.config comet_core.metrics comet_core.launcher",
    "storage/worker.py": "comet_core.trainer",
    "pages/": "pages streamlit plotly pandas numpy"
    " storage.queries storage.runs storage.admin storage.export"
    " comet_core.__version__ comet_core.config comet_core.metrics",
    "pages/_measuring.py": "comet_core.launcher",
}
# The same, but only inside a function: these libraries may be absent.
MAY_IMPORT_LAZILY = {"storage/": "psycopg pyarrow ray"}
# What both the web process and the engine read; these may import each other and the standard library.
STDLIB_ONLY = ("comet_core/config.py", "comet_core/metrics.py", "comet_core/launcher.py")
STDLIB_ONLY_MAY_IMPORT = "comet_core.__version__ comet_core.config comet_core.metrics comet_core.launcher"


def project_files() -> list[str]:
    patterns = ("app.py", "comet_core/**/*.py", "storage/**/*.py", "pages/**/*.py")
    return sorted(str(file.relative_to(ROOT)) for pattern in patterns for file in ROOT.glob(pattern))


def imports_of(tree: ast.AST):
    """Yield (line, dotted name, stands inside a function) for each import, import_module("...") included."""
    functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    inside = {node for function in functions for node in ast.walk(function)}
    for node in ast.walk(tree):
        if not isinstance(node, ast.Import | ast.ImportFrom | ast.Call):
            continue
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [f"{'.' * node.level}{node.module or ''}.{alias.name}" for alias in node.names]
        elif ast.unparse(node.func).split(".")[-1] in ("import_module", "__import__"):
            names = [arg.value for arg in node.args[:1] if isinstance(arg, ast.Constant) and isinstance(arg.value, str)]
        yield from ((node.lineno, name, node in inside) for name in names)


def violations(path: str, source: str) -> list[str]:
    def allowed(table: dict[str, str]) -> set[str]:
        return {name for prefix, names in table.items() if path.startswith(prefix) for name in names.split()}

    eager = set(STDLIB_ONLY_MAY_IMPORT.split()) if path in STDLIB_ONLY else allowed(MAY_IMPORT)
    lazy = eager | allowed(MAY_IMPORT_LAZILY)
    return [
        f"{path}:{line} imports {name}" + (" outside a function" if name.split(".")[0] in lazy else "")
        for line, name, in_function in imports_of(ast.parse(source))
        if name.split(".")[0] not in sys.stdlib_module_names
        and not any(f"{name}.".startswith(f"{known}.") for known in (lazy if in_function else eager))
    ]


@pytest.mark.parametrize("path", project_files())
def test_a_file_imports_only_what_its_layer_may(path):
    assert violations(path, (ROOT / path).read_text()) == []


@pytest.mark.parametrize(
    ("path", "source"),
    [
        ("comet_core/trainer.py", "import storage.runs"),
        ("comet_core/trainer.py", "def f():\n    import pandas as pd"),
        ("comet_core/config.py", "import torch"),
        ("comet_core/session.py", "from . import config"),
        ("comet_core/codecs/lossless.py", "import cupy"),
        ("storage/runs.py", "from comet_core import trainer"),
        ("storage/runs.py", "import importlib\nimportlib.import_module('comet_core.trainer')"),
        ("storage/export.py", "import pyarrow"),
        ("pages/runs.py", "from storage.database import session"),
        ("pages/runs.py", "def f():\n    from torch import cuda"),
        ("app.py", "import storage.queries"),
    ],
)
def test_the_check_notices(path, source):
    assert len(violations(path, source)) == 1


def test_the_web_process_stays_free_of_torch():
    """Importing everything that a page may import loads no torch: it would cost each visit seconds and 500 MB."""
    names = [name for name in MAY_IMPORT["pages/"].split() if name.startswith(("storage.", "comet_core."))]
    exist = [name for name in names if (ROOT / f"{name.replace('.', '/')}.py").exists()]
    code = f"import sys, comet_core, {', '.join(exist)}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, timeout=60).returncode == 0
