"""The saved-tensor hooks: select, recognise duplicates, pack, unpack.

Autograd calls `pack` for each tensor that it saves and `unpack` when backward asks for it. Between the two lives a
handle that autograd owns; the handle owns its record, so when the graph dies the memory is gone, and `unpack` may run
any number of times. Nothing depends on the order of calls.

A ReLU result that feeds a convolution is saved twice and stored once: saved_records.py says what is kept of a storage,
who may share it and how it is counted.

A ReLU packs before its consumer is known, and so does a first convolution with a laxer bound than a second: each place
that packs (a *site*) remembers which layers shared its storage in the last iteration, and takes the smallest of their
bounds. A wrong guess costs a second record, never accuracy.

Not done here: which bound (controllers.py), what backward needs (operators.py), how to store (codecs/).
"""

import contextlib
import sys
import threading
import time
import warnings
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode

from comet_core.codecs.base import Codec, Encoded, ErrorBound
from comet_core.codecs.cast import CastCodec
from comet_core.codecs.interval_mask import IntervalMaskCodec
from comet_core.codecs.lossless import LosslessCodec
from comet_core.codecs.sign_mask import SignMaskCodec
from comet_core.codecs.window_index import WindowIndexCodec
from comet_core.operators import OPERATORS, Call, Kind, Need, bind, entered, is_composite, root_of
from comet_core.saved_records import (
    Entry,
    ExactHandle,
    Handle,
    LateHandle,
    Ledger,
    Record,
    RecordHandle,
    Saver,
    ShapeHandle,
    geometry,
    in_backward,
    parts_of,
    without_repeats,
)

if TYPE_CHECKING:  # policies import this file for their hooks
    from comet_core.policies.base import MemoryPolicy


_MOST_GROWTH = 1.05
"""A record this many times larger than when its tables were chosen, and they are chosen anew."""


class _Frame(threading.local):
    """Where in the model this thread is. A module that ends belongs to the innermost frame with its identity."""

    def __init__(self) -> None:
        self.modules: list[tuple[nn.Module, str]] = []
        self.calls: list[Call] = []
        self.counts: dict[tuple[str, str], int] = {}
        self.batch: list[StorageWeakRef] = []
        self.function: Callable[..., Any] | None = None  # running, where it is no listed operator
        self.contexts: contextlib.ExitStack | None = None


