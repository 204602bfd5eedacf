"""What each operator saves and what its backward really needs (the table in THEORY section 3).

Autograd hands a saved tensor to the hooks while the operator runs, so the operator is known without looking at the
graph: a `TorchFunctionMode` sees the call (`AttributionMode` in activations.py) and this file says what the tensor is
to it. Tensors are recognised by their storage, never by shape or order. An operator that is not listed, and any tensor
of a listed one that matches no rule, is kept exactly: a missing line costs memory, never correctness.
Transposed convolutions are not listed yet: their error model counts input positions (THEORY, notation).
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F


class Need(Enum):
    """What backward needs of a saved tensor."""

    VALUES = "values"  # kept exactly
    APPROXIMATE = "approximate"  # values within an error bound: inputs of weighted layers and norms
    SIGN = "sign"  # whether each value is above zero
    TWO_VALUES = "two values"  # 0 or one constant: dropout's mask
    WINDOW = "window"  # max pooling's choice within its window
    SHAPE = "shape"  # shape, dtype and device only


@dataclass(frozen=True)
class Operator:
    """An operator as attribution knows it; `parameters` names its leading positional arguments."""

    name: str
    parameters: tuple[str, ...]

    @property
    def is_convolution(self) -> bool:
        return self.name.startswith("conv")

    @property
    def is_norm(self) -> bool:
        return self.name == "batch_norm"

    @property
    def is_weighted(self) -> bool:
        return self.is_convolution or self.name == "linear"


_CONV = ("input", "weight", "bias", "stride", "padding", "dilation", "groups")
_POOL = ("input", "kernel_size", "stride", "padding", "dilation", "ceil_mode", "return_indices")
_INPUT = ("input",)

CONV1D, CONV2D, CONV3D = (Operator(f"conv{n}d", _CONV) for n in (1, 2, 3))
LINEAR = Operator("linear", ("input", "weight", "bias"))
BATCH_NORM = Operator(
    "batch_norm", ("input", "running_mean", "running_var", "weight", "bias", "training", "momentum", "eps")
)
RELU = Operator("relu", _INPUT)
DROPOUT = Operator("dropout", _INPUT)
MAX_POOL2D = Operator("max_pool2d", _POOL)
MEAN_POOL = Operator("mean_pool", _INPUT)

# Every way user code reaches an operator: the functional, torch's own name, the method.
OPERATORS: dict[Callable[..., Any], Operator] = {
    F.conv1d: CONV1D,
    F.conv2d: CONV2D,
    F.conv3d: CONV3D,
    F.linear: LINEAR,
    F.batch_norm: BATCH_NORM,
    torch.batch_norm: BATCH_NORM,
    **dict.fromkeys((F.relu, torch.relu, Tensor.relu, torch.relu_, Tensor.relu_, F.relu_), RELU),
    **dict.fromkeys(
        (F.dropout, F.dropout1d, F.dropout2d, F.dropout3d, torch.dropout, torch.dropout_, torch.feature_dropout),
        DROPOUT,
    ),
    **dict.fromkeys((F.max_pool2d, F.max_pool2d_with_indices, torch.max_pool2d), MAX_POOL2D),
    **dict.fromkeys(
        (F.avg_pool2d, F.adaptive_avg_pool1d, F.adaptive_avg_pool2d, F.adaptive_avg_pool3d, F.avg_pool3d), MEAN_POOL
    ),
}


@dataclass
class Call:
    """One call of a listed operator while it runs: what the pack hook may ask about the tensor it is given."""

    operator: Operator
    arguments: Mapping[str, Any]
    layer: str  # path in the model; of the weight's owner where there is one
    site: tuple[str, str, int]  # module path, operator, how many such calls came before in this forward
    nonzero_fraction: float = 1.0  # of the input; written when statistics are collected
    inverse_std: Tensor | None = None  # per channel; written when batch norm saves it
    late: list[Any] = field(default_factory=list)  # what is stored once the operator has returned

    @property
    def input(self) -> Tensor:
        return self.arguments["input"]

    @property
    def weight(self) -> Tensor | None:
        return self.arguments.get("weight")

    def need_of(self, tensor: Tensor) -> Need:
        """What this operator's backward needs of `tensor`, which autograd is saving for it."""
        operator = self.operator
        if tensor.is_complex() or tensor.is_nested or tensor.numel() == 0:
            return Need.VALUES
        is_input = same_storage(tensor, self.input)
        if operator.is_weighted:
            trained = self.weight is not None and self.weight.requires_grad and not same_storage(tensor, self.weight)
            return Need.APPROXIMATE if is_input and trained else Need.VALUES
        if operator.is_norm:
            return Need.APPROXIMATE if is_input and tensor.dim() >= 2 else Need.VALUES
        if operator is RELU:
            return Need.SIGN
        if operator is DROPOUT:
            return Need.VALUES if is_input else Need.TWO_VALUES
        if operator is MAX_POOL2D and tensor.dtype == torch.int64:
            return Need.WINDOW
        return Need.SHAPE if is_input else Need.VALUES

    def note_saved(self, tensor: Tensor) -> None:
        """Batch norm saves mean and 1/std of each channel, in this order, and cuDNN some bytes of its own."""
        if tensor.dim() == 1 and tensor.is_floating_point() and tensor.numel() == self.input.shape[1]:
            self.inverse_std = tensor.detach()

    def pooling(self) -> dict[str, Any]:
        """Max pooling's geometry as pairs of ints: kernel_size, stride, padding, dilation, input_size (H, W)."""
        kernel = self.arguments["kernel_size"]
        stride = self.arguments.get("stride")
        return {
            "kernel_size": _pair(kernel),
            "stride": _pair(kernel if stride is None or stride == [] else stride),
            "padding": _pair(self.arguments.get("padding", 0)),
            "dilation": _pair(self.arguments.get("dilation", 1)),
            "input_size": tuple(self.input.shape[-2:]),
        }


def bind(operator: Operator, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """The call's arguments by name. `self`, as torch's own functions call it, counts as `input`."""
    bound = dict(zip(operator.parameters, args, strict=False))
    bound.update(kwargs)
    if "self" in bound:
        bound["input"] = bound.pop("self")
    return bound


def channel_std(call: Call) -> Tensor | None:
    """Standard deviation of each channel, as batch norm divides by it: 1-D, float32; None if unknown."""
    if call.inverse_std is not None:
        return call.inverse_std.float().reciprocal()
    running, training = call.arguments.get("running_var"), call.arguments.get("training", False)
    if running is not None and not training:
        return (running.float() + call.arguments.get("eps", 1e-5)).sqrt()
    return None


def storage_of(tensor: Tensor) -> torch.UntypedStorage | None:
    """The tensor's memory; None where it has none of its own: sparse, uninitialised, inside torch.func."""
    try:
        return tensor.untyped_storage() if tensor.layout is torch.strided else None
    except (NotImplementedError, RuntimeError, ValueError):
        return None


def same_storage(one: Any, other: Any) -> bool:
    """Whether two tensors share their memory. False for anything without memory of its own."""
    if not isinstance(one, Tensor) or not isinstance(other, Tensor):
        return False
    first, second = storage_of(one), storage_of(other)
    return first is not None and second is not None and first._cdata == second._cdata


def _pair(value: Any) -> tuple[int, int]:
    if isinstance(value, int):
        return value, value
    values = tuple(int(entry) for entry in value)
    return values if len(values) == 2 else (values[0], values[0])
