"""One loop of a user, run with and without a session: gradients against plain autograd, bytes against the truth.

A situation is a loop: it trains a model for some iterations and calls `look()` between forward and backward, `done()`
after each iteration. `check` runs it four times from the same weights and random numbers: without a session, and with
the policy `baseline`, the lossless codec and the error-bounded one.

* Gradients, parameters and buffers are equal bit for bit without loss. Within a fixed error bound, a weight's gradient
  is off by no more than bound * sum |d| over the gradients d that arrive at its layer's outputs: each of them is
  multiplied with one stored input. Everything else is equal but for rounding. Where there are norms, whose errors go
  upstream, a scale's gradient is off by at most 4 of its predicted sigma, bound / (s * sqrt 3) * sqrt(sum d^2) (THEORY
  section 2, s the channel's standard deviation), and every other one by at most 2 %.
* Saved bytes are those of the unique storages that hooks of the plain run see, without parameters, buffers and batch.
* Held bytes are those of the original storages that are alive, by weak references, and of all records that exist.
"""

import gc
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils import _pytree

import comet_core
from comet_core.codecs.base import Encoded

BOUND = 2.0**-7


@dataclass(frozen=True)
class Situation:
    build: Callable[[], nn.Module]
    loop: Callable[["Run"], None]
    limit: str  # "sum |d|", "norm", or "none": no limit is known, so without loss only
    dtype: torch.dtype  # in which gradients are computed


@dataclass
class Gradients:
    grads: dict[str, torch.Tensor]
    state: dict[str, torch.Tensor]
    sums: dict[str, torch.Tensor]  # of |d|, by name of the weight
    sigmas: dict[str, torch.Tensor]  # of a norm's scale, for a bound of 1
    saved_bytes: int


def storages_of(tensor):
    """The storages of a tensor, by its layout."""
    if tensor.layout is torch.sparse_coo:
        return [tensor._indices().untyped_storage(), tensor._values().untyped_storage()]
    if tensor.layout is torch.sparse_csr:
        parts = (tensor.crow_indices(), tensor.col_indices(), tensor.values())
        return [part.untyped_storage() for part in parts]
    if hasattr(tensor, "__tensor_flatten__"):
        return [storage for name in tensor.__tensor_flatten__()[0] for storage in storages_of(getattr(tensor, name))]
    try:
        return [tensor.untyped_storage()]
    except NotImplementedError:  # mkldnn's own memory
        return []


