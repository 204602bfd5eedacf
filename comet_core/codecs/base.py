"""The `Codec` contract, the record `Encoded` and the kinds of `ErrorBound`.

A codec turns one dense tensor into a record that stands on its own and back. It keeps no state between calls: whoever
holds the record owns the bytes, and when the record dies the memory is gone. So any thread may decode any record, any
number of times and in any order, and gets equal values.

What every codec promises:

* The input is only read. The record does not keep the input's storage alive.
* Shape, dtype and device come back. So do the strides of any dense layout (each element of one block of memory exactly
  once: contiguous, channels_last, transposed, ...); a tensor with gaps or overlaps comes back contiguous.
* `Encoded.nbytes` is what is really held, and never above the tensor's own bytes plus the header: what would grow is
  stored verbatim.
* Any shape works: 0-d, empty, one element, expanded.
* A record that was truncated, extended or altered is refused with `DamagedRecord`, or decodes to other values where the
  damage cannot be seen; never does it read beyond its parts, or ask for more memory than these can stand for.
* The values follow `Codec.guarantee`:

  ============= ====================================================================================================
  `exact`       every bit comes back
  `bounded`     every finite value comes back within the bound, checked while encoding with the arithmetic of the
                decoder; NaN and infinities come back bit for bit; zeros stay zero; with `sign_exact` non-zeros also
                keep their sign and never become zero. Dtypes without a bound (integers, bool, complex) are exact
  `unbounded`   an approximation without a bound on any single value: the codec's docstring says how good it is. Finite
                values stay finite, NaN and infinities come back bit for bit; with `sign_exact` zeros stay zero, and
                non-zeros keep their sign and never become zero. Dtypes other than floats are exact
  `pattern`     only what one operator's backward reads comes back, by the formula in the codec's docstring
  ============= ====================================================================================================

This file does not choose bounds (`comet_core.controllers` does) and knows nothing about devices.
"""

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from comet_core.config import shown

Guarantee = Literal["exact", "bounded", "unbounded", "pattern"]

HEADER_BYTES = 256
"""Counted for a record itself: the object, shape, strides and the codec's few numbers."""
PART_BYTES = 96
"""Counted for each part of a record: the Python object around the bytes and its entry in the header."""
_MOST_VALUES = 1 << 48  # no memory holds more; beyond, torch's own arithmetic of sizes would overflow


class DamagedRecord(ValueError):
    """The parts, numbers and shape of a record do not belong together: it is not what `encode` made."""

    def __init__(self, problem: str) -> None:
        super().__init__(f"this record is damaged: {problem}. Encode the tensor again, or read the record anew.")


@dataclass(frozen=True)
class ErrorBound:
    """How far a decoded value y may be from its original x. Applies to finite x; the others are exact anyway.

    ============= =====================================================
    `abs`         |x - y| <= value
    `range_rel`   |x - y| <= value * (max - min), over the finite x
    `pw_rel`      |x - y| <= value * |x|
    ============= =====================================================

    The comparison holds in float64. 0 asks for lossless storage, infinity allows any finite y. With `channel_dim` (an
    index of a dimension, negative from the end) the quantiser adapts to each channel, the range of `range_rel` is the
    channel's own, and `value` may be a 1-D CPU float tensor with one entry a channel. A range of zero gives an exact
    result. Under `pw_rel` zeros stay zero, and signs are kept, as with `sign_exact`.

    Raises ValueError for an unknown kind, a negative or NaN value and a tensor of another form; `encode` raises it
    where the bound does not fit the tensor (`channel_dim` out of range, another number of channels).
    """

    kind: Literal["abs", "range_rel", "pw_rel"]
    value: float | Tensor
    channel_dim: int | None = None

    def __post_init__(self) -> None:
        if self.kind not in ("abs", "range_rel", "pw_rel"):
            raise ValueError(f"kind of error bound is {self.kind!r}; allowed: 'abs', 'range_rel', 'pw_rel'.")
        if not isinstance(self.value, Tensor):
            try:
                object.__setattr__(self, "value", float(self.value))
            except (TypeError, ValueError, OverflowError):
                raise ValueError(
                    f"value of the error bound is {shown(self.value)}; allowed: a number, or a 1-D float tensor on the "
                    "CPU with one entry a channel."
                ) from None
        elif self.channel_dim is None:
            raise ValueError(
                "value of the error bound is a tensor, but channel_dim is None; "
                "name the dimension it runs along, or give a float."
            )
        elif self.value.ndim != 1 or not self.value.is_floating_point() or self.value.device.type != "cpu":
            raise ValueError(
                f"value of the error bound is a {self.value.dtype} tensor of shape {tuple(self.value.shape)} on "
                f"{self.value.device}; allowed: a float, or a 1-D float tensor on the CPU with one entry a channel."
            )
        values = torch.as_tensor(self.value, dtype=torch.float64)
        if not bool((values >= 0).all()):
            given = self.value if isinstance(self.value, float) else "a tensor with negative or NaN entries"
            raise ValueError(
                f"value of the error bound is {given}; allowed: 0 (lossless) or more, infinity for anything finite."
            )


