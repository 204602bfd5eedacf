"""What is kept of a saved tensor, who shares it, and how many bytes it holds.

One storage is one entry, found by the storage's identity, which a weak reference keeps from being used again. A record
serves a later pack only at the same version (no change in place since) and within the later one's bound. Autograd owns
a handle for each tensor that it saved; handles own records and entries, and these book their bytes in the ledger when
they are made and when they die. So nothing is deleted by hand, and bytes are counted by storage.
"""

import threading
import weakref
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from comet_core.codecs.base import Codec, Encoded, ErrorBound, fills_memory
from comet_core.decoded_memory import DecodedMemory
from comet_core.operators import Need, storage_of

_ROWS, _COLUMNS = ("crow_indices", "col_indices", "values"), ("ccol_indices", "row_indices", "values")
_SPARSE_PARTS = {
    torch.sparse_coo: ("_indices", "_values"),
    torch.sparse_csr: _ROWS,
    torch.sparse_bsr: _ROWS,
    torch.sparse_csc: _COLUMNS,
    torch.sparse_bsc: _COLUMNS,
}


@dataclass(frozen=True, slots=True)
class Saver:
    """Who saved a tensor, and why that is kept of it which is kept. The storage audit reads it."""

    layer: str
    operator: str
    why: str


@dataclass
class ByteCount:
    """Bytes saved for backward at one moment (THEORY section 5). Convolution inputs are part of saved and held."""

    saved: int = 0
    held: int = 0
    conv_input_saved: int = 0
    conv_input_held: int = 0


class Ledger:
    """Running byte counts and their values at the moment when most was saved. Entries and records book themselves."""

    def __init__(self) -> None:
        self.lock = threading.RLock()  # records die in whichever thread drops them, also inside another booking
        self.now = ByteCount()
        self.peak = ByteCount()
        self.batch_bytes = 0
        self.memory = DecodedMemory()
        self.last_decoded: weakref.ref[Record] | None = None  # the one record that keeps what it decoded

    def book(self, **change: int) -> None:
        with self.lock:
            for name, amount in change.items():
                setattr(self.now, name, getattr(self.now, name) + amount)
            if tuple(vars(self.now).values()) > tuple(vars(self.peak).values()):
                self.peak = ByteCount(**vars(self.now))

    def close_iteration(self) -> ByteCount:
        """The peak since the last call; counting starts again from what is alive now."""
        with self.lock:
            peak, self.peak = self.peak, ByteCount(**vars(self.now))
            self.take_decoded()
            self.memory.give_back()
            return peak

    def take_decoded(self) -> "tuple[Record, Tensor] | None":
        """The record that keeps what it decoded, and that tensor, which it keeps no longer."""
        with self.lock:
            record = self.last_decoded() if self.last_decoded is not None else None
            self.last_decoded = None
            if record is None or record.decoded is None:
                return None
            tensor, record.decoded = record.decoded, None
            return record, tensor


class Entry:
    """One storage that backward needs, alive as long as any handle on it. The batch is not counted."""

    def __init__(self, ledger: Ledger, storage: torch.UntypedStorage, *, is_batch: bool = False) -> None:
        self.ledger = ledger
        self.reference = StorageWeakRef(storage)  # weak: lets the data go, keeps the address taken
        self.num_bytes = storage.nbytes()
        self.raw_bytes = 0 if is_batch else self.num_bytes  # as counted
        self.site: tuple[str, str, int] | None = None  # who packed it first
        self.records: weakref.WeakValueDictionary[tuple[Any, ...], Record] = weakref.WeakValueDictionary()
        self.num_exact = 0
        self.is_conv_input = False
        ledger.book(saved=self.raw_bytes)

    def hold_exact(self, amount: int) -> None:
        """Count one exact handle more (+1) or fewer (-1): the first holds the bytes, the last frees them."""
        with self.ledger.lock:
            before, self.num_exact = self.num_exact, self.num_exact + amount
            change = self.raw_bytes * (bool(self.num_exact) - bool(before))
            self.ledger.book(held=change, conv_input_held=change if self.is_conv_input else 0)

    def mark_conv_input(self) -> None:
        with self.ledger.lock:
            if not self.is_conv_input:
                self.is_conv_input = True
                held = self.raw_bytes if self.num_exact else 0
                self.ledger.book(conv_input_saved=self.raw_bytes, conv_input_held=held)

    def __del__(self) -> None:
        self.ledger.book(saved=-self.raw_bytes, conv_input_saved=-self.raw_bytes if self.is_conv_input else 0)


class Record:
    """A compressed copy of a storage's values, shared by the handles of every operator that can use it."""

    def __init__(
        self, entry: Entry, codec: Codec, encoded: Encoded, bound: ErrorBound | None, *, keeps_sign: bool
    ) -> None:
        self.entry, self.codec, self.encoded, self.bound = entry, codec, encoded, bound
        self.keeps_sign = keeps_sign
        self.is_conv_input = False
        self.num_handles = 0
        self.decoded: Tensor | None = None
        self.version = 0  # of that tensor, to notice who changes it in place
        entry.ledger.book(held=encoded.nbytes)

    def mark_conv_input(self) -> None:
        with self.entry.ledger.lock:
            if not self.is_conv_input:
                self.is_conv_input = True
                self.entry.ledger.book(conv_input_held=self.encoded.nbytes)

    def serves(self, need: Need, bound: ErrorBound | None, view: Tensor) -> bool:
        """Whether backward gets what it needs of `view` from this record, within `bound` (absolute)."""
        if need is Need.SIGN and not self.keeps_sign:
            return False
        if bound is None:
            return need is not Need.APPROXIMATE
        if self.bound is None:
            return False
        own, asked = torch.as_tensor(self.bound.value), torch.as_tensor(bound.value)
        if 0 not in (own.dim(), asked.dim()) and (self.encoded.shape, self.encoded.stride) != (
            view.shape, view.stride(),
        ):  # fmt: skip
            return bool(own.max() <= asked.min())  # the same memory, but other elements make up its channels
        return bool((own <= asked).all())

    def values(self) -> Tensor:
        """The decoded tensor, not to be changed.

        Where several operators share the record, it is kept until the next record is asked for: a ReLU's backward
        asks directly after that of the convolution behind it, when no more memory is in use than during that one.
        """
        ledger = self.entry.ledger
        kept = ledger.take_decoded()
        if kept is not None and kept[0] is self and kept[1]._version == self.version:
            return kept[1]
        del kept  # before memory for the next one is taken
        tensor = self.codec.decode(self.encoded, out=ledger.memory.take(self.encoded))
        if self.num_handles > 1:
            with ledger.lock:
                self.decoded, self.version = tensor, tensor._version
                ledger.last_decoded = weakref.ref(self)
        return tensor

    def __del__(self) -> None:
        nbytes = self.encoded.nbytes
        self.entry.ledger.book(held=-nbytes, conv_input_held=-nbytes if self.is_conv_input else 0)


