"""`attach(model, optimizer, policy=...)`: compressed training in anybody's own loop.

    with comet_core.attach(model, optimizer, policy="compress", controller="noise", noise_budget=0.05) as session:
        for x, y in batches:
            optimizer.zero_grad(); loss = loss_fn(model(x), y); loss.backward(); optimizer.step()
            session.step()

The session joins the parts: a policy that decides, the hooks that ask it, the ledger that counts, the device's memory.
The model and its parameters are not changed; layers are named by their path in the model. Several sessions coexist.
"""

import ctypes
import functools
import logging
import os
import platform
import time
import warnings
import weakref
from collections.abc import Mapping
from dataclasses import asdict
from types import TracebackType
from typing import Any, Self

import torch
from torch import Tensor, nn

from comet_core import codecs, config
from comet_core.activations import SavedTensors, refuse_compiled, weakly
from comet_core.controllers import CONTROLLERS
from comet_core.device_memory import DeviceMemory
from comet_core.memory_parts import MemoryParts
from comet_core.metrics import LayerMetrics, Recorder, StepMetrics, compression_ratio
from comet_core.policies.base import MemoryPolicy
from comet_core.policies.baseline import BaselinePolicy
from comet_core.policies.compress import CompressPolicy
from comet_core.saved_records import Ledger
from comet_core.storage_audit import StorageAudit, audit

_log = logging.getLogger(__name__)
_attached: weakref.WeakValueDictionary[int, "Session"] = weakref.WeakValueDictionary()  # by id of the model
MMAP_THRESHOLD_BYTES = 2**20  # freed blocks above this go back to the system at once (DESIGN section 4)


def attach(
    model: nn.Module,
    optimizer: torch.optim.Optimizer | list[torch.optim.Optimizer] | None,
    *,
    policy: str = "compress",
    controller: str = "noise",
    noise_budget: float = 0.05,
    norm_budget: float = 0.2,
    momentum_fraction: float = 0.01,
    error_bound: float = 1e-3,
    memory_bytes: int = 2**30,
    layer_bounds: Mapping[str, float | str] | None = None,
    collect_every: int = 100,
    codec: str = "error_bounded",
    codec_params: dict[str, Any] | None = None,
    grad_scaler: Any = None,
    recorder: Recorder | None = None,
    tune_allocator: bool = True,
) -> "Session":
    """Attach a memory policy to `model` and return the session; use it in `with`, or call `close()`.

    `optimizer`: the one, a list, or None; read for its momentum, never changed. Budgets are shares (0.05 is 5 %), see
    `RunConfig` for ranges. `memory_bytes`: what may be held for backward, controller "memory". `layer_bounds`: pattern
    of layer names -> absolute bound or "exact", in place of the controller's. `grad_scaler`: the AMP scaler whose scale
    is on the gradients. `recorder` gets the history.
    `tune_allocator` lowers glibc's mmap threshold for this process, so that freed memory really leaves it.
    Raises ValueError for an unknown name, a value out of range, or a compiled model.
    """
    config.check_system()
    config.RunConfig(
        policy=policy,
        controller=controller,
        noise_budget=noise_budget,
        norm_budget=norm_budget,
        codec=codec,
        momentum_fraction=momentum_fraction,
        error_bound=error_bound,
        memory_bytes=memory_bytes,
        collect_every=collect_every,
    )
    given_bounds = config.check_layer_bounds({} if layer_bounds is None else layer_bounds)
    params = config.check_codec_params(codec, {} if codec_params is None else codec_params)
    if not isinstance(model, nn.Module):
        raise ValueError(f"model is a {type(model).__name__}; give the torch.nn.Module that is trained.")
    refuse_compiled(model)
    given = [] if optimizer is None else optimizer
    optimizers = list(given) if isinstance(given, list | tuple) else [given]
    for one in optimizers:
        if not isinstance(one, torch.optim.Optimizer):
            raise ValueError(
                f"optimizer is a {type(one).__name__}; give a torch.optim.Optimizer, a list of them, or None."
            )
    if id(model) in _attached:
        raise ValueError("model has a session already; leave its with block, or call its close(), and attach again.")
    if policy == "compress":
        rules: dict[str, dict[str, Any]] = {
            "noise": {"noise_budget": noise_budget, "norm_budget": norm_budget},
            "momentum": {"momentum_fraction": momentum_fraction},
            "memory": {"memory_bytes": memory_bytes},
            "fixed": {"error_bound": error_bound},
        }
        chosen: MemoryPolicy = CompressPolicy(
            controller=CONTROLLERS[controller](**rules[controller], layer_bounds=given_bounds),
            codec=codecs.get_codec(codec, **params),
            collect_every=collect_every,
            grad_scaler=grad_scaler,
        )
    else:
        chosen = BaselinePolicy()
    if tune_allocator:
        _tune_allocator()
    return Session(model, optimizers, chosen, recorder)