def as_error_bound(bound: "float | ErrorBound | None") -> ErrorBound:
    """A plain number means an absolute bound. Raises ValueError for None, NaN and negative numbers."""
    if bound is None:
        raise ValueError("bound is None, but this codec needs one; give a float (absolute) or an ErrorBound.")
    return bound if isinstance(bound, ErrorBound) else ErrorBound("abs", bound)


@dataclass(frozen=True, slots=True, eq=False)
class Encoded:
    """One encoded tensor: plain data, never changed after it was made, decoded only by the codec named in it."""

    codec: str
    shape: torch.Size
    stride: tuple[int, ...]
    """Of the tensor that decoding gives, in elements."""
    dtype: torch.dtype
    device: torch.device
    """Where the input was, and where decoding puts the result unless told otherwise."""
    parts: tuple[Any, ...]
    """Everything of size, bytes or tensors: payloads and tables, in the codec's own order."""
    meta: Any
    """The few numbers that the codec needs to read its parts."""

    @property
    def nbytes(self) -> int:
        """Bytes held by this record, header included."""
        return HEADER_BYTES + sum(
            PART_BYTES + (part.nbytes if isinstance(part, Tensor) else len(part)) for part in self.parts
        )


class Codec(ABC):
    """One way to store a tensor. See the module's docstring for what `encode` and `decode` promise.

    Instances are small, hold only their parameters and may be shared between threads.
    """

    name: ClassVar[str]
    guarantee: ClassVar[Guarantee]
    exact_for: ClassVar[str] = ""
    """What an `unbounded` codec stores without loss instead, in words."""

    @abstractmethod
    def encode(self, tensor: Tensor, bound: float | ErrorBound | None = None, *, sign_exact: bool = False) -> Encoded:
        """Encode a strided tensor of any shape, dtype and device.

        `bound` is needed by `bounded` codecs and ignored by all others; `sign_exact` matters to `bounded` and
        `unbounded` ones.
        Raises ValueError for a bound that is missing, invalid or does not fit the tensor, and for tensors the codec
        cannot hold (sparse, quantized).
        """

    def choices_of(self, encoded: Encoded) -> Any:
        """What was chosen for a tensor besides its bound, for `encode_as`; small, and not the record. None: nothing."""
        return None

    def encode_as(
        self, tensor: Tensor, bound: float | ErrorBound | None, choices: Any, *, sign_exact: bool = False
    ) -> Encoded:
        """`encode` without the time to choose: as for an earlier tensor of the kind, whose `choices_of` these are.

        Promises what `encode` does; where the tensor has become another kind, the record may be larger.
        """
        return self.encode(tensor, bound, sign_exact=sign_exact)

    @abstractmethod
    def decode(
        self, encoded: Encoded, device: torch.device | str | None = None, *, out: Tensor | None = None
    ) -> Tensor:
        """A new tensor on `device` (default: where the input was).

        `out`, made like `empty_like_record(encoded)`, may be written to and returned in place of new memory.
        Raises ValueError for another codec's record, and DamagedRecord, a ValueError too, for one that is not as
        `encode` made it.
        """

    def record(self, dense: Tensor, parts: tuple[Any, ...], meta: Any = None) -> Encoded:
        """The record of a tensor that `dense_of` returned."""
        return Encoded(self.name, dense.shape, dense.stride(), dense.dtype, dense.device, parts, meta)

    def check_own(self, encoded: Encoded) -> None:
        """Raise ValueError unless this codec made the record, and DamagedRecord unless its geometry is a dense one."""
        if encoded.codec != self.name:
            raise ValueError(
                f"this record was made by codec {encoded.codec!r} and given to {self.name!r}; "
                f"decode it with get_codec({encoded.codec!r})."
            )
        shape, stride = encoded.shape, encoded.stride
        fits = len(shape) == len(stride) and all(0 <= number < _MOST_VALUES for number in (*shape, *stride))
        if not fits or math.prod(max(size, 1) for size in shape) >= _MOST_VALUES or not fills_memory(shape, stride):
            raise DamagedRecord(f"no dense tensor has shape {tuple(shape)} and strides {stride}")


