"""The loop: data, forward under the policy, backward, step, record, evaluate.

A plain loop with the session's one line in it. Everything random is drawn from the seed: weights from torch's global
generator, the data's order, crops and flips from generators of their own, so that twins see the same batches whatever
their policy draws. Stopping is asked for between two steps; what was recorded until then stays.
"""

import math
import os
import platform
import statistics
import subprocess
import time
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

import comet_core
from comet_core.codecs import get_codec
from comet_core.codecs.base import ErrorBound
from comet_core.config import RunConfig, check_system, parse_codec_params, parse_layer_bounds
from comet_core.datasets import Dataset, load_dataset
from comet_core.device_memory import peak_rss_source, process_rss_bytes
from comet_core.metrics import PEAK_PARTS, EvalMetrics, Recorder, StepMetrics, compression_ratio
from comet_core.models import build_model

WARM_UP_STEPS = 10  # left out of the mean step time: compilation, first touch of memory


def train(
    config: RunConfig,
    recorder: Recorder,
    *,
    should_stop: Callable[[], bool] = lambda: False,
    progress: Callable[[int, int], None] | None = None,
    on_start: Callable[[dict[str, Any]], None] | None = None,
) -> dict[str, Any]:
    """Train as `config` says, hand the history to `recorder`, and return the run's summary.

    `should_stop` is asked after each step. `progress` gets (steps done, steps in all). `on_start` gets, once data and
    model are there, `num_steps_total`, `environment` (versions, machine) and `start_rss_bytes`. Raises ValueError for
    what the user can change (data, device), RuntimeError when the loss stops being finite.
    """
    check_system()
    device = _device(config)
    if config.num_threads:
        torch.set_num_threads(config.num_threads)
    data = load_dataset(config)
    torch.manual_seed(config.seed)
    model = build_model(config.model, data.num_classes, data.num_channels, data.image_size).to(device)
    optimizer = build_optimizer(model, config)
    steps_per_epoch = data.steps_per_epoch
    num_steps = config.epochs * steps_per_epoch
    scheduler = learning_rate_schedule(config, optimizer, num_steps)
    with comet_core.attach(
        model,
        optimizer,
        policy=config.policy,
        controller=config.controller,
        noise_budget=config.noise_budget,
        norm_budget=config.norm_budget,
        momentum_fraction=config.momentum_fraction,
        error_bound=config.error_bound,
        memory_bytes=config.memory_bytes,
        layer_bounds=parse_layer_bounds(config.layer_bounds),
        collect_every=config.collect_every,
        codec=config.codec,
        codec_params=parse_codec_params(config.codec, config.codec_params),
        recorder=recorder,
        tune_allocator=False,  # whoever starts the process has set it up: it counts from the first allocation on
    ) as session:
        facts = {"num_steps_total": num_steps, "environment": environment(device)}
        if config.policy != "baseline":
            load_kernels(config, device)
        start_rss_bytes = process_rss_bytes()  # the engine and its kernels are code, not what training takes
        if on_start is not None:
            on_start({**facts, "start_rss_bytes": start_rss_bytes})
        summary = _Summary(start_rss_bytes)
        started = time.perf_counter()
        stopped = False
        for epoch in range(1, config.epochs + 1):
            model.train()
            summary.start_epoch()
            for images, labels in data.train_batches(epoch):
                images, labels = images.to(device), labels.to(device)
                learning_rate = optimizer.param_groups[0]["lr"]
                optimizer.zero_grad(set_to_none=True)
                outputs = model(images)
                loss = F.cross_entropy(outputs, labels)
                loss.backward()
                optimizer.step()
                scheduler.step()
                train_loss = loss.item()
                summary.add(
                    session.step(
                        train_loss=train_loss,
                        train_accuracy=(outputs.detach().argmax(1) == labels).float().mean().item(),
                        num_samples=len(labels),
                        epoch=epoch,
                        learning_rate=learning_rate,
                    )
                )
                del outputs, loss  # else they, and what hangs on them, live into the next forward
                if progress is not None:
                    progress(session.num_steps, num_steps)
                if not math.isfinite(train_loss):
                    raise RuntimeError(
                        f"the loss became {train_loss} at step {session.num_steps} of {num_steps}, epoch {epoch}; "
                        f"a lower learning_rate (now {config.learning_rate:g}) usually helps."
                    )
                stopped = should_stop()
                if stopped:
                    break
            if stopped:
                break
            evaluated = evaluate(model, data, session.num_steps, epoch, started)
            recorder.record_eval(evaluated)
            summary.evaluated(evaluated)
    return {"status": "stopped" if stopped else "finished", **summary.to_dict(time.perf_counter() - started)}


def load_kernels(config: RunConfig, device: torch.device) -> None:
    """Use the codec once: its kernels take 70 MB and, not yet compiled, many seconds, whatever is trained."""
    codec = get_codec(config.codec, **parse_codec_params(config.codec, config.codec_params))
    codec.decode(codec.encode(torch.ones(2, 3, 4, 4, device=device), ErrorBound("abs", 0.1)))


def evaluate(model: nn.Module, data: Dataset, step: int, epoch: int, started: float) -> EvalMetrics:
    """Loss and accuracy on the test images; the model is left in evaluation mode."""
    began = time.perf_counter()
    device = next(model.parameters()).device
    model.eval()
    loss, right, count = 0.0, 0, 0
    with torch.no_grad():
        for images, labels in data.test_batches():
            outputs = model(images.to(device))
            labels = labels.to(device)
            loss += F.cross_entropy(outputs, labels, reduction="sum").item()
            right += int((outputs.argmax(1) == labels).sum())
            count += len(labels)
    now = time.perf_counter()
    return EvalMetrics(
        step=step,
        epoch=epoch,
        test_loss=loss / count,
        test_accuracy=right / count,
        num_samples=count,
        eval_seconds=now - began,
        wall_seconds=now - started,
    )