class Run:
    """One arm of a situation, as the loop sees it: the model, and what to call when."""

    def __init__(self, model: nn.Module, before: list[Gradients] | None, session: Any, situation: Situation) -> None:
        self.model, self.session = model, session
        self.iterations: list[Gradients] = []
        self._before, self._situation = before, situation
        self._sums: dict[str, torch.Tensor] = {}
        self._sigmas: dict[str, torch.Tensor] = {}
        self._handles: weakref.WeakSet[Any] = weakref.WeakSet()
        self._known: dict[int, tuple[StorageWeakRef, int]] = {}
        self._peak, self._looked = 0, (0, 0)
        self._exact = session is None or session.policy.keeps_exact() or session.policy.codec.guarantee == "exact"
        if session is None:
            self._watch_forward()
            self._watch_outputs()
        else:
            self._watch_pack()

    def look(self) -> None:
        """Forward is over, backward is not: count."""
        if self.session is None:
            return
        counted = self.session._ledger.now
        if counted.held != self._truly_held():
            gc.collect()  # numba's compiler, in a process that compiles, leaves its frames to the garbage collector
        assert counted.held == self._truly_held()
        self._looked = max(self._looked, (counted.saved, counted.held))

    def _truly_held(self) -> int:
        records = sum(found.nbytes for found in gc.get_objects() if type(found) is Encoded)
        return records + sum(num_bytes for reference, num_bytes in self._known.values() if not reference.expired())

    def done(self) -> None:
        """The iteration is over: compare."""
        index = len(self.iterations)
        grads = {name: p.grad.clone() for name, p in self.model.named_parameters() if p.grad is not None}
        state = {name: value.clone() for name, value in self.model.state_dict().items()}
        self.iterations.append(Gradients(grads, state, self._sums, self._sigmas, self._peak))
        self._sums, self._sigmas, self._peak = {}, {}, 0
        if self.session is None or self._before is None:
            return
        step = self.session.step()
        plain = self._before[index]
        assert step.saved_bytes == plain.saved_bytes, (index, step.saved_bytes, plain.saved_bytes)
        if step.saved_bytes == self._looked[0]:  # else most was saved in the middle of a forward
            assert step.held_bytes == self._looked[1]
        self._looked = (0, 0)
        assert grads.keys() == plain.grads.keys()
        for name in grads:
            self._compare(name, grads[name], plain)
        if self._exact:
            for name, value in plain.state.items():
                torch.testing.assert_close(state[name], value, rtol=0, atol=0, equal_nan=True)
        else:  # the next iteration starts from the plain run's weights
            self.model.load_state_dict(plain.state)

    def _compare(self, name: str, found: torch.Tensor, plain: Gradients) -> None:
        expected = plain.grads[name]
        if self._exact:
            torch.testing.assert_close(found, expected, rtol=0, atol=0, equal_nan=True, msg=lambda m: f"{name}: {m}")
            return
        error = (found - expected).double()
        if self._situation.limit == "norm" and name not in plain.sigmas:
            assert error.norm() <= 0.02 * expected.double().norm(), (name, error.norm() / expected.double().norm())
            return
        rounding = 8 * torch.finfo(self._situation.dtype).eps * expected.abs().max().double()
        limit = rounding
        if name in plain.sigmas:
            limit = 4 * BOUND * plain.sigmas[name] + rounding
        elif name in plain.sums:
            sums = plain.sums[name].double()
            limit = BOUND * 1.001 * sums.view(-1, *[1] * (expected.dim() - 1)) + rounding
        assert (error.abs() <= limit).all(), (name, error.abs().max(), limit)

    def _watch_forward(self) -> None:
        """Count what plain hooks see in the model's forward: each storage once, and no more once it is not needed."""
        forward = self.model.forward

        def watched(*args: Any, **kwargs: Any) -> Any:
            tensors = [leaf for leaf in _pytree.tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
            given = [tensor for tensor in tensors if tensor.grad_fn is None]
            static = [*self.model.parameters(), *self.model.buffers(), *given]
            excluded = {storage._cdata for tensor in static for storage in storages_of(tensor)}

            class Kept:
                def __init__(self, tensor: torch.Tensor) -> None:
                    self.tensor = tensor.detach()
                    self.storages = [s for s in storages_of(tensor) if s._cdata not in excluded]

            def pack(tensor: torch.Tensor) -> Kept:
                kept = Kept(tensor)
                self._handles.add(kept)
                unique = {s._cdata: s.nbytes() for handle in self._handles for s in handle.storages}
                self._peak = max(self._peak, sum(unique.values()))
                return kept

            with torch.autograd.graph.saved_tensors_hooks(pack, lambda kept: kept.tensor):
                return forward(*args, **kwargs)

        self.model.forward = watched

    def _watch_outputs(self) -> None:
        """Sum |d| of each output channel of each layer, under the name of its weight."""

        def watch(name: str, channel: int) -> Callable[..., None]:
            def hook(module: nn.Module, args: Any, output: torch.Tensor) -> None:
                if output.requires_grad:
                    output.register_hook(add)

            def add(gradient: torch.Tensor) -> None:
                others = [dim for dim in range(gradient.dim()) if dim != channel % gradient.dim()]
                total = gradient.detach().double().abs().sum(others)
                self._sums[name] = self._sums.get(name, 0) + total

            return hook

        def watch_norm(name: str) -> Callable[..., None]:
            def hook(module: Any, args: Any, output: torch.Tensor) -> None:
                deviation = args[0].detach().double().std((0, 2, 3)) if module.training else module.running_var.sqrt()

                def add(gradient: torch.Tensor) -> None:
                    energy = gradient.detach().double().square().sum((0, 2, 3))
                    self._sigmas[name] = (energy / 3).sqrt() / deviation

                output.register_hook(add)

            return hook

        for path, module in self.model.named_modules():
            if isinstance(module, nn.Linear):
                module.register_forward_hook(watch(f"{path}.weight".lstrip("."), -1))
            elif isinstance(module, nn.Conv1d | nn.Conv2d | nn.Conv3d):
                module.register_forward_hook(watch(f"{path}.weight".lstrip("."), 1))
            elif isinstance(module, nn.BatchNorm2d) and self._situation.limit == "norm":
                module.register_forward_hook(watch_norm(f"{path}.weight"))

    def _watch_pack(self) -> None:
        """Weak references to every storage that the session's hook is given, but for parameters, buffers and batch."""
        saved_tensors = self.session._saved_tensors
        pack = saved_tensors.pack

        def watched(tensor: torch.Tensor) -> Any:
            excluded = saved_tensors._static | {reference.cdata for reference in saved_tensors._frame.batch}
            for storage in storages_of(tensor):
                if storage._cdata not in excluded:
                    self._known[storage._cdata] = (StorageWeakRef(storage), storage.nbytes())
            return pack(tensor)

        saved_tensors.pack = watched


def run(situation: Situation, before: list[Gradients] | None = None, **options: Any) -> list[Gradients]:
    torch.manual_seed(0)
    model = situation.build()
    gc.freeze()  # so that `look` finds this run's records only
    try:
        if not options:
            arm = Run(model, None, None, situation)
            situation.loop(arm)
            return arm.iterations
        with comet_core.attach(model, None, tune_allocator=False, **options) as session:
            arm = Run(model, before, session, situation)
            situation.loop(arm)
            assert len(arm.iterations) == len(before or ())
            arm.model.zero_grad(set_to_none=True)
            session.step()
            session.step()
            now = session._ledger.now
            assert (now.saved, now.held) == (0, 0), "the graphs are gone"
        assert torch.overrides._get_current_function_mode_stack() == []
        assert torch._C._autograd._top_saved_tensors_default_hooks(True) is None
        return arm.iterations
    finally:
        gc.unfreeze()


def check(situation: Situation) -> None:
    plain = run(situation)
    assert plain, "the situation has iterations"
    run(situation, plain, policy="baseline")
    run(situation, plain, codec="lossless")
    if situation.limit != "none":
        run(situation, plain, controller="fixed", error_bound=BOUND)


def network(**options: Any) -> nn.Sequential:
    """Convolutions, ReLUs that feed one and a pool, a linear layer."""
    return nn.Sequential(
        nn.Conv2d(2, 6, 3, padding=1), nn.ReLU(), nn.Conv2d(6, 8, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(), nn.Linear(8 * 25, 8), nn.ReLU(), nn.Linear(8, 3),
    ).to(**options)  # fmt: skip


def batches(count: int = 3, size: int = 4, **options: Any) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(size, 2, 10, 10, generator=generator).to(**options) for _ in range(count)]


def loss_of(output: torch.Tensor) -> torch.Tensor:
    """A loss whose gradient differs from place to place and that saves no tensor of the model."""
    generator = torch.Generator().manual_seed(2)
    return (output.float() * torch.randn(output.shape, generator=generator)).sum()


class Table(dict[str, Situation]):
    """Situations by name; each loop puts itself in."""

    def add(
        self,
        name: str,
        build: Callable[[], nn.Module] = network,
        limit: str = "sum |d|",
        dtype: torch.dtype = torch.float32,
    ) -> Callable[[Callable[[Run], None]], None]:
        def put(loop: Callable[[Run], None]) -> None:
            assert name not in self
            self[name] = Situation(build, loop, limit, dtype)

        return put


class Lambda(nn.Module):
    """Parts and a forward that joins them."""

    def __init__(self, function, *parts):
        super().__init__()
        self.function, self.parts = function, nn.ModuleList(parts)

    def forward(self, *args, **kwargs):
        return self.function(self.parts, *args, **kwargs)


def plain_loop(run, given=batches, optimizer=None, loss=loss_of):
    """The loop of a tutorial."""
    for batch in given():
        run.model.zero_grad()
        result = loss(run.model(batch))
        run.look()
        result.backward()
        if optimizer is not None:
            optimizer.step()
        run.done()