def dense_of(tensor: Tensor) -> Tensor:
    """The tensor itself where its layout is dense, else a contiguous copy; detached, lazy conjugation resolved.

    Raises ValueError for layouts without strides.
    """
    if tensor.layout != torch.strided or tensor.is_quantized:
        raise ValueError(
            f"tensor has layout {tensor.layout} and dtype {tensor.dtype}; allowed: strided, unquantized tensors. "
            "Store its parts, or call to_dense() or dequantize()."
        )
    tensor = tensor.detach().resolve_conj().resolve_neg()
    return tensor if fills_memory(tensor.shape, tensor.stride()) else tensor.contiguous()


def fills_memory(shape: torch.Size, stride: tuple[int, ...]) -> bool:
    """Whether the elements fill one block of memory, each place once; always where there are none."""
    expected = 1
    for step, size in sorted(zip(stride, shape, strict=True)):
        if size == 1:
            continue
        if step != expected:
            return 0 in shape
        expected *= size
    return True


def flat_of(dense: Tensor) -> Tensor:
    """The elements of a dense tensor in the order of memory: a 1-D view of the same storage."""
    return dense.as_strided((dense.numel(),), (1,))


def empty_like_record(encoded: Encoded) -> Tensor:
    """An uninitialised tensor with the record's shape, strides, dtype and device."""
    return torch.empty_strided(encoded.shape, encoded.stride, dtype=encoded.dtype, device=encoded.device)


def check_num_parts(encoded: Encoded, expected: int) -> None:
    """Raise DamagedRecord unless the record has `expected` parts."""
    if len(encoded.parts) != expected:
        raise DamagedRecord(f"it has {len(encoded.parts)} parts instead of {expected}")


def tensor_part(encoded: Encoded, index: int, dtype: torch.dtype, *shape: int) -> Tensor:
    """Part `index` of a record: values of `shape` and `dtype` on the record's device, else DamagedRecord."""
    part = encoded.parts[index]
    if not isinstance(part, Tensor) or (part.dtype, part.shape, part.device, part.is_contiguous()) != (
        dtype, shape, encoded.device, True,
    ):  # fmt: skip
        found = f"{part.dtype} of shape {tuple(part.shape)}" if isinstance(part, Tensor) else type(part).__name__
        raise DamagedRecord(f"part {index} is {found} instead of {dtype} of shape {shape} on {encoded.device}")
    return part
