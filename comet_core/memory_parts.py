"""What an iteration's peak consists of: parameters, optimizer, gradients, what backward keeps, what is decoded.

Parts that are never there together must not be added up: while most is saved for backward there are no gradients yet,
and when the last one arrives next to nothing is saved any more. So the parts are those of one moment, the one at which
most of what is known was there. In an iteration this grows in two ways only, while tensors are saved and when a
gradient arrives; so it is enough to look when most is saved, which the ledger remembers, at each gradient, and at the
end, when the optimizer has made its state. What was there at one moment is at most the peak; its rest is called other.

A gradient counts from its arrival until nobody holds it: a weak reference says when that is, whoever drops it.
Not known, and so part of other: what an operator or a codec works with while it runs.
"""

import weakref
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.utils.hooks import RemovableHandle

from comet_core.activations import weakly
from comet_core.operators import storage_of
from comet_core.saved_records import ByteCount, Ledger


@dataclass(frozen=True, kw_only=True)
class Parts:
    """Bytes at one moment, named like the fields of StepMetrics; `peak_saved_bytes` is what `peak_held_bytes` saves."""

    parameter_bytes: int
    optimizer_bytes: int
    gradient_bytes: int
    peak_saved_bytes: int
    peak_held_bytes: int
    scratch_bytes: int

    @property
    def known_bytes(self) -> int:
        kept = self.peak_held_bytes + self.scratch_bytes
        return self.parameter_bytes + self.optimizer_bytes + self.gradient_bytes + kept


class MemoryParts:
    """Watches the parameters of a model between two calls of `close_iteration`."""

    def __init__(self, model: nn.Module, optimizers: list[torch.optim.Optimizer], ledger: Ledger) -> None:
        self._model, self._optimizers, self._ledger = model, optimizers, ledger
        self._watched: dict[int, tuple[weakref.ref[Tensor], RemovableHandle]] = {}  # by id of the parameter
        self._gradients: dict[int, tuple[weakref.KeyedRef[int, Tensor], int]] = {}  # by id of the gradient
        self._death_hook = weakly(self._gradient_died)
        self._gradient_bytes = 0
        self._forward_gradient_bytes: int | None = None  # those before the first one of this iteration arrived
        self._fullest: Parts | None = None
        self._counted: list[tuple[int, int, torch.dtype]] = []  # whose bytes the next two are
        self._parameter_bytes = self._optimizer_bytes = self.static_bytes = 0
        self._look_through()

    def close(self) -> None:
        for _, hook in self._watched.values():
            hook.remove()
        self._watched.clear()

    def close_iteration(self, most_saved: ByteCount) -> Parts:
        """The parts at the iteration's fullest moment; `most_saved` is the ledger's count when most was saved."""
        with self._ledger.lock:
            in_forward = self._forward_gradient_bytes
            self._look(most_saved, self._gradient_bytes if in_forward is None else in_forward, 0)
            self._look_through()
            self._look(self._ledger.now, self._gradient_bytes, 0)
            fullest, self._fullest, self._forward_gradient_bytes = self._fullest, None, None
            assert fullest is not None
            return fullest

    def _look_through(self) -> None:
        """Parameters, buffers and optimizer state anew: the user may have replaced, added or frozen some.

        A lazy module's parameters have no size before its first forward; they are watched from the next iteration on.
        """
        parameters = [parameter for parameter in self._model.parameters() if not is_lazy(parameter)]
        for parameter in parameters:
            if parameter.grad is not None:
                self._follow(parameter.grad)
        trained = {id(leaf): leaf for leaf in parameters if leaf.requires_grad and leaf.is_leaf}
        for key, (watched, hook) in list(self._watched.items()):
            if watched() is None or key not in trained:
                hook.remove()
                del self._watched[key]
        for key in trained.keys() - self._watched.keys():
            hook = trained[key].register_post_accumulate_grad_hook(weakly(self._gradient_arrived))
            weakref.finalize(self, hook.remove)
            self._watched[key] = (weakref.ref(trained[key]), hook)
        model = [*parameters, *(buffer for buffer in self._model.buffers() if not is_lazy(buffer))]
        states = [state for optimizer in self._optimizers for state in optimizer.state.values()]
        optimizer_state = [value for state in states for value in state.values() if isinstance(value, Tensor)]
        tensors = [(id(tensor), tensor.numel(), tensor.dtype) for tensor in (*model, *optimizer_state)]
        if tensors != self._counted:  # asking every tensor for its storage takes longer than all the rest
            storages = _storages(model)
            self._parameter_bytes = sum(storages.values())
            self._optimizer_bytes = sum((storages | _storages(optimizer_state)).values()) - self._parameter_bytes
            self._counted = tensors
        self.static_bytes = self._parameter_bytes + self._optimizer_bytes + self._gradient_bytes

    def _gradient_arrived(self, parameter: Tensor) -> None:
        with self._ledger.lock:
            if self._forward_gradient_bytes is None:
                self._forward_gradient_bytes = self._gradient_bytes
            if parameter.grad is not None:
                self._follow(parameter.grad)
            self._look(self._ledger.now, self._gradient_bytes, self._decoded_bytes())

    def _decoded_bytes(self) -> int:
        """The blocks that the CPU decodes into; on a GPU, and of small tensors, the one that its record keeps."""
        record = self._ledger.last_decoded() if self._ledger.last_decoded is not None else None
        decoded = record.decoded if record is not None else None
        return max(self._ledger.memory.nbytes, 0 if decoded is None else decoded.nbytes)

    def _follow(self, gradient: Tensor) -> None:
        key = id(gradient)
        if key not in self._gradients and gradient.layout is torch.strided:
            nbytes = gradient.nbytes  # its own: several may share a bucket
            self._gradients[key] = (weakref.KeyedRef(gradient, self._death_hook, key), nbytes)
            self._gradient_bytes += nbytes

    def _gradient_died(self, reference: Any) -> None:
        with self._ledger.lock:
            self._gradient_bytes -= self._gradients.pop(reference.key)[1]

    def _look(self, count: ByteCount, gradient_bytes: int, scratch_bytes: int) -> None:
        known_bytes = self._parameter_bytes + self._optimizer_bytes + gradient_bytes + count.held + scratch_bytes
        if self._fullest is None or known_bytes > self._fullest.known_bytes:
            self._fullest = Parts(
                parameter_bytes=self._parameter_bytes,
                optimizer_bytes=self._optimizer_bytes,
                gradient_bytes=gradient_bytes,
                peak_saved_bytes=count.saved,
                peak_held_bytes=count.held,
                scratch_bytes=scratch_bytes,
            )


def _storages(tensors: Iterable[Tensor]) -> dict[int, int]:
    """Bytes of the storages of these tensors, by identity."""
    storages = [storage for tensor in tensors if (storage := storage_of(tensor)) is not None]
    return {storage._cdata: storage.nbytes() for storage in storages}
