"""What fits: bytes an operator, ratios at several budgets, the predicted peak and the largest batch, before training.

A few iterations at two small batches, plain and compressed, say what grows with the batch and what does not; the rest
is straight lines. Predicted peak = what the process has without a network + parameters, gradients and optimizer + the
batch + what is kept for backward + the largest operator's working set (its input and the gradients of input and
output). That is a floor: workspaces of an operator and what the allocator keeps come on top, so MARGIN is left when the
largest batch is looked for. Bounds follow gradients, so ratios after training differ from those of a first iteration.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import comet_core
from comet_core.config import RunConfig
from comet_core.datasets import load_dataset
from comet_core.device_memory import process_rss_bytes
from comet_core.metrics import compression_ratio
from comet_core.models import build_model
from comet_core.trainer import build_optimizer

SMALL, LARGER = 8, 16
"""Batches at which everything is measured."""
NUM_STEPS = 4
"""Iterations before ratios are read: bounds exist from the third on."""
BUDGETS = (0.01, 0.05, 0.2)
"""Noise budgets of weights; norms get four times as much, as by default."""
MARGIN = 0.1
"""A share of the predicted peak that is left free."""

Line = tuple[float, float]
"""Bytes without any sample, and bytes a sample."""


def plan(
    config: RunConfig,
    batch_size: int,
    memory_bytes: int | None = None,
    *,
    histories: Sequence[dict[str, Any]] = (),
    progress: Callable[[str], None] = lambda what: None,
) -> dict[str, Any]:
    """Measure `config.model` on `config.dataset` at small batches and predict `batch_size`; all figures in bytes.

    `histories`: what `train --json` wrote; those of the same network, images and optimizer say how far off the
    prediction of their peak is. `progress` is told what is measured next. Raises ValueError for what the user can
    change.
    """
    level = process_rss_bytes()
    data = load_dataset(config)
    images, labels = next(iter(data.train_batches(1)))
    if len(images) < LARGER:
        raise ValueError(f"the data set gives a batch of {len(images)} images; planning takes {LARGER} or more.")
    torch.manual_seed(config.seed)
    model = build_model(config.model, data.num_classes, data.num_channels, data.image_size)
    measured = {}
    for name, options in _arms(config).items():
        progress(name)
        measured[name] = _measured(model, images[:LARGER], labels[:LARGER], config, options)
    plain = measured["baseline"]
    parameters = sum(parameter.nbytes for parameter in model.parameters())
    static = level + plain["static_bytes"]
    moving = _sum(_working_set(model, images), (0.0, images[0].nbytes))

    def peak(name: str, size: int) -> int:
        return round(_at(_sum((static, 0.0), moving, measured[name]["held"]), size))

    saved_bytes = round(_at(plain["held"], batch_size))
    arms: dict[str, dict[str, Any]] = {}
    for name, found in measured.items():
        held_bytes = round(_at(found["held"], batch_size))
        arms[name] = {
            "compression_ratio": compression_ratio(saved_bytes, held_bytes),
            "held_bytes": held_bytes,
            "predicted_peak_bytes": peak(name, batch_size),
        }
        if memory_bytes is not None:
            arms[name] |= _fit(partial(peak, name), memory_bytes)
    return {
        "config": {**config.to_dict(), "batch_size": batch_size},
        "memory_bytes": memory_bytes,
        "margin": MARGIN,
        "process_bytes": level,
        "parameter_bytes": parameters,
        "static_bytes": plain["static_bytes"],
        "working_set_bytes": round(_at(moving, batch_size)),
        "saved_bytes": saved_bytes,
        "operators": _operators(plain, measured[_name(config.noise_budget)], batch_size),
        "arms": arms,
        "past": [_past(history, config, measured, static - level, moving) for history in histories],
    }


def _name(budget: float) -> str:
    return f"noise budget {budget:.0%}"


def _arms(config: RunConfig) -> dict[str, dict[str, Any]]:
    """Options of `attach` for everything that is compared."""
    budgets = sorted({*BUDGETS, config.noise_budget})
    return {
        "baseline": {"policy": "baseline"},
        "lossless": {"policy": "compress", "codec": "lossless"},
        **{
            _name(budget): {"policy": "compress", "noise_budget": budget, "norm_budget": min(4 * budget, 1.0)}
            for budget in budgets
        },
    }


def _measured(
    model: nn.Module, images: Tensor, labels: Tensor, config: RunConfig, options: dict[str, Any]
) -> dict[str, Any]:
    """Lines of held bytes, in all and an operator, and the bytes of parameters, gradients and optimizer."""
    start = {name: value.clone() for name, value in model.state_dict().items()}
    optimizer = build_optimizer(model, replace(config, learning_rate=1e-4))
    found = {}
    with comet_core.attach(model, optimizer, tune_allocator=False, **options) as session:

        def step(size: int) -> dict[str, int]:
            optimizer.zero_grad(set_to_none=True)
            loss = F.cross_entropy(model(images[:size]), labels[:size])
            held = session.held_by_operator()
            loss.backward()
            optimizer.step()
            session.step()
            return held

        for _ in range(NUM_STEPS):
            step(LARGER)
        found = {size: step(size) for size in (LARGER, SMALL)}
        static_bytes = session.last_step.static_bytes if session.last_step else 0
    model.zero_grad(set_to_none=True)
    model.load_state_dict(start)
    lines = {
        name: _line(found[SMALL].get(name, 0), found[LARGER].get(name, 0)) for name in {**found[SMALL], **found[LARGER]}
    }
    return {"held": _sum(*lines.values()), "operators": lines, "static_bytes": static_bytes or 0}


def _working_set(model: nn.Module, images: Tensor) -> Line:
    return _line(largest_working_set(model, images[:SMALL]), largest_working_set(model, images[:LARGER]))


def largest_working_set(model: nn.Module, images: Tensor) -> int:
    """Bytes of input, its gradient and the output's gradient, of the module without children that has most."""
    most = 0

    def watch(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        nonlocal most
        if isinstance(output, Tensor) and args and isinstance(args[0], Tensor):
            most = max(most, 2 * args[0].nbytes + output.nbytes)

    leaves = [module for module in model.modules() if not list(module.children())]
    handles = [leaf.register_forward_hook(watch) for leaf in leaves]
    try:
        with torch.no_grad():
            model(images)
    finally:
        for handle in handles:
            handle.remove()
    return most


def _line(at_small: float, at_larger: float) -> Line:
    slope = (at_larger - at_small) / (LARGER - SMALL)
    return at_small - slope * SMALL, slope


def _sum(*lines: Line) -> Line:
    return sum(line[0] for line in lines), sum(line[1] for line in lines)


def _at(line: Line, size: int) -> float:
    return line[0] + line[1] * size


def _operators(plain: dict[str, Any], compressed: dict[str, Any], size: int) -> list[dict[str, Any]]:
    """A row an operator, the largest first."""
    rows = [
        {
            "operator": name,
            "saved_bytes": round(_at(line, size)),
            "held_bytes": round(_at(compressed["operators"].get(name, (0.0, 0.0)), size)),
        }
        for name, line in plain["operators"].items()
    ]
    return sorted(rows, key=lambda row: -int(row["saved_bytes"]))


def _fit(peak: Callable[[int], int], memory_bytes: int) -> dict[str, int]:
    """The largest batch whose peak, with the margin, is within the memory; what is short of it where none is."""
    room = memory_bytes / (1 + MARGIN)
    slope = peak(2) - peak(1)
    size = int((room - peak(1)) // slope) + 1 if room >= peak(1) else 0
    while size and peak(size) > room:  # lines are rounded
        size -= 1
    while size and peak(size + 1) <= room:
        size += 1
    return {"largest_batch": size, "short_bytes": 0 if size else round(peak(1) * (1 + MARGIN)) - memory_bytes}


def _past(
    history: dict[str, Any], config: RunConfig, measured: dict[str, Any], static: float, moving: Line
) -> dict[str, Any]:
    """Predicted and measured peak above the start, of a run of the same network on the same images."""
    run, own = history["config"], config.to_dict()
    other = [name for name in ("model", "dataset", "image_size", "device") if run.get(name) != own[name]]
    if other:
        return {"batch_size": run.get("batch_size"), "reason": f"another {', '.join(other)}"}
    arm = "baseline" if run["policy"] == "baseline" else _name(run["noise_budget"])
    peak = history["summary"].get("peak_rss_above_start_bytes")
    if arm not in measured or peak is None:
        return {"batch_size": run["batch_size"], "reason": f"no measurement of {arm}, or of its peak"}
    # The start of a run comes after its network was made.
    predicted = round(_at(_sum((static, 0.0), moving, measured[arm]["held"]), run["batch_size"]))
    return {
        "arm": arm,
        "batch_size": run["batch_size"],
        "predicted_bytes": predicted,
        "measured_bytes": peak,
        "predicted_over_measured": predicted / peak,
    }