def build_optimizer(model: torch.nn.Module, config: RunConfig) -> torch.optim.Optimizer:
    """The one that `config` names, over all parameters."""
    rate, decay = config.learning_rate, config.weight_decay
    if config.optimizer == "adam":
        return torch.optim.Adam(model.parameters(), lr=rate, weight_decay=decay)
    return torch.optim.SGD(model.parameters(), lr=rate, momentum=config.momentum, weight_decay=decay)


def learning_rate_schedule(
    config: RunConfig, optimizer: torch.optim.Optimizer, num_steps: int
) -> torch.optim.lr_scheduler.LRScheduler:
    """The schedule over `num_steps` steps; see `config.SCHEDULES` for their shapes. Momentum stays as it is."""
    schedulers = torch.optim.lr_scheduler
    match config.schedule:
        case "one_cycle":
            return schedulers.LambdaLR(optimizer, lambda step: _one_cycle(step, num_steps))
        case "cosine":
            return schedulers.CosineAnnealingLR(optimizer, num_steps)
        case "step":
            return schedulers.MultiStepLR(optimizer, [max(1, num_steps // 2), max(1, num_steps * 3 // 4)])
        case _:
            return schedulers.LambdaLR(optimizer, lambda step: 1.0)


def _one_cycle(step: int, num_steps: int) -> float:
    """Up on half a cosine from a 25th over the first 30 %, then down to zero on another."""
    top = 0.3 * num_steps
    if step < top:
        return 1 / 25 + (1 - 1 / 25) * (1 - math.cos(math.pi * step / top)) / 2
    return (1 + math.cos(math.pi * (step - top) / max(num_steps - top, 1))) / 2


def environment(device: torch.device) -> dict[str, Any]:
    """Versions and machine, so that a figure can be repeated."""
    versions = {}
    for package in ("torch", "torchvision", "numpy", "numba", "zstandard"):
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            versions[package] = "not installed"
    return {
        "comet_core": comet_core.__version__,
        "commit": _commit(),
        "python": platform.python_version(),
        **versions,
        "system": platform.platform(),
        "processor": _processor(),
        "num_cores": os.cpu_count(),
        "num_threads": torch.get_num_threads(),
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
        "peak_rss_source": peak_rss_source(),
        "glibc_tunables": os.environ.get("GLIBC_TUNABLES", ""),
        "omp_wait_policy": os.environ.get("OMP_WAIT_POLICY", ""),
    }


def _device(config: RunConfig) -> torch.device:
    if config.device == "cuda" and not torch.cuda.is_available():
        raise ValueError("device is 'cuda', but torch sees no NVIDIA GPU here; choose device=cpu.")
    return torch.device(config.device)


def _commit() -> str:
    try:
        found = subprocess.run(
            ["git", "rev-parse", "HEAD"], cwd=Path(__file__).parent, capture_output=True, text=True, timeout=5
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return found.stdout.strip()


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "")


class _Summary:
    """Collects a run's figures; ratios are those of the last epoch, sums over its steps.

    The parts of the peak are those of the step with the largest one.
    """

    def __init__(self, start_rss_bytes: int) -> None:
        self._start_rss_bytes = start_rss_bytes
        self._num_steps = 0
        self._seconds: list[float] = []
        self._accuracies: list[float] = []
        self._peaks: dict[str, int] = {}
        self._fullest: StepMetrics | None = None
        self.start_epoch()

    def start_epoch(self) -> None:
        self._bytes = dict.fromkeys(("saved_bytes", "held_bytes", "conv_input_saved_bytes", "conv_input_held_bytes"), 0)

    def add(self, step: StepMetrics) -> None:
        self._num_steps += 1
        for name in self._bytes:
            self._bytes[name] += getattr(step, name)
        for name in ("peak_rss_bytes", "peak_allocated_bytes", "peak_reserved_bytes", "device_used_bytes"):
            value = getattr(step, name)
            if value is not None:
                self._peaks[name] = max(value, self._peaks.get(name, 0))
        if self._fullest is None or (step.peak_bytes or 0) > (self._fullest.peak_bytes or 0):
            self._fullest = step
        if self._num_steps > WARM_UP_STEPS and step.step_seconds is not None:
            self._seconds.append(step.step_seconds)

    def evaluated(self, metrics: EvalMetrics) -> None:
        assert metrics.test_accuracy is not None
        self._accuracies.append(metrics.test_accuracy)

    def to_dict(self, wall_seconds: float) -> dict[str, Any]:
        counted = self._bytes
        rss = self._peaks.get("peak_rss_bytes")
        return {
            "num_steps": self._num_steps,
            "test_accuracy": self._accuracies[-1] if self._accuracies else None,
            "best_test_accuracy": max(self._accuracies, default=None),
            "compression_ratio": compression_ratio(counted["saved_bytes"], counted["held_bytes"]),
            "conv_input_ratio": compression_ratio(counted["conv_input_saved_bytes"], counted["conv_input_held_bytes"]),
            "start_rss_bytes": self._start_rss_bytes,
            **self._peaks,
            "peak_rss_above_start_bytes": None if rss is None else rss - self._start_rss_bytes,
            "peak_step": None if self._fullest is None else self._fullest.step,
            "peak_parts": {name: getattr(self._fullest, name) for name in PEAK_PARTS} if self._fullest else None,
            "mean_step_seconds": statistics.fmean(self._seconds) if self._seconds else None,
            "median_step_seconds": statistics.median(self._seconds) if self._seconds else None,
            "wall_seconds": wall_seconds,
        }