class ExactHandle:
    """Keeps the tensor itself. Raises as autograd does if it was changed in place before backward."""

    def __init__(self, tensor: Tensor, entry: Entry | None, saver: Saver | None = None) -> None:
        self.tensor, self.version, self.entry, self.saver = tensor.detach(), tensor._version, entry, saver
        self.parts: list[ExactHandle] = []  # of a tensor that several storages hold
        if entry is not None:
            entry.hold_exact(+1)

    def unpack(self) -> Tensor:
        if self.tensor._version != self.version:
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an inplace operation: "
                f"{self.tensor.type()} of shape {list(self.tensor.shape)} is at version {self.tensor._version}; "
                f"expected version {self.version}. Change a copy, or make the change before the tensor is used."
            )
        return self.tensor

    def __del__(self) -> None:
        if self.entry is not None:
            self.entry.hold_exact(-1)


class ShapeHandle:
    """Keeps shape, dtype and device of a tensor whose values backward never reads; unpacks to zeros of one element."""

    def __init__(self, tensor: Tensor, entry: Entry, saver: Saver) -> None:
        self.shape, self.dtype, self.device = tensor.shape, tensor.dtype, tensor.device
        self.entry, self.saver = entry, saver

    def unpack(self) -> Tensor:
        return torch.zeros((), dtype=self.dtype, device=self.device).expand(self.shape)


class RecordHandle:
    """A record and the geometry in which this operator saw it."""

    def __init__(self, record: Record, tensor: Tensor, need: Need, saver: Saver) -> None:
        self.record, self.shape, self.stride, self.saver = record, tensor.shape, tensor.stride(), saver
        record.num_handles += 1
        stored = without_repeats(tensor)
        self.is_dense = fills_memory(stored.shape, stored.stride())
        self.is_approximate = need in (Need.APPROXIMATE, Need.HALF) and record.codec.guarantee != "exact"

    @property
    def entry(self) -> Entry:
        return self.record.entry

    def unpack(self) -> Tensor:
        if self.is_approximate and torch.is_grad_enabled() and in_backward():
            raise RuntimeError(
                f"create_graph=True asks for second derivatives through {self.saver.operator} "
                f"{self.saver.layer or '(the model itself)'}, which keeps its input approximately: they would not be "
                "exact. Attach with codec='lossless' or policy='baseline' for this model."
            )
        tensor = self.record.values()
        if not self.is_dense:  # gaps or overlaps are not stored: such a layout comes back contiguous
            return tensor.expand(self.shape)
        return tensor.as_strided(self.shape, self.stride)


class LateHandle:
    """Keeps the tensor while its operator runs; what is kept of it afterwards is decided when the operator returns."""

    def __init__(self, tensor: Tensor) -> None:
        self.kept: ExactHandle | RecordHandle = ExactHandle(tensor, None)

    def unpack(self) -> Tensor:
        return self.kept.unpack()


Handle = ExactHandle | ShapeHandle | RecordHandle | LateHandle


def geometry(tensor: Tensor) -> tuple[Any, ...]:
    """What a record of this tensor can stand for: any view of the same dense stretch of memory, else this view only."""
    is_dense = fills_memory(tensor.shape, tensor.stride())
    layout = (tensor.numel(),) if is_dense else (tensor.shape, tensor.stride())
    return (tensor._version, tensor.storage_offset(), tensor.dtype, tensor.is_neg(), layout)


def parts_of(tensor: Tensor) -> list[Tensor]:
    """The tensors whose storages hold this one: itself, or the parts of a sparse one or of a wrapping subclass."""
    wrapping: Any = tensor
    if is_traceable_wrapper_subclass(wrapping):
        return [part for name in wrapping.__tensor_flatten__()[0] for part in parts_of(getattr(wrapping, name))]
    names = _SPARSE_PARTS.get(tensor.layout)
    if names is not None:
        return [getattr(tensor.detach(), name)() for name in names]
    return [] if storage_of(tensor) is None else [tensor]


def without_repeats(tensor: Tensor) -> Tensor:
    """The tensor where dimensions that only repeat (`expand`) are cut to one: what its memory holds."""
    if 0 in tensor.stride():
        tensor = tensor.detach()
        for dim, step in enumerate(tensor.stride()):
            if step == 0:
                tensor = tensor.narrow(dim, 0, min(tensor.shape[dim], 1))
    return tensor


def in_backward() -> bool:
    """Whether this thread runs a backward pass: a forward in it recomputes a checkpoint under hooks of its own."""
    return torch._C._current_graph_task_id() != -1
