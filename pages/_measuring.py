"""A measurement as a process of its own: started, watched, stopped, its answer read. No Streamlit inside.

The web process must not import torch, so the work is `python -m comet_core bench codec` with its answer in a file. Each
measurement has a folder below COMET_HOME for an uploaded tensor, the answer and the log; the folder goes and the
process ends with the object, which a browser's session holds. What a killed server left behind goes after a day.
"""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import Any, BinaryIO

from comet_core import launcher
from comet_core.config import comet_home

LARGEST_UPLOAD_MB = 512
_LEFT_BEHIND_SECONDS = 86400
_LOG_TAIL_BYTES = 65536
_live: "weakref.WeakSet[Measurement]" = weakref.WeakSet()


class MeasurementError(RuntimeError):
    """A sentence about why there is no answer."""


def layers(model: str) -> dict[str, str]:
    """Layers of a network whose input can be captured -> their operator. Takes seconds. Raises MeasurementError."""
    command = [sys.executable, "-m", "comet_core", "bench", "layers", "--model", model]
    environment = launcher.training_environment()
    done = subprocess.run(command, cwd=launcher.PROJECT, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise MeasurementError(_sentence(done.stderr))
    found: dict[str, str] = json.loads(done.stdout)
    return found


class Measurement:
    """Started by its construction. Raises OSError where the upload or the log cannot be written."""

    def __init__(self, arguments: Sequence[str], upload: tuple[str, BinaryIO] | None = None, tensor: str = "") -> None:
        """`upload` is a name and the content of a tensor file, `tensor` the name of a tensor in it."""
        home = comet_home() / "codec_lab"
        home.mkdir(parents=True, exist_ok=True)
        _remove_what_was_left_behind(home)
        self.folder = Path(tempfile.mkdtemp(dir=home))
        try:
            if upload is not None:
                name, content = upload
                path = self.folder / re.sub(r"[^A-Za-z0-9_.-]+", "-", Path(name).name)[-80:].lstrip(".-")
                with path.open("wb") as file:
                    shutil.copyfileobj(content, file)
                arguments = [*arguments, "--tensor", f"{path}:{tensor}" if tensor else str(path)]
            arguments = ["-m", "comet_core", "bench", "codec", *arguments, "--progress", "lines"]
            self.shared = any(other.is_running for other in _live)
            """Whether another measurement ran when this one began, so that its times say little."""
            self._process = launcher.start(
                [*arguments, "--json", str(self.folder / "answer.json")],
                self.folder / "log",
                launcher.training_environment(),
            )
        except BaseException:
            shutil.rmtree(self.folder, ignore_errors=True)
            raise
        self._end = weakref.finalize(self, _end, self._process, self.folder)
        _live.add(self)

    @property
    def is_running(self) -> bool:
        return self._process.poll() is None

    def stop(self) -> None:
        """Ask it to end after its present turn; what was measured until then is its answer."""
        if self.is_running:
            self._process.terminate()

    def progress(self) -> tuple[float, str]:
        """Share that is done, and what it does now."""
        for line in reversed(self._log().splitlines()):
            if line.startswith("{") and line.endswith("}"):
                told = json.loads(line)
                return min(1.0, told["done"] / max(1, told["total"])), str(told["text"])
        return 0.0, "starting"

    def answer(self) -> dict[str, Any]:
        """What the ended process found. Its files are removed; call once. Raises MeasurementError."""
        try:
            code = self._process.wait()
            if code == -signal.SIGTERM:  # stopped while it was still starting
                raise MeasurementError("Stopped before anything was measured. Press Measure to start again.")
            if code not in (0, 128 + signal.SIGTERM):  # stopped, it says so in its answer
                raise MeasurementError(_sentence(self._log()))
            found: dict[str, Any] = json.loads((self.folder / "answer.json").read_text())
        except (OSError, json.JSONDecodeError) as error:
            raise MeasurementError(f"The measurement left no answer: {error}") from error
        finally:
            self._end()
        return found

    def _log(self) -> str:
        try:
            with (self.folder / "log").open("rb") as file:
                file.seek(max(0, file.seek(0, os.SEEK_END) - _LOG_TAIL_BYTES))
                return file.read().decode(errors="replace")
        except OSError:
            return ""


def _sentence(log: str) -> str:
    """The error as the command says it, else the end of what it printed."""
    lines = [line for line in log.splitlines() if line.strip() and not line.startswith("{")]
    said = [line.removeprefix("error: ") for line in lines if line.startswith("error: ")]
    return said[-1] if said else f"The measurement broke: {' '.join(lines[-3:])[-600:] or 'it printed nothing.'}"


def _end(process: "subprocess.Popen[bytes]", folder: Path) -> None:
    identity = launcher.identify(process.pid) if process.poll() is None else None
    if identity is not None:
        launcher.terminate(identity, grace_seconds=0.0)
        process.wait()
    shutil.rmtree(folder, ignore_errors=True)


def _remove_what_was_left_behind(home: Path) -> None:
    for folder in home.iterdir():
        try:
            old = time.time() - folder.stat().st_mtime > _LEFT_BEHIND_SECONDS
        except FileNotFoundError:
            continue
        if old:
            shutil.rmtree(folder, ignore_errors=True)
