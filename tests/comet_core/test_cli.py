"""The command line: real processes, real signals, real exit codes."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from comet_core import launcher

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
        (["bench", "codec", "--bounds", "-1", *BENCH], "one of the bounds is -1; allowed: numbers from 0"),
        (["bench", "codec", "--bounds", "1", "1.0", *BENCH], "the bound 1 is given twice"),
        (["bench", "codec", "--bounds", "fine"], "argument --bounds: 'fine' is no number; write it like 0.01"),
        (["bench", "codec", "--channel-dim", "1"], "the momentum rule gives bounds to captured tensors alone"),
        (["bench", "codec", "--codecs", "sign_mask"], "not values; allowed: error_bounded"),
        (["bench", "codec", "--codecs", "lossless", "lossless"], "codec 'lossless' is given twice"),
        (["bench", "codec", "--set", "policy=baseline"], "policy does not change what is captured; allowed: dataset"),
        (["bench", "codec", "--tensor", "x.npy", "--layer", "conv", "--set", "seed=1"], "--layer, --set can only be"),
        (["bench", "codec", "--tensor", "x.npy", "--model", "resnet20", "--steps", "3"], "--model, --steps can only"),
        (["bench", "codec", "--tensor", ""], "the tensor file is '', an empty name"),
        (["bench", "codec", "--threads", "100000"], "--threads: '100000' is not a whole number from 0 to 1,024"),
        (["bench", "codec", "--repetitions", "9" * 5000], "99999...99999"),
        (["bench", "codec", "--speed"], "unrecognized arguments: --speed; see python -m comet_core --help"),
        (["bench"], "the following arguments are required: subject"),
        (["bench", "codec", "--json", "."], "--json is '.', which is a folder; name a file in it"),
        (["train", "--json", "tests"], "--json is 'tests', which is a folder"),
        (["train", "--set", "codec_params=dither=maybe"], "codec_params: dither is 'maybe'; allowed: False, True"),
        (["train", "--set", "seed=" + "9" * 5000], "99999...99999"),
        (["bench", "codec", "--layer", "stage9", *BENCH], "layer is 'stage9'; allowed for resnet20: conv, bn,"),
        (["bench", "codec", "--steps", "0"], "argument --steps: '0' is not a whole number from 1 to 1,000,000"),
        (["bench", "codec", "--json", "/nowhere/out.json"], "/nowhere is no folder"),
        (["bench", "layers", "--model", "resnet21"], "model is 'resnet21'; allowed: resnet20"),
        (["data-check", "--set", "dataset=image_folder", "--set", "dataset_path=nothing.zip"], "does not exist"),
    ],
)
def test_what_the_user_can_mend_is_one_sentence_and_exit_code_2(arguments, words):
    done = comet(*arguments)
    assert done.returncode == 2
    assert words in done.stderr and done.stderr.startswith("error: ") and "Traceback" not in done.stderr


@pytest.mark.skipif(sys.platform != "linux", reason="/proc and /dev/full")
def test_a_file_that_cannot_be_written_is_said_before_the_work_and_a_full_disk_leaves_the_table(tmp_path):
    (tmp_path / "link").symlink_to(tmp_path / "target")
    for path in ("/proc/x", str(tmp_path / ("x" * 300))):
        for command in (["train"], ["bench", "codec"]):
            done = comet(*command, "--json", path)
            assert done.returncode == 2 and "cannot be written" in done.stderr and not done.stdout
    done = comet("bench", "codec", "--tensor", "nothing.npy", "--json", str(tmp_path / "link"))
    assert done.returncode == 2 and [entry.name for entry in tmp_path.iterdir()] == ["link"]
    np.save(tmp_path / "x.npy", np.ones((4, 8), dtype=np.float32))
    done = comet("bench", "codec", "--tensor", str(tmp_path / "x.npy"), "--codecs", "lossless", "--json", "/dev/full")
    assert done.returncode == 2 and "lossless" in done.stdout
    assert "error: --json '/dev/full' could not be written: No space left on device." in done.stderr
    done = comet("train", "--set", "policy=baseline", *QUICK, "--json", "/dev/full")
    assert done.returncode == 2 and "finished after 3 steps" in done.stdout
    assert "could not be written: No space left" in done.stderr and "Traceback" not in done.stderr


def test_an_option_that_the_others_make_meaningless_is_noted(tmp_path):
    settings = ["--set", "policy=baseline", "--set", "codec=dct", *QUICK]
    done = comet("train", *settings)
    assert done.returncode == 0 and "note: codec is not read with policy=baseline\n" in done.stderr
    assert done.stderr.count("note:") == 1


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
    settings = tensor["settings"]
    known = {"dataset": "digits", "model": "resnet20", "batch_size": 8, "seed": 0, "image_size": 8}
    assert known.items() <= settings.items()
    assert "resnet20 on digits after 1 step(s), stage1.0.bn1: float32" in done.stdout
    assert [(row["codec"], row["bound"]) for row in found["results"]] == [
        ("cast:dtype=float16", None), ("error_bounded", 1), ("error_bounded", 4),
    ]  # fmt: skip
    assert all(row["num_over_bound"] == 0 for row in found["results"])
    beyond = [count / tensor["num_values"] for count in found["results"][0]["num_over_bounds"]]
    assert " ".join(f"{share:9.2%}" for share in beyond) in done.stdout
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
    assert process.returncode == 128 + signal.SIGINT, error
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
    assert process.returncode == 128 + signal.SIGINT, error
    assert "stopped before everything was measured" in out
    assert json.loads(output.read_text())["stopped"] is True


# Settings that the command would start itself once more for.
SET_UP = {"OMP_WAIT_POLICY": launcher.WAIT_POLICY, "GLIBC_TUNABLES": launcher.ALLOCATOR_TUNABLES}


@pytest.mark.parametrize("command", [["train"], ["bench", "codec"], ["bench", "layers"], ["data-check"]])
def test_ctrl_c_while_it_still_loads_leaves_no_traceback(command):
    process = subprocess.Popen(
        [sys.executable, "-X", "importtime", "-m", "comet_core", *command], cwd=PROJECT, env={**os.environ, **SET_UP},
        stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert process.stderr is not None
    try:
        said = ""
        while "argparse" not in said:  # the first library that the command asks for
            said = process.stderr.readline()
            assert said
        process.send_signal(signal.SIGINT)
        _, error = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == -signal.SIGINT and "Traceback" not in error


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_second_ctrl_c_does_not_wait():
    process = subprocess.Popen(
        [sys.executable, "-m", "comet_core", "train", "--set", "epochs=1000"], cwd=PROJECT,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        for number, caught in ((signal.SIGTERM, True), (signal.SIGINT, False)):
            deadline = time.monotonic() + 60
            while catches(process.pid, number) is not caught:
                assert process.poll() is None and time.monotonic() < deadline
                time.sleep(0.01)
            process.send_signal(signal.SIGINT)
        out, error = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == -signal.SIGINT and not out and "Traceback" not in error