class SavedTensors:
    """Hooks on one model: active inside its forward only, in whichever thread runs it, left again on any exception.

    The model itself is not touched: module hooks are global ones that look the module up here, so a deep copy, a pickle
    or a state_dict of the model never sees them.
    """

    def __init__(self, model: nn.Module, policy: "MemoryPolicy", ledger: Ledger) -> None:
        self.policy, self.ledger = policy, ledger
        self.pack_seconds = self.unpack_seconds = 0.0
        self.forward_started: float | None = None  # when the iteration's first forward began
        self._paths: weakref.WeakKeyDictionary[nn.Module, str] = weakref.WeakKeyDictionary()
        self._owners: dict[int, str] = {}
        self._static: set[int] = set()
        self._model = model
        self._entries: weakref.WeakValueDictionary[int, Entry] = weakref.WeakValueDictionary()
        self._sharers: dict[tuple[str, str, int], set[str]] = {}
        self._last_sharers: dict[tuple[str, str, int], set[str]] = {}
        self._frame = _Frame()
        self._layer_bytes: dict[str, tuple[str, int, int, int]] = {}
        self._choices: dict[tuple[tuple[str, str, int], bool, torch.Size], tuple[float, Any]] = {}
        self._said: set[str] = set()
        self._refresh()
        self._hooks = [
            nn.modules.module.register_module_forward_pre_hook(weakly(self._enter_module)),
            nn.modules.module.register_module_forward_hook(weakly(self._leave_module), always_call=True),
        ]
        for hook in self._hooks:
            weakref.finalize(self, hook.remove)

    def close(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._leave_model()

    def close_iteration(self, *, bounds_changed: bool) -> None:
        """Forget the iteration's times and per-layer bytes; its sharers become the guess for the next."""
        self._leave_model()
        if bounds_changed:
            self._choices = {}
        if self._sharers:
            self._last_sharers, self._sharers = self._sharers, {}
        self._layer_bytes = {}
        self.pack_seconds = self.unpack_seconds = 0.0
        self.forward_started = None

    def layer_bytes(self) -> dict[str, tuple[str, int, int, int]]:
        """Per layer: operator, bytes of its inputs, bytes held for them, number of values; of this iteration so far."""
        return self._layer_bytes

    def held_by_operator(self) -> dict[str, int]:
        """Bytes held now for backward, by the operator that saved a storage first; "other": none that is listed."""
        held: dict[str, int] = {}
        for entry in list(self._entries.values()):
            name = entry.site[1] if entry.site else "other"
            kept = entry.raw_bytes if entry.num_exact else 0
            kept += sum(record.encoded.nbytes for record in list(entry.records.values()))
            held[name] = held.get(name, 0) + kept
        return held

    # Entering and leaving the model

    def _enter_module(self, module: nn.Module, args: Any) -> None:
        path = self._paths.get(module)
        if path is None:
            if getattr(module, "_orig_mod", None) in self._paths:
                refuse_compiled(module)
            return
        frame = self._frame
        if not frame.modules:
            if not torch.is_grad_enabled() or in_backward():
                return
            refuse_compiled(self._model)
            obstacle = _obstacle()
            if obstacle is not None:
                if obstacle not in self._said:
                    self._said.add(obstacle)
                    warnings.warn(f"{obstacle}: such a forward is neither compressed nor counted.", stacklevel=2)
                return
            if self.forward_started is None:
                self.forward_started = time.perf_counter()
            self._refresh()
            frame.counts = {}
            given = [part for tensor in _tensors((args, _keywords())) if tensor.grad_fn is None
                     for part in parts_of(tensor)]  # fmt: skip
            frame.batch = [StorageWeakRef(tensor.untyped_storage()) for tensor in given]
            self.ledger.batch_bytes = sum(
                {
                    tensor.untyped_storage()._cdata: min(
                        tensor.untyped_storage().nbytes(), tensor.numel() * tensor.element_size()
                    )
                    for tensor in given
                }.values()
            )
            frame.contexts = contextlib.ExitStack()
            frame.contexts.enter_context(torch.autograd.graph.saved_tensors_hooks(self.pack, self.unpack))
            frame.contexts.enter_context(AttributionMode(self))
        frame.modules.append((module, path))

    def _leave_module(self, module: nn.Module, args: Any, output: Any) -> None:
        frame = self._frame
        if not any(entered is module for entered, _ in frame.modules):
            return
        while frame.modules.pop()[0] is not module:
            pass
        if not frame.modules:
            error = sys.exception()
            if isinstance(error, RuntimeError) and "saved tensor hooks" in str(error):
                error.add_note(
                    "An attached session saves tensors by such hooks. Call this torch.func transform outside the "
                    "model's forward, use torch.autograd.grad in its place, or train this model without attach."
                )
            self._leave_model()

    def _leave_model(self) -> None:
        """Take this thread's hooks off, also where no module hook did: torch skips them on a KeyboardInterrupt."""
        frame = self._frame
        contexts, frame.contexts = frame.contexts, None
        frame.modules, frame.calls, frame.batch = [], [], []
        if contexts is not None:
            contexts.close()

    def _refresh(self) -> None:
        """Read modules, parameters and buffers anew: the user may have replaced some since the last forward."""
        model = self._model
        self._paths = weakref.WeakKeyDictionary({module: name for name, module in model.named_modules()})
        self._owners = {id(parameter): _layer_name(name) for name, parameter in model.named_parameters()}
        tensors = [*model.parameters(), *model.buffers()]
        self._static = {part.untyped_storage()._cdata for tensor in tensors for part in parts_of(tensor)}

    def call_of(self, func: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> Call | None:
        operator = OPERATORS.get(func)
        if operator is None:
            return None
        frame = self._frame
        module, path = frame.modules[-1] if frame.modules else (self._model, "")
        count = frame.counts.get((path, operator.name), 0)
        frame.counts[path, operator.name] = count + 1
        arguments = bind(operator, args, kwargs)
        for name in operator.operands:  # the factor that is a parameter of the model, or a view of one
            if id(root_of(arguments.get(name))) in self._owners:
                arguments["weight"] = arguments[name]
                break
        layer = self._owners.get(id(root_of(arguments.get("weight"))))
        if layer is None:  # a weight that is computed, or none: not to be confused with what the module does otherwise
            layer = path
            if module._parameters or module._modules or not path:
                layer = f"{path}.{operator.name}".lstrip(".")
            if count:
                layer = f"{layer}:{count + 1}"
        return Call(operator, arguments, layer, (path, operator.name, count), (func, args, kwargs))

    @contextlib.contextmanager
    def running(self, call: Call) -> Iterator[None]:
        self._frame.calls.append(call)
        try:
            yield
        finally:
            self._frame.calls.pop()

    # One tensor: the same steps in opposite order

    def pack(self, tensor: Tensor) -> Handle:
        started = time.perf_counter()
        call = self._frame.calls[-1] if self._frame.calls else None
        try:
            return self._pack(tensor, call)
        finally:
            self.pack_seconds += time.perf_counter() - started

    def unpack(self, handle: Handle) -> Tensor:
        started = time.perf_counter()
        try:
            return handle.unpack()
        finally:
            self.unpack_seconds += time.perf_counter() - started

    def _pack(self, tensor: Tensor, call: Call | None) -> Handle:
        parts = parts_of(tensor)
        if len(parts) != 1 or parts[0] is not tensor:
            whole = ExactHandle(tensor, None)
            whole.parts = [handle for part in parts if isinstance(handle := self._pack(part, None), ExactHandle)]
            return whole
        storage = tensor.untyped_storage()
        identity = storage._cdata
        if identity in self._static:
            return ExactHandle(tensor, None)
        if any(ref.cdata == identity for ref in self._frame.batch):
            return ExactHandle(tensor, Entry(self.ledger, storage, is_batch=True), self._saver(call, "it is the batch"))
        entry = self._entries.get(identity)
        if entry is None:
            entry = self._entries[identity] = Entry(self.ledger, storage)
        if call is None:
            return ExactHandle(tensor, entry, self._saver(None, "no rule for this operator"))
        need = call.need_of(tensor)
        if call.operator.kind is Kind.NORM and need is Need.VALUES:
            call.note_saved(tensor)
        approximate = need is Need.APPROXIMATE
        if approximate:
            self.policy.observe(call, tensor)
            if call.operator.is_convolution:
                entry.mark_conv_input()
        if approximate and entry.site is not None:
            self._sharers.setdefault(entry.site, set()).add(call.layer)
        if entry.site is None:
            entry.site = call.site
        if approximate and call.operator.kind is Kind.NORM and not self.policy.keeps_exact():
            late = LateHandle(tensor)
            call.late.append((late, tensor, entry))
            return late
        handle = self._choose(tensor, call, need, entry)
        if approximate:
            self._note_layer(call, tensor, handle)
        return handle

    def settle(self, call: Call) -> None:
        """The operator has returned: store what had to wait for it, a norm's input for its standard deviation."""
        started = time.perf_counter()
        for late, tensor, entry in call.late:
            kept = self._choose(tensor, call, Need.APPROXIMATE, entry)
            late.kept = kept
            self._note_layer(call, tensor, kept)
        call.late.clear()
        self.pack_seconds += time.perf_counter() - started

    def _choose(self, tensor: Tensor, call: Call, need: Need, entry: Entry) -> ExactHandle | ShapeHandle | RecordHandle:
        def exactly(why: str) -> ExactHandle:
            return ExactHandle(tensor, entry, self._saver(call, why))

        if self.policy.keeps_exact():
            return exactly("the policy keeps every tensor as it is")
        if need is Need.VALUES or tensor.numel() == 0:
            return exactly("backward needs the values")
        if need is Need.SHAPE:
            return ShapeHandle(tensor, entry, self._saver(call, "its shape"))
        if entry.num_exact:  # the storage stays anyway: a record would only add to it
            return exactly("another operator keeps it anyway")
        layers = set(self._last_sharers.get(call.site, ())) if entry.site == call.site else set()
        if need is Need.APPROXIMATE:
            layers.add(call.layer)
        codec: Codec = self.policy.codec
        bound: ErrorBound | None = None
        stored = without_repeats(tensor)
        if need is Need.APPROXIMATE or (need is Need.SIGN and layers):
            bound = self.policy.bound_for(layers, tensor)
            if bound is None:
                return exactly("its bound is exact: no gradient arrived, or its values are not finite")
            if isinstance(bound.value, Tensor) and bound.value.numel() != stored.shape[1]:  # expanded channels
                bound = ErrorBound("abs", float(bound.value.min()))
        elif need is Need.WINDOW:
            codec = WindowIndexCodec(**call.pooling())
        elif need is Need.INDEX:
            codec = LosslessCodec()
        elif need is Need.HALF:
            codec = codec if codec.guarantee == "exact" else CastCodec("float16")
        elif need is Need.INSIDE:
            codec = IntervalMaskCodec(*call.interval())
        else:
            codec = SignMaskCodec()
        by_value = need in (Need.APPROXIMATE, Need.SIGN)  # one record may serve both
        key = (*geometry(stored), None if by_value else need, call.interval() if need is Need.INSIDE else None)
        record = entry.records.get(key)
        keeps_sign = need is Need.SIGN or call.reads_signs
        if record is None or not record.serves(need, bound, stored) or (keeps_sign and not record.keeps_sign):
            encoded = self._encoded(codec, stored.detach(), bound, call.site, keeps_sign)
            if encoded.nbytes >= entry.raw_bytes:
                return exactly("a record would not be smaller")
            record = entry.records[key] = Record(entry, codec, encoded, bound, keeps_sign=keeps_sign)
        if need is Need.APPROXIMATE and call.operator.is_convolution:
            record.mark_conv_input()
        return RecordHandle(record, tensor, need, self._saver(call, f"a record of {record.codec.name}"))

    def _saver(self, call: Call | None, why: str) -> Saver:
        if call is not None:
            return Saver(call.layer, call.operator.name, why)
        frame = self._frame
        operator = getattr(frame.function, "__name__", "an operator without name")
        return Saver(frame.modules[-1][1] if frame.modules else "", operator, why)

    def _encoded(
        self, codec: Codec, tensor: Tensor, bound: ErrorBound | None, site: tuple[str, str, int], keeps_sign: bool
    ) -> Encoded:
        """The record, as it was chosen here when bounds last changed, unless that has become larger meanwhile."""
        place = site, keeps_sign, tensor.shape
        bytes_a_value, choices = self._choices.get(place, (0.0, None))
        if choices is not None:
            encoded = codec.encode_as(tensor, bound, choices, sign_exact=keeps_sign)
            if encoded.nbytes > _MOST_GROWTH * bytes_a_value * tensor.numel():
                self._choices.pop(place, None)
            return encoded
        encoded = codec.encode(tensor, bound, sign_exact=keeps_sign)
        self._choices[place] = encoded.nbytes / tensor.numel(), codec.choices_of(encoded)
        return encoded

    def _note_layer(self, call: Call, tensor: Tensor, handle: Handle) -> None:
        call.stored.append((tensor.detach(), handle))
        raw = tensor.numel() * tensor.element_size()
        held = handle.record.encoded.nbytes if isinstance(handle, RecordHandle) else raw
        _, raw_before, held_before, count = self._layer_bytes.get(call.layer, ("", 0, 0, 0))
        self._layer_bytes[call.layer] = (
            call.operator.name,
            raw_before + raw,
            held_before + held,
            count + tensor.numel(),
        )


class AttributionMode(TorchFunctionMode):
    """Knows which listed operator is running when autograd saves."""

    def __init__(self, saved_tensors: SavedTensors) -> None:
        super().__init__()
        self._saved_tensors = saved_tensors

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        call = self._saved_tensors.call_of(func, args, kwargs)
        if call is None:
            if is_composite(func):
                with self:
                    return entered(func)(*args, **kwargs)
            frame = self._saved_tensors._frame
            frame.function = func
            try:
                return func(*args, **kwargs)
            finally:
                frame.function = None
        with self._saved_tensors.running(call):
            output = func(*args, **kwargs)
        self._saved_tensors.policy.called(call, output)
        if call.late:
            self._saved_tensors.settle(call)
        if call.stored:
            self._saved_tensors.policy.stored(call, output)
        return output


def _obstacle() -> str | None:
    """What stands in the way of hooks of our own around the forward that begins; None: nothing."""
    if torch._C._functorch.peek_interpreter_stack() is not None:
        return "a torch.func transform runs the model"
    if not torch._C._autograd._saved_tensors_hooks_is_enabled():  # type: ignore[attr-defined]
        return "saved-tensor hooks are disabled around the model"
    others = torch._C._autograd._top_saved_tensors_default_hooks(True)
    if others is not None and not isinstance(getattr(others[0], "__self__", None), SavedTensors):
        return "saved-tensor hooks of a checkpoint, of save_on_cpu or of your own are active around the model"
    return None


def refuse_compiled(model: nn.Module) -> None:
    """Raise ValueError where torch.compile got hold of the model: its code runs past hooks and operators."""
    if any(hasattr(module, "_orig_mod") or module._compiled_call_impl is not None for module in model.modules()):
        raise ValueError(
            "model is compiled by torch.compile, which ignores saved-tensor hooks; attach the module as it was before "
            "compiling, and train it eagerly."
        )


def _keywords() -> Any:
    """Keyword arguments of the module call that runs our global pre-hook: torch hands it the positional ones only."""
    frame = sys._getframe(2)
    while frame.f_back is not None and frame.f_code.co_name not in ("inner", "_call_impl"):
        frame = frame.f_back
    return frame.f_locals.get("kwargs", {}) if frame.f_code.co_name in ("inner", "_call_impl") else {}


def _layer_name(parameter: str) -> str:
    """A weight is named by its module's path, any other parameter that serves as a weight by its own."""
    path, _, name = parameter.rpartition(".")
    return path if name == "weight" else parameter


def weakly(method: Callable[..., Any]) -> Callable[..., Any]:
    """The bound method for torch's lists of hooks, without keeping its owner alive."""
    reference = weakref.WeakMethod(method)

    def hook(*args: Any) -> Any:
        alive = reference()
        return None if alive is None else alive(*args)

    return hook


def _tensors(values: Any) -> list[Tensor]:
    """Every tensor in nested tuples, lists and dicts."""
    if isinstance(values, Tensor):
        return [values]
    if isinstance(values, dict):
        values = values.values()
    elif not isinstance(values, list | tuple):
        return []
    return [tensor for value in values for tensor in _tensors(value)]
