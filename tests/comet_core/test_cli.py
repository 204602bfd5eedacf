"""The command line: real processes, real signals, real exit codes."""

import json
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

PROJECT = Path(__file__).resolve().parents[2]
QUICK = ["--set", "max_steps_per_epoch=3", "--set", "batch_size=16"]


def comet(*arguments):
    command = [sys.executable, "-m", "comet_core", *arguments]
    return subprocess.run(command, cwd=PROJECT, capture_output=True, text=True, timeout=120, check=False)


def test_train_writes_config_environment_history_and_summary(tmp_path):
    output = tmp_path / "out.json"
    done = comet("train", "--preset", "quick", "--set", "epochs=1", *QUICK, "--json", str(output))
    assert done.returncode == 0, done.stderr
    assert "compression ratio, whole graph" in done.stdout
    found = json.loads(output.read_text())
    assert found["config"]["max_steps_per_epoch"] == 3 and found["config"]["epochs"] == 1
    assert len(found["steps"]) == 3 and len(found["evals"]) == 1 and found["layers"]
    assert found["summary"]["status"] == "finished"
    if sys.platform == "linux":
        assert "mmap_threshold" in found["environment"]["glibc_tunables"]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["train", "--set", "model=resnet21"], "model is 'resnet21'; allowed: resnet20"),
        (["train", "--set", "epochs"], "key=value"),
        (["train", "--preset", "slow"], "preset is 'slow'; allowed: quick"),
        (["train", "--set", "batch_size=5000"], "batch_size is 5,000, but there are"),
        (["train", "--set", "model=alexnet"], "alexnet needs images of 64 pixels"),
        (["train", *QUICK, "--json", "/nowhere/out.json"], "/nowhere is no folder"),
        (["data-check", "--set", "dataset=image_folder", "--set", "dataset_path=nothing.zip"], "does not exist"),
    ],
)
def test_what_the_user_can_mend_is_one_sentence_and_exit_code_2(arguments, words):
    done = comet(*arguments)
    assert done.returncode == 2
    assert words in done.stderr and done.stderr.startswith("error: ") and "Traceback" not in done.stderr


def test_data_check_answers_as_json():
    done = comet("data-check", "--json")
    found = json.loads(done.stdout)
    assert found["ok"] and found["num_classes"] == 10 and found["num_train"] + found["num_test"] == 1797
    done = comet("data-check", "--json", "--set", "dataset=image_folder", "--set", "dataset_path=nothing.zip")
    assert json.loads(done.stdout)["ok"] is False and "nothing.zip" in json.loads(done.stdout)["error"]


def catches(pid, number):
    """Whether the process has a handler for a signal."""
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except FileNotFoundError:
        return False
    caught = int(re.search(r"SigCgt:\s*(\w+)", status)[1], 16)
    return bool(caught >> (number - 1) & 1)


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_ctrl_c_ends_cleanly_and_keeps_the_history(tmp_path):
    output = tmp_path / "out.json"
    process = subprocess.Popen(
        [sys.executable, "-m", "comet_core", "train", "--set", "epochs=1000", "--set", "batch_size=16", "--json",
         str(output)], cwd=PROJECT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        deadline = time.monotonic() + 60
        while not catches(process.pid, signal.SIGTERM):
            assert process.poll() is None and time.monotonic() < deadline
            time.sleep(0.1)
        process.send_signal(signal.SIGINT)
        out, error = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == 0, error
    assert "stopped after" in out
    found = json.loads(output.read_text())
    assert found["summary"]["status"] == "stopped" and len(found["steps"]) >= 1
