"""What each operator saves and what its backward really needs (the table in THEORY section 3).

Autograd hands a saved tensor to the hooks while the operator runs, so the operator is known without looking at the
graph: a `TorchFunctionMode` sees the call (`AttributionMode` in activations.py) and this file says what the tensor is
to it. An input is recognised by its storage; only where an operator saves a copy (work in place, transposed inputs,
autocast), by its size. An operator that is not listed, and any tensor of a listed one that matches no rule, is kept
exactly: a missing line costs memory, never correctness. Composites in Python, as multi-head attention, are entered, and
the operators in them are seen one by one.

Sixteen bits (float16 under one scale a tensor, eleven significant bits) hold what attention and matmul of two
activations save: a relative error of 2^-12 in q, k, v and the weights of an attention is one of about 2^-12 in its
gradients, kappa below 1e-6 (test_operators.py), and a softmax's backward may cancel a hundredfold before it shows.

Kept exactly although they save values: softmax itself (a loss behind it divides by probabilities, however small),
sigmoid and tanh (where they saturate the gradient vanishes and what an error makes of it does not; a squeeze-excite's
sigmoid is kept by the product behind it anyway), powers, roots and divisions (no limit near zero), recurrent networks.
Additions, concatenation, views and upsampling save nothing; embeddings save indices only.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from types import FunctionType
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

aten = torch.ops.aten


class Need(Enum):
    """What backward needs of a saved tensor."""

    VALUES = "values"  # kept exactly
    APPROXIMATE = "approximate"  # values within an error bound
    HALF = "half"  # values to eleven significant bits
    SIGN = "sign"  # whether each value is above zero
    INSIDE = "inside"  # whether each value is within the interval where a clamp lets gradients pass
    TWO_VALUES = "two values"  # 0 or one constant: dropout's mask
    WINDOW = "window"  # max pooling's choice within its window
    INDEX = "index"  # whole numbers that say where a maximum was
    SHAPE = "shape"  # shape, dtype and device only


class Kind(Enum):
    """What an operator is to its saved tensors; for the first four also where an error in the approximate one goes."""

    WEIGHTED = "weighted"  # into the gradient of a weight, where it stops (THEORY section 1)
    NORM = "norm"  # into the gradient of the scale, and a little upstream (THEORY section 2)
    ACTIVATION = "activation"  # upstream: the gradient is multiplied by a function of the saved tensor
    PRODUCT = "product"  # upstream through the other factor; into a weight's gradient where that is one
    ATTENTION = "attention"
    SIGN = "sign"
    CLAMP = "clamp"
    DROPOUT = "dropout"
    MAX_POOL = "max pool"
    SHAPE = "shape"


Arguments = Mapping[str, Any]


@dataclass(frozen=True)
class Operator:
    """An operator as attribution knows it; `parameters` names its leading positional arguments."""

    name: str
    kind: Kind
    parameters: tuple[str, ...] = ("input",)
    operands: tuple[str, ...] = ()  # names of its factors, where any of them may be the weight
    slope: Callable[[Tensor, Arguments], Tensor] | None = None  # activations: dx / dy as a function of what is saved
    interval: Callable[[Arguments], tuple[float, float]] | None = None  # clamps: open, where gradients pass

    @property
    def is_convolution(self) -> bool:
        return self.name.startswith("conv")


_CONV = ("input", "weight", "bias", "stride", "padding", "dilation", "groups")
_CONV_TRANSPOSE = ("input", "weight", "bias", "stride", "padding", "output_padding", "groups", "dilation")
_POOL = ("input", "kernel_size", "stride", "padding", "dilation", "ceil_mode", "return_indices")
_BATCH_NORM = ("input", "running_mean", "running_var", "weight", "bias", "training", "momentum", "eps")
_INSTANCE_NORM = ("input", "running_mean", "running_var", "weight", "bias", "use_input_stats", "momentum", "eps")


def _activation(name: str, slope: Callable[[Tensor, Arguments], Tensor], *parameters: str) -> Operator:
    return Operator(name, Kind.ACTIVATION, ("input", *parameters), slope=slope)


def _clamp(name: str, interval: Callable[[Arguments], tuple[float, float]], *parameters: str) -> Operator:
    return Operator(name, Kind.CLAMP, ("input", *parameters), interval=interval)


def _one(x: Tensor) -> Tensor:
    return torch.ones_like(x)


def _elu_slope(alpha: float, scale: float, given: Arguments, saved: Tensor) -> Tensor:
    """What works in place saves its result, and has its slope from there."""
    return aten.elu_backward(_one(saved), alpha, scale, 1.0, bool(given.get("inplace", False)), saved)


def _celu_slope(saved: Tensor, given: Arguments) -> Tensor:
    alpha = given.get("alpha", 1.0)
    return aten.elu_backward(_one(saved), alpha, 1.0, 1 / alpha, bool(given.get("inplace", False)), saved)


CONV1D, CONV2D, CONV3D = (Operator(f"conv{n}d", Kind.WEIGHTED, _CONV) for n in (1, 2, 3))
CONV_TRANSPOSE1D, CONV_TRANSPOSE2D, CONV_TRANSPOSE3D = (
    Operator(f"conv_transpose{n}d", Kind.WEIGHTED, _CONV_TRANSPOSE) for n in (1, 2, 3)
)
PRELU = Operator("prelu", Kind.WEIGHTED, ("input", "weight"))
LINEAR = Operator("linear", Kind.WEIGHTED, ("input", "weight", "bias"))
MATMUL = Operator("matmul", Kind.WEIGHTED, ("input", "other"), ("input", "other"))
MM = Operator("matmul", Kind.WEIGHTED, ("input", "mat2"), ("input", "mat2"))
ADDMM = Operator("matmul", Kind.WEIGHTED, ("input", "mat1", "mat2"), ("mat1", "mat2"))
BADDBMM = Operator("matmul", Kind.WEIGHTED, ("input", "batch1", "batch2"), ("batch1", "batch2"))
EINSUM = Operator("einsum", Kind.WEIGHTED, ("equation", "first", "second", "third"), ("first", "second"))

BATCH_NORM = Operator("batch_norm", Kind.NORM, _BATCH_NORM)
INSTANCE_NORM = Operator("instance_norm", Kind.NORM, _INSTANCE_NORM)
LAYER_NORM = Operator("layer_norm", Kind.NORM, ("input", "normalized_shape", "weight", "bias", "eps"))
RMS_NORM = Operator("rms_norm", Kind.NORM, ("input", "normalized_shape", "weight", "eps"))
GROUP_NORM = Operator("group_norm", Kind.NORM, ("input", "num_groups", "weight", "bias", "eps"))

ATTENTION = Operator("attention", Kind.ATTENTION, ("input", "key", "value", "attn_mask"))

PRODUCT = Operator("mul", Kind.PRODUCT, ("input", "other"), ("input", "other"))

SILU = _activation("silu", lambda x, given: aten.silu_backward(_one(x), x))
MISH = _activation("mish", lambda x, given: aten.mish_backward(_one(x), x))
GELU = _activation(
    "gelu", lambda x, given: aten.gelu_backward(_one(x), x, approximate=given.get("approximate", "none"))
)
HARDSWISH = _activation("hardswish", lambda x, given: aten.hardswish_backward(_one(x), x))
SOFTPLUS = _activation(
    "softplus",
    lambda x, given: aten.softplus_backward(_one(x), x, given.get("beta", 1), given.get("threshold", 20)),
    "beta", "threshold",
)  # fmt: skip
ELU = _activation("elu", lambda x, given: _elu_slope(given.get("alpha", 1.0), 1.0, given, x), "alpha", "inplace")
SELU = _activation("selu", lambda x, given: _elu_slope(1.6732632423543772, 1.0507009873554805, given, x), "inplace")
CELU = _activation("celu", _celu_slope, "alpha", "inplace")

RELU = Operator("relu", Kind.SIGN)
LEAKY_RELU = Operator("leaky_relu", Kind.SIGN, ("input", "negative_slope", "inplace"))
RELU6 = _clamp("relu6", lambda given: (0.0, 6.0))
HARDTANH = _clamp(
    "hardtanh", lambda given: (given.get("min_val", -1.0), given.get("max_val", 1.0)), "min_val", "max_val"
)
HARDSIGMOID = _clamp("hardsigmoid", lambda given: (-3.0, 3.0))
THRESHOLD = _clamp("threshold", lambda given: (given["threshold"], math.inf), "threshold", "value")

DROPOUT = Operator("dropout", Kind.DROPOUT)
MAX_POOL1D, MAX_POOL2D, MAX_POOL3D = (Operator(f"max_pool{n}d", Kind.MAX_POOL, _POOL) for n in (1, 2, 3))
ADAPTIVE_MAX_POOL = Operator("adaptive_max_pool", Kind.MAX_POOL)
MEAN_POOL = Operator("mean_pool", Kind.SHAPE)
PAD = Operator("pad", Kind.SHAPE)

_C = torch._C._nn


def _in_place(operator: Operator) -> Operator:
    """The spelling that always works in place, for activations that save another tensor then."""
    slope = operator.slope
    assert slope is not None
    return Operator(
        operator.name,
        operator.kind,
        operator.parameters,
        slope=lambda saved, given: slope(saved, {**given, "inplace": True}),
    )


# Every way user code reaches an operator: the functional, torch's own name, the method, each also in place.
OPERATORS: dict[Callable[..., Any], Operator] = {
    function: operator
    for operator, functions in (
        (CONV1D, (F.conv1d,)),
        (CONV2D, (F.conv2d,)),
        (CONV3D, (F.conv3d,)),
        (CONV_TRANSPOSE1D, (F.conv_transpose1d,)),
        (CONV_TRANSPOSE2D, (F.conv_transpose2d,)),
        (CONV_TRANSPOSE3D, (F.conv_transpose3d,)),
        (LINEAR, (F.linear,)),
        (PRELU, (F.prelu, torch.prelu, Tensor.prelu)),
        (MATMUL, (torch.matmul, Tensor.matmul, Tensor.__matmul__)),
        (MM, (torch.mm, Tensor.mm, torch.bmm, Tensor.bmm)),
        (ADDMM, (torch.addmm, Tensor.addmm)),
        (BADDBMM, (torch.baddbmm, Tensor.baddbmm)),
        (EINSUM, (torch.einsum,)),
        (BATCH_NORM, (F.batch_norm, torch.batch_norm)),
        (INSTANCE_NORM, (F.instance_norm, torch.instance_norm)),
        (LAYER_NORM, (F.layer_norm, torch.layer_norm)),
        (RMS_NORM, (F.rms_norm, torch.rms_norm)),
        (GROUP_NORM, (F.group_norm,)),
        (ATTENTION, (F.scaled_dot_product_attention,)),
        (PRODUCT, (torch.mul, torch.multiply, Tensor.mul, Tensor.mul_, Tensor.multiply, Tensor.multiply_)),
        (PRODUCT, (Tensor.__mul__, Tensor.__rmul__, Tensor.__imul__)),
        (SILU, (F.silu, _C.silu, _C.silu_)),
        (MISH, (F.mish, _C.mish, _C.mish_)),
        (GELU, (F.gelu,)),
        (HARDSWISH, (F.hardswish, _C.hardswish, _C.hardswish_)),
        (SOFTPLUS, (F.softplus,)),
        (ELU, (F.elu,)),
        (SELU, (F.selu, torch.selu)),
        (CELU, (F.celu, torch.celu)),
        (_in_place(ELU), (F.elu_,)),
        (_in_place(SELU), (F.selu_, torch.selu_)),
        (_in_place(CELU), (F.celu_, torch.celu_)),
        (RELU, (F.relu, torch.relu, Tensor.relu, torch.relu_, Tensor.relu_, F.relu_)),
        (LEAKY_RELU, (F.leaky_relu, F.leaky_relu_, _C.leaky_relu, _C.leaky_relu_)),
        (RELU6, (F.relu6, _C.relu6, _C.relu6_)),
        (HARDTANH, (F.hardtanh, F.hardtanh_, _C.hardtanh, _C.hardtanh_)),
        (HARDSIGMOID, (F.hardsigmoid, _C.hardsigmoid, _C.hardsigmoid_)),
        (THRESHOLD, (F.threshold, torch.threshold)),
        (DROPOUT, (F.dropout, F.dropout1d, F.dropout2d, F.dropout3d, F.alpha_dropout, F.feature_alpha_dropout)),
        (DROPOUT, (torch.dropout, torch.dropout_, torch.feature_dropout, torch.feature_dropout_)),
        (DROPOUT, (torch.alpha_dropout, torch.alpha_dropout_)),
        (DROPOUT, (torch.feature_alpha_dropout, torch.feature_alpha_dropout_)),
        (MAX_POOL1D, (F.max_pool1d, F.max_pool1d_with_indices, torch.max_pool1d, torch.max_pool1d_with_indices)),
        (MAX_POOL2D, (F.max_pool2d, F.max_pool2d_with_indices, torch.max_pool2d)),
        (MAX_POOL3D, (F.max_pool3d, F.max_pool3d_with_indices, torch.max_pool3d)),
        (ADAPTIVE_MAX_POOL, (F.adaptive_max_pool1d, F.adaptive_max_pool2d, F.adaptive_max_pool3d)),
        (ADAPTIVE_MAX_POOL, (F.adaptive_max_pool1d_with_indices, torch.adaptive_max_pool1d)),
        (ADAPTIVE_MAX_POOL, (F.adaptive_max_pool2d_with_indices, F.adaptive_max_pool3d_with_indices)),
        (MEAN_POOL, (F.avg_pool1d, F.avg_pool2d, F.avg_pool3d)),
        (MEAN_POOL, (F.adaptive_avg_pool1d, F.adaptive_avg_pool2d, F.adaptive_avg_pool3d)),
        (PAD, (F.pad,)),
    )
    for function in functions
}


@dataclass
class Call:
    """One call of a listed operator while it runs: what the pack hook may ask about the tensor it is given."""

    operator: Operator
    arguments: Arguments
    layer: str  # path in the model; of the weight's owner where there is one
    site: tuple[str, str, int]  # module path, operator, how many such calls came before in this forward
    spelling: tuple[Any, Any, Any] = (None, (), {})  # the function as it was called, args, kwargs
    sensitivity: float = 1.0  # mean square of what an error does, see error_models; written at collections
    inverse_std: Tensor | None = None  # of each normalised group; written when a norm saves it
    late: list[Any] = field(default_factory=list)  # what is stored once the operator has returned
    stored: list[tuple[Tensor, Any]] = field(default_factory=list)  # approximate inputs and the handles that keep them

    @property
    def weight(self) -> Tensor | None:
        return self.arguments.get("weight")

    @property
    def passes_upstream(self) -> bool:
        """Whether an error in the approximate tensor changes gradients that go on to other layers."""
        kind = self.operator.kind
        return kind is Kind.ACTIVATION or (kind is Kind.PRODUCT and self.weight is None)

    @property
    def reads_signs(self) -> bool:
        """Whether the signs of an approximate input have to be exact: PReLU's backward chooses by them."""
        return self.operator is PRELU

    @property
    def input(self) -> Any:
        """The tensor that is worked on: of several factors, the one that is not the weight."""
        if self.weight is None or not self.operator.operands:
            return self.arguments[self.operator.operands[0] if self.operator.operands else "input"]
        first, second = (self.arguments.get(name) for name in self.operator.operands)
        return second if first is self.weight else first

    def need_of(self, tensor: Tensor) -> Need:
        """What this operator's backward needs of `tensor`, which autograd is saving for it."""
        kind = self.operator.kind
        if tensor.is_complex() or tensor.is_nested or tensor.numel() == 0 or not isinstance(self.input, Tensor):
            return Need.VALUES
        is_input = same_storage(tensor, self.input)
        floating = tensor.is_floating_point()
        if kind is Kind.ATTENTION or (kind is Kind.WEIGHTED and self.weight is None):
            return Need.HALF if tensor.dtype == torch.float32 and self._is_computed(tensor) else Need.VALUES
        if kind is Kind.WEIGHTED:
            return Need.APPROXIMATE if floating and self._is_weighted_input(tensor, is_input) else Need.VALUES
        if kind is Kind.NORM:
            return Need.APPROXIMATE if floating and self._is_normalised(tensor) else Need.VALUES
        if kind is Kind.PRODUCT:
            return Need.APPROXIMATE if floating and self._is_factor(tensor) else Need.VALUES
        if kind is Kind.ACTIVATION:
            return Need.APPROXIMATE if floating and tensor.shape == self.input.shape else Need.VALUES
        if kind is Kind.SIGN:
            return Need.SIGN
        if kind is Kind.CLAMP:
            low, high = self.interval()
            return Need.INSIDE if floating and low < high else Need.VALUES
        if kind is Kind.DROPOUT:
            return Need.VALUES if is_input else Need.TWO_VALUES
        if kind is Kind.MAX_POOL and tensor.dtype == torch.int64:
            return Need.WINDOW if self.operator in (MAX_POOL1D, MAX_POOL2D) else Need.INDEX
        return Need.SHAPE if is_input else Need.VALUES

    def _is_weighted_input(self, tensor: Tensor, is_input: bool) -> bool:
        """The input or a copy of it, which cannot be confused with the weight or a copy of that."""
        weight = self.weight
        if weight is None or not weight.requires_grad or same_storage(tensor, weight):
            return False
        if self.operator is EINSUM and self.arguments.get("third") is not None:
            return False
        return is_input or tensor.numel() == self.input.numel() != weight.numel()

    def _is_computed(self, tensor: Tensor) -> bool:
        """No constant given, and not the logarithms of sums (a row's), from which an attention's backward starts."""
        given = [value for value in self.arguments.values() if same_storage(tensor, value)]
        return tensor.dim() >= 2 and tensor.shape[-1] > 1 and all(value.requires_grad for value in given) and (
            self.operator.kind is not Kind.ATTENTION or tensor.shape != self.input.shape[:-1]
        )

    def _is_normalised(self, tensor: Tensor) -> bool:
        """The input, or RMS norm's normalised values. In evaluation, instance norm's statistics are of no call."""
        if tensor.dim() < 2 or tensor.numel() != self.input.numel() or same_storage(tensor, self.weight):
            return False
        if self.operator is INSTANCE_NORM:
            return same_storage(tensor, self.input) and self.arguments.get("use_input_stats", True)
        return same_storage(tensor, self.input) or (self.operator is RMS_NORM and tensor.dtype == self.input.dtype)

    def _is_factor(self, tensor: Tensor) -> bool:
        """A factor as large as the result that is computed itself; not a constant, nor one that is broadcast."""
        factors = [factor for factor in self._factors() if not same_storage(factor, self.weight)]
        if self.weight is not None and not self.weight.requires_grad:
            return False
        return any(tensor.shape == factor.shape == self._result_shape() for factor in factors if factor.requires_grad)

    def _factors(self) -> list[Tensor]:
        factors = [self.arguments.get(name) for name in self.operator.operands]
        return [factor for factor in factors if isinstance(factor, Tensor)]

    def _result_shape(self) -> torch.Size:
        return torch.broadcast_shapes(*(factor.shape for factor in self._factors()))

    def passed_on(self) -> list[int]:
        """Which of the gradients that the operator gives back an error in what it saved has changed."""
        if self.operator.kind is Kind.ACTIVATION:
            return [0]
        factors = self._factors()
        if not self.passes_upstream or len(factors) != 2:
            return []
        shape = self._result_shape()
        return [1 - i for i, factor in enumerate(factors) if factor.requires_grad and factor.shape == shape]

    def out_channels(self, output: Tensor) -> float:
        """By what the energy of the output's gradient is shared out over the elements of the weight's gradient.

        Each element of the output meets K of them: elements / K. A norm's scale has one for each channel.
        """
        weight, operator = self.weight, self.operator
        if operator.kind is Kind.NORM:
            if operator in (LAYER_NORM, RMS_NORM):
                return math.prod(self.arguments["normalized_shape"])
            return self.input.shape[1]
        if weight is None:
            return output.shape[-1] if operator.operands else 1.0
        if operator.kind is Kind.PRODUCT:
            return weight.numel()
        if operator.operands:  # exactly so without batch dimensions, with them an upper estimate of the error
            meets = math.sqrt(weight.numel() * self.input.numel() / max(output.numel(), 1))
            return max(weight.numel() / meets, 1.0)
        if operator.name.startswith("conv_transpose"):  # a place of the input meets each tap, one of the output a few
            spatial = weight.dim() - 2
            strides = self.arguments.get("stride", 1)
            taps = strides**spatial if isinstance(strides, int) else math.prod((*strides, *strides)[:spatial])
            return weight.shape[1] * self.arguments.get("groups", 1) * taps
        return weight.shape[0]

    def interval(self) -> tuple[float, float]:
        assert self.operator.interval is not None
        low, high = self.operator.interval(self.arguments)
        return float(low), float(high)

    def note_saved(self, tensor: Tensor) -> None:
        """Norms save mean and 1/std of each group, in this order, and cuDNN some bytes of its own."""
        of_groups = tensor.is_floating_point() and tensor.numel() == self._num_groups()
        if of_groups and not same_storage(tensor, self.weight):
            self.inverse_std = tensor.detach()

    def _num_groups(self) -> int:
        shape = self.input.shape
        if self.operator in (LAYER_NORM, RMS_NORM):
            return self.input.numel() // math.prod(self.arguments["normalized_shape"])
        if self.operator is GROUP_NORM:
            return shape[0] * self.arguments["num_groups"]
        return shape[1] if self.operator is BATCH_NORM else shape[0] * shape[1]

    def pooling(self) -> dict[str, Any]:
        """Max pooling's geometry as pairs of ints: kernel_size, stride, padding, dilation, input_size (H, W).

        In one dimension, torch pools maps of height 1.
        """
        kernel = self.arguments["kernel_size"]
        stride = self.arguments.get("stride")
        flat = self.operator is MAX_POOL1D
        return {
            "kernel_size": _pair(kernel, flat, 1),
            "stride": _pair(kernel if stride is None or stride == [] else stride, flat, 1),
            "padding": _pair(self.arguments.get("padding", 0), flat, 0),
            "dilation": _pair(self.arguments.get("dilation", 1), flat, 1),
            "input_size": (1, self.input.shape[-1]) if flat else tuple(self.input.shape[-2:]),
        }