class Session:
    """A policy at work on a model. `step()` closes an iteration; `last_step` and `layers` say what it was."""

    def __init__(
        self, model: nn.Module, optimizers: list[torch.optim.Optimizer], policy: MemoryPolicy, recorder: Recorder | None
    ) -> None:
        self.policy, self.recorder = policy, recorder
        self.last_step: StepMetrics | None = None
        self.layers: list[LayerMetrics] = []
        self.num_steps = 0
        self._model = model
        self._started = time.perf_counter()
        device = next((parameter.device for parameter in model.parameters()), torch.device("cpu"))
        self._memory = DeviceMemory(device)
        self._ledger = Ledger()
        self._parts = MemoryParts(model, optimizers, self._ledger)
        policy.attach(model, optimizers)
        self._num_optimizer_steps = 0
        self._step_hooks = [one.register_step_post_hook(weakly(self._count_optimizer_step)) for one in optimizers]
        self._saved_tensors = SavedTensors(model, policy, self._ledger)
        _attached[id(model)] = self
        self._memory.reset_peak()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Take every hook off again. Graphs that are still alive can be used; may be called twice."""
        _attached.pop(id(self._model), None)
        self._saved_tensors.close()
        self.policy.close()
        self._parts.close()
        for hook in self._step_hooks:
            hook.remove()

    def step(
        self,
        *,
        train_loss: float | Tensor | None = None,
        train_accuracy: float | None = None,
        num_samples: int | None = None,
        epoch: int | None = None,
        learning_rate: float | None = None,
    ) -> StepMetrics:
        """Close the iteration: statistics, bounds, metrics. Once an optimizer step, before or after `zero_grad`.

        Raises ValueError where the model was compiled by torch.compile since the last one.
        """
        refuse_compiled(self._model)
        now = time.perf_counter()
        self.num_steps += 1
        saved = self._saved_tensors
        layer_bytes = saved.layer_bytes()
        count = self._ledger.close_iteration()
        loss = train_loss.item() if isinstance(train_loss, Tensor) else train_loss
        news = self.policy.after_step(self.num_steps, loss=loss, held_bytes=count.held)
        batch_bytes = self._ledger.batch_bytes
        parts, peaks = self._parts.close_iteration(count), self._memory.peak()
        on_gpu = peaks["peak_allocated_bytes"]
        peak = peaks["peak_rss_bytes"] if on_gpu is None else on_gpu
        assert peak is not None
        self.last_step = StepMetrics(
            step=self.num_steps,
            epoch=epoch,
            train_loss=loss,
            train_accuracy=train_accuracy,
            learning_rate=learning_rate,
            num_samples=num_samples,
            saved_bytes=count.saved,
            held_bytes=count.held,
            conv_input_saved_bytes=count.conv_input_saved,
            conv_input_held_bytes=count.conv_input_held,
            batch_bytes=batch_bytes,
            compression_ratio=compression_ratio(count.saved, count.held),
            conv_input_ratio=compression_ratio(count.conv_input_saved, count.conv_input_held),
            static_bytes=self._parts.static_bytes,
            **asdict(parts),
            other_bytes=peak - parts.known_bytes - batch_bytes,
            **peaks,
            step_seconds=None if saved.forward_started is None else now - saved.forward_started,
            pack_seconds=saved.pack_seconds,
            unpack_seconds=saved.unpack_seconds,
            wall_seconds=now - self._started,
        )
        if news or not self.layers:
            self.layers = self.policy.layer_metrics(self.num_steps, layer_bytes)
        saved.close_iteration(bounds_changed=news)
        audits, events = self.policy.take_audits(), self.policy.take_events()
        if self.recorder is not None:
            self.recorder.record_step(self.last_step)
            if news and self.layers:
                self.recorder.record_layers(self.layers)
            if audits:
                self.recorder.record_audits(audits)
            if events:
                self.recorder.record_events(events)
        self._memory.reset_peak()
        return self.last_step

    def held_by_operator(self) -> dict[str, int]:
        """Bytes held at this moment, by operator; between forward and backward their sum is the step's `held_bytes`."""
        return self._saved_tensors.held_by_operator()

    def audit(self) -> StorageAudit:
        """Which storages that were saved for backward are alive, who keeps them, and why. Print it for a table.

        Between forward and backward is the moment that matters; before and after, it is empty.
        """
        return audit(self._model, self._ledger)

    def _count_optimizer_step(self, *_: Any) -> None:
        self._num_optimizer_steps += 1
        if self._num_optimizer_steps == 3 and self.num_steps == 0:
            warnings.warn(
                "three optimizer steps without session.step(): bounds stay at their start-up values; call "
                "session.step() once after each optimizer step.",
                stacklevel=2,
            )


@functools.cache
def _tune_allocator() -> None:
    """Once a process: glibc returns freed blocks of 1 MiB and more to the system (mallopt, M_MMAP_THRESHOLD is -3)."""
    if platform.libc_ver()[0] != "glibc" or "mmap_threshold" in os.environ.get("GLIBC_TUNABLES", ""):
        return
    if ctypes.CDLL(None).mallopt(-3, MMAP_THRESHOLD_BYTES):
        _log.info(
            "glibc's mmap threshold set to %d bytes, so that freed activations leave the process", MMAP_THRESHOLD_BYTES
        )
