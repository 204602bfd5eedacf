"""The command line: real processes, real signals, real exit codes."""

import json
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

PROJECT = Path(__file__).resolve().parents[2]
QUICK = ["--set", "max_steps_per_epoch=3", "--set", "batch_size=16"]
BENCH = ["--steps", "1", "--set", "batch_size=8", "--set", "image_size=8", "--repetitions", "1"]


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
        (["bench", "codec", "--tensor", "nothing.npy"], "the tensor file is 'nothing.npy', which does not exist"),
        (["bench", "codec", "--codecs", "zip"], "codec is 'zip'; allowed: error_bounded"),
        (["bench", "codec", "--bounds", "-1", *BENCH], "one of the bounds is -1; allowed: finite numbers above 0"),
        (["bench", "codec", "--layer", "stage9", *BENCH], "layer is 'stage9'; allowed for resnet20: conv, bn,"),
        (["bench", "codec", "--steps", "0"], "--steps is 0; allowed: 1 or more"),
        (["bench", "codec", "--json", "/nowhere/out.json"], "/nowhere is no folder"),
        (["bench", "layers", "--model", "resnet21"], "model is 'resnet21'; allowed: resnet20"),
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


def test_bench_codec_captures_a_tensor_and_writes_what_it_measured(tmp_path):
    output = tmp_path / "out.json"
    codecs = ["error_bounded", "cast:dtype=float16"]
    done = comet("bench", "codec", *BENCH, "--layer", "stage1.0.bn1", "--codecs", *codecs, "--bounds", "1", "4",
                 "--progress", "lines", "--json", str(output))  # fmt: skip
    assert done.returncode == 0, done.stderr
    found = json.loads(output.read_text())
    tensor = found["tensor"]
    assert (tensor["name"], tensor["operator"], tensor["kind"]) == ("stage1.0.bn1", "batch_norm", "rule")
    assert tensor["shape"] == [8, 16, 8, 8] and tensor["channel_dim"] == 1
    assert [(row["codec"], row["bound"]) for row in found["results"]] == [
        ("cast:dtype=float16", None), ("error_bounded", 1), ("error_bounded", 4),
    ]  # fmt: skip
    assert all(row["num_over_bound"] == 0 for row in found["results"])
    assert [entry["bound"] for entry in found["bounds"]] == [1, 4]
    assert found["environment"]["numba"] and "cast:dtype=float16" in done.stdout
    told = [json.loads(line) for line in done.stderr.splitlines() if line.startswith("{")]
    assert told[-1]["done"] == told[-1]["total"] == 6 and told[0]["text"] == "training resnet20"


def test_bench_codec_reads_a_file(tmp_path):
    np.save(tmp_path / "x.npy", np.random.default_rng(0).normal(size=(4, 8, 16)).astype(np.float32))
    output = tmp_path / "out.json"
    done = comet("bench", "codec", "--tensor", str(tmp_path / "x.npy"), "--codecs", "error_bounded", "--channel-dim",
                 "-2", "--sign-exact", "--bounds", "0.01", "--kind", "abs", "--json", str(output))  # fmt: skip
    assert done.returncode == 0, done.stderr
    found = json.loads(output.read_text())
    assert found["tensor"]["source"] == "file" and found["tensor"]["sign_exact"] is True
    assert found["results"][0]["max_error"] <= 0.01 == found["bounds"][0]["error_bound"]


def test_bench_layers_lists_what_can_be_captured():
    found = json.loads(comet("bench", "layers", "--model", "vgg16_bn").stdout)
    assert len(found) == 26 and set(found.values()) == {"conv2d", "batch_norm"}


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


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_ctrl_c_ends_a_measurement_and_keeps_what_there_is(tmp_path):
    output = tmp_path / "out.json"
    process = subprocess.Popen(
        [sys.executable, "-m", "comet_core", "bench", "codec", "--steps", "100000", "--json", str(output)],
        cwd=PROJECT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
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
    assert "stopped before everything was measured" in out
    assert json.loads(output.read_text())["stopped"] is True