def bind(operator: Operator, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """The call's arguments by name. `self`, as torch's own functions say, and an attention's query count as `input`."""
    if operator is EINSUM and len(args) == 2 and isinstance(args[1], list | tuple):
        args = (args[0], *args[1])
    bound = dict(zip(operator.parameters, args, strict=False))
    bound.update(kwargs)
    for name in ("self", "query"):
        if name in bound:
            bound["input"] = bound.pop(name)
    return bound


def spread_of_groups(call: Call) -> Tensor | float | None:
    """The standard deviation that a norm's bound is a share of: of each channel (1-D, float32), or one; None: unknown.

    Where groups are not channels of the saved tensor, one figure stands for all: that by which the noise on dx is
    the same share of dx, since groups of small deviation weigh more (error_models, norms).
    """
    if call.inverse_std is None:
        running, training = call.arguments.get("running_var"), call.arguments.get("training", False)
        if running is not None and not training and call.operator is BATCH_NORM:
            return (running.float() + call.arguments.get("eps", 1e-5)).sqrt()
        return None
    inverse = call.inverse_std.float()
    if call.operator in (BATCH_NORM, INSTANCE_NORM) and inverse.dim() == 1:
        return inverse.reciprocal()
    square = inverse.double().square()
    spread = math.sqrt(float(square.mean() / square.square().mean()))
    return min(spread, 1.0) if call.operator is RMS_NORM else spread  # it saves the normalised values as well


def scale_sensitivity(call: Call, spread: Tensor | float | None) -> float:
    """Mean square of what an error in units of `spread` does to a norm's scale, for each unit of d^2.

    1 where each channel has its own deviation; with one figure for groups of different deviations, those of small
    deviation do more than it says.
    """
    if not isinstance(spread, float) or call.inverse_std is None:
        return 1.0
    return spread**2 * float(call.inverse_std.double().square().mean())


def is_composite(func: Callable[..., Any]) -> bool:
    """Whether `func` is a function of torch's in Python that calls other operators."""
    return isinstance(func, FunctionType) and func.__module__ in ("torch.nn.functional", "torch.functional")


def entered(func: Any) -> Callable[..., Any]:
    """A composite whose body runs under the function mode, instead of handing itself to the mode again.

    Each such function asks at its start whether anybody overrides it; in the copy nobody does.
    """
    names = ("has_torch_function", "has_torch_function_unary", "has_torch_function_variadic")
    inner = FunctionType(
        func.__code__,
        {**func.__globals__, **dict.fromkeys(names, _nobody)},
        func.__name__,
        func.__defaults__,
        func.__closure__,
    )
    inner.__kwdefaults__ = func.__kwdefaults__
    return inner


def _nobody(*_: Any) -> bool:
    return False


def root_of(tensor: Any) -> Any:
    """The tensor that this one is a view of, or itself."""
    base = tensor._base if isinstance(tensor, Tensor) else None
    return tensor if base is None else base


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


def _pair(value: Any, flat: bool, fill: int) -> tuple[int, int]:
    values = (value,) if isinstance(value, int) else tuple(int(entry) for entry in value)
    if flat:
        return fill, values[0]
    return (values[0], values[-1])
