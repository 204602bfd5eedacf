"""Peaks: seen where they occur, forgotten at a reset."""

import platform
import subprocess
import sys

import pytest
import torch

from comet_core import device_memory
from comet_core.device_memory import DeviceMemory, process_rss_bytes

MIB = 2**20
linux = pytest.mark.skipif(platform.system() != "Linux", reason="only Linux sets the high-water mark back")


@linux
def test_a_peak_is_seen_and_forgotten_after_a_reset():
    memory = DeviceMemory("cpu")
    memory.reset_peak()
    before = memory.peak()["peak_rss_bytes"]
    block = torch.ones(16 * MIB)  # 64 MiB
    del block
    assert 60 <= (memory.peak()["peak_rss_bytes"] - before) / MIB <= 80
    memory.reset_peak()
    assert (memory.peak()["peak_rss_bytes"] - before) / MIB <= 10
    assert memory.source.startswith("VmHWM")


@linux
@pytest.mark.parametrize("generations", [1, 2])
def test_what_processes_below_hold_alone_is_counted(generations):
    memory = DeviceMemory("cpu")
    memory.reset_peak()
    before, rss_before = memory.peak()["peak_rss_bytes"], process_rss_bytes()
    code = "block = b'x' * (64 << 20); print('held', flush=True); input()"
    if generations == 2:
        code = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {code!r}])"
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        assert child.stdout.readline() == b"held\n"
        assert 64 <= (memory.peak()["peak_rss_bytes"] - before) / MIB <= 100
        assert 64 <= (process_rss_bytes() - rss_before) / MIB <= 100
        child.communicate(b"\n")


def test_without_a_gpu_there_is_no_figure_for_one():
    memory = DeviceMemory(torch.device("cpu"))
    peak = memory.peak()
    assert peak.pop("peak_rss_bytes") > 0
    assert peak == dict.fromkeys(("peak_allocated_bytes", "peak_reserved_bytes", "device_used_bytes"))
    assert memory.current()["allocated_bytes"] is None


def test_without_proc_the_source_is_named_and_the_figure_is_that_of_getrusage(tmp_path, monkeypatch):
    monkeypatch.setattr(device_memory, "_PROCESS", tmp_path / "none")
    memory = DeviceMemory("cpu")
    memory.reset_peak()
    assert memory.source == "ru_maxrss of the process since its start"
    assert memory.peak()["peak_rss_bytes"] >= 0.9 * process_rss_bytes()


@pytest.mark.gpu
def test_a_peak_on_the_gpu_is_seen_and_forgotten_after_a_reset():
    memory = DeviceMemory("cuda")
    memory.reset_peak()
    before = memory.peak()["peak_allocated_bytes"]
    block = torch.ones(16 * MIB, device="cuda")
    del block
    assert memory.peak()["peak_allocated_bytes"] - before == 64 * MIB
    assert memory.peak()["device_used_bytes"] >= memory.peak()["peak_reserved_bytes"] >= 64 * MIB
    memory.reset_peak()
    assert memory.peak()["peak_allocated_bytes"] == before
