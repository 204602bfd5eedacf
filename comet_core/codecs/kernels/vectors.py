"""Vectors for numba kernels: what a loop does to 16 or 64 lanes at once, said so that no compiler can miss it.

numba turns simple loops into vector instructions by itself, but not loops that look up tables or move a varying number
of words, which is all that an entropy coder does. `Vector` is a numba type of 16 uint32 and `Row` one of 64 uint8,
`Mask` and `RowMask` are of as many bits; the functions below and the operators + - * & | << >> < > >= become generic
LLVM instructions (gather, compress, expand), which LLVM turns into AVX-512 where the processor has it and into shorter
steps where not. The results are the same everywhere. Scalars are taken for all lanes.

Addresses are not checked: the caller keeps every index inside its array.
"""

import operator
from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba import extending
from numba.core import cgutils, types
from numba.extending import models, overload, register_model

LANES, ROW_LANES = 16, 64

intrinsic: Callable[[Any], Any] = extending.intrinsic  # numba's own type hides that a call lacks the typing context

_I1, _I8, _I16, _I32, _I64 = (ir.IntType(width) for width in (1, 8, 16, 32, 64))
_FLOAT = ir.FloatType()
_POINTERS = ir.VectorType(ir.PointerType(), LANES)


def _lanes(element: ir.Type) -> ir.VectorType:
    return ir.VectorType(element, LANES)


def _constant(element: ir.Type, value: int) -> ir.Constant:
    return ir.Constant(_lanes(element), [value] * LANES)


class _VectorType(types.Type):
    def __init__(self, name: str, element: ir.Type, num_lanes: int, scalar: types.Type) -> None:
        self.form = ir.VectorType(element, num_lanes)
        self.scalar = scalar
        super().__init__(name)


Vector = _VectorType("Vector", _I32, LANES, types.uint32)
Mask = _VectorType("Mask", _I1, LANES, types.boolean)
Row = _VectorType("Row", _I8, ROW_LANES, types.uint8)
RowMask = _VectorType("RowMask", _I1, ROW_LANES, types.boolean)
_MASKS = {Vector: Mask, Row: RowMask}


@register_model(_VectorType)
class _VectorModel(models.PrimitiveModel):
    def __init__(self, data_model_manager: Any, numba_type: _VectorType) -> None:
        super().__init__(data_model_manager, numba_type, numba_type.form)


def _kind_of(*kinds: types.Type) -> Any:
    """The vector type among the kinds of arguments, the others of which are scalars."""
    return next(kind for kind in kinds if kind in _MASKS)


def _as_vectors(context: Any, builder: Any, kinds: Any, args: Any) -> list[Any]:
    """The arguments, scalars repeated in all lanes."""
    kind = _kind_of(*kinds)
    empty, zeros = (ir.Constant(kind.form, ir.Undefined), ir.Constant(ir.VectorType(_I32, kind.form.count), None))
    return [
        arg
        if of_arg == kind
        else builder.shuffle_vector(
            builder.insert_element(empty, context.cast(builder, arg, of_arg, kind.scalar), _I32(0)), empty, zeros
        )
        for of_arg, arg in zip(kinds, args, strict=True)
    ]


def _address(context: Any, builder: Any, kinds: Any, args: Any, form: ir.VectorType) -> Any:
    """Pointer to a vector at array args[0], index args[1]."""
    data = context.make_array(kinds[0])(context, builder, args[0]).data
    place = builder.gep(data, [context.cast(builder, args[1], kinds[1], types.int64)])
    return builder.bitcast(place, form.as_pointer())


def _addresses(context: Any, builder: Any, array_kind: Any, array: Any, places: Any, unit: ir.Type) -> Any:
    data = context.make_array(array_kind)(context, builder, array).data
    base = builder.bitcast(data, unit.as_pointer())
    pointers = builder.gep(base, [builder.sext(places, _lanes(_I64))], source_etype=unit)
    pointers.type = _POINTERS  # llvmlite does not know that a vector of indices gives a vector of pointers
    return pointers


def _call(builder: Any, name: str, result: ir.Type, args: list[Any]) -> Any:
    kind = ir.FunctionType(result, [arg.type for arg in args])
    return builder.call(cgutils.get_or_insert_function(builder.module, kind, name), args)


def _operator(instruction: str) -> Callable[..., Any]:
    @intrinsic
    def apply(typing_context: Any, a: Any, b: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            return getattr(builder, instruction)(*_as_vectors(context, builder, signature.args, args))

        return _kind_of(a, b)(a, b), generate

    return apply


def _comparison(sign: str) -> Callable[..., Any]:
    @intrinsic
    def apply(typing_context: Any, a: Any, b: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            return builder.icmp_unsigned(sign, *_as_vectors(context, builder, signature.args, args))

        return _MASKS[_kind_of(a, b)](a, b), generate

    return apply


def _overload(python_operator: Callable[..., Any], apply: Callable[..., Any]) -> None:
    def implement(a, b):  # type: ignore[no-untyped-def]  # numba compares signatures, annotations included
        vectors = {kind for kind in (a, b) if kind in _MASKS}
        if len(vectors) == 1 and all(kind in vectors or isinstance(kind, types.Integer) for kind in (a, b)):
            return lambda a, b: apply(a, b)
        return None

    overload(python_operator)(implement)


for _python_operator, _instruction in (
    (operator.add, "add"), (operator.sub, "sub"), (operator.mul, "mul"), (operator.and_, "and_"),
    (operator.or_, "or_"), (operator.lshift, "shl"), (operator.rshift, "lshr"),
):  # fmt: skip
    _overload(_python_operator, _operator(_instruction))
for _python_operator, _sign in ((operator.lt, "<"), (operator.ge, ">="), (operator.gt, ">")):
    _overload(_python_operator, _comparison(_sign))


@intrinsic
def both(typing_context: Any, a: Any, b: Any) -> Any:
    """The lanes that are set in both masks."""
    return Mask(a, b), lambda context, builder, signature, args: builder.and_(*args)


@intrinsic
def count(typing_context: Any, mask: Any) -> Any:
    """How many lanes of a mask are set."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.zext(builder.ctpop(builder.bitcast(args[0], _I16)), _I64)

    return types.int64(mask), generate


@intrinsic
def select(typing_context: Any, mask: Any, a: Any, b: Any) -> Any:
    """a where the mask is set, else b."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.select(args[0], *_as_vectors(context, builder, signature.args[1:], args[1:]))

    return _kind_of(a, b)(mask, a, b), generate


@intrinsic
def quotient(typing_context: Any, a: Any, b: Any) -> Any:
    """Whole part of a / b for 0 < b < 2**24 and a < b * 2**22: a quotient of floats is off by one at most."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        a, b = args
        floats = (builder.uitofp(arg, _lanes(_FLOAT)) for arg in args)
        q = builder.fptoui(builder.fdiv(*floats), _lanes(_I32))
        rest = builder.sub(a, builder.mul(q, b))
        below = builder.icmp_signed("<", rest, _constant(_I32, 0))
        q = builder.select(below, builder.sub(q, _constant(_I32, 1)), q)
        rest = builder.select(below, builder.add(rest, b), rest)
        above = builder.icmp_unsigned(">=", rest, b)
        return builder.select(above, builder.add(q, _constant(_I32, 1)), q)

    return Vector(a, b), generate


def _load(element: ir.Type) -> Callable[..., Any]:
    @intrinsic
    def load(typing_context: Any, array: Any, start: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            value = builder.load(_address(context, builder, signature.args, args, _lanes(element)))
            value.align = 1
            return value if element is _I32 else builder.zext(value, _lanes(_I32))

        return Vector(array, start), generate

    return load


def _store(element: ir.Type) -> Callable[..., Any]:
    @intrinsic
    def store(typing_context: Any, array: Any, start: Any, value: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            lanes = args[2] if element is _I32 else builder.trunc(args[2], _lanes(element))
            builder.store(lanes, _address(context, builder, signature.args, args, _lanes(element))).align = 1
            return context.get_dummy_value()

        return types.void(array, start, value), generate

    return store


load_words, store_words = _load(_I32), _store(_I32)
"""load(array, start): 16 neighbours of an array of uint32; store(array, start, vector)."""
load_bytes, store_bytes = _load(_I8), _store(_I8)
"""The same for an array of uint8; storing keeps the lowest byte of each lane."""


def _gather(unit: ir.Type) -> Callable[..., Any]:
    @intrinsic
    def gather(typing_context: Any, array: Any, places: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            pointers = _addresses(context, builder, signature.args[0], args[0], args[1], unit)
            rest = [_I32(unit.width // 8), _constant(_I1, 1), ir.Constant(_lanes(_I32), ir.Undefined)]
            return _call(builder, "llvm.masked.gather.v16i32.v16p0", _lanes(_I32), [pointers, *rest])

        return Vector(array, places), generate

    return gather


gather_words = _gather(_I32)
"""gather(array, places): array[place] for each lane, from an array of uint32."""
gather_at_bytes = _gather(_I8)
"""Four bytes from each place of an array of uint8, the first in the lowest bits."""


@intrinsic
def append(typing_context: Any, array: Any, start: Any, value: Any, mask: Any) -> Any:
    """Write the lower halves of the lanes in the mask, in the order of lanes, to array[start:] of uint16."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        halves = builder.trunc(args[2], _lanes(_I16))
        packed = _call(
            builder,
            "llvm.experimental.vector.compress.v16i16",
            _lanes(_I16),
            [halves, args[3], ir.Constant(_lanes(_I16), ir.Undefined)],
        )
        builder.store(packed, _address(context, builder, signature.args, args, _lanes(_I16))).align = 1
        return context.get_dummy_value()

    return types.void(array, start, value, mask), generate


@intrinsic
def take(typing_context: Any, array: Any, start: Any, mask: Any) -> Any:
    """The inverse of `append`: neighbours from array[start:] of uint16 to the lanes in the mask, 0 to the others."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        place = builder.bitcast(_address(context, builder, signature.args, args, _lanes(_I16)), ir.PointerType())
        halves = _call(builder, "llvm.masked.expandload.v16i16", _lanes(_I16), [place, args[2], _constant(_I16, 0)])
        return builder.zext(halves, _lanes(_I32))

    return Vector(array, start, mask), generate


@intrinsic
def load_row(typing_context: Any, array: Any, start: Any) -> Any:
    """64 neighbours of an array of uint8."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        value = builder.load(_address(context, builder, signature.args, args, Row.form))
        value.align = 1
        return value

    return Row(array, start), generate


@intrinsic
def store_row(typing_context: Any, array: Any, start: Any, row: Any) -> Any:
    """The inverse of load_row."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        builder.store(args[2], _address(context, builder, signature.args, args, Row.form)).align = 1
        return context.get_dummy_value()

    return types.void(array, start, row), generate


@intrinsic
def row_of(typing_context: Any, value: Any) -> Any:
    """A row that holds a number in all lanes."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return _as_vectors(context, builder, (Row, *signature.args), (None, *args))[1]

    return Row(value), generate


def _of_two_rows(name: str) -> Callable[..., Any]:
    @intrinsic
    def apply(typing_context: Any, a: Any, b: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            return _call(builder, f"llvm.{name}.v64i8", Row.form, list(args))

        return Row(a, b), generate

    return apply


smaller, larger = _of_two_rows("umin"), _of_two_rows("umax")
"""Of two rows, lane by lane."""
sum_up_to_255 = _of_two_rows("uadd.sat")
"""Of two rows; 255 where their sum is beyond."""


def _quarter(number: int) -> Callable[..., Any]:
    @intrinsic
    def quarter(typing_context: Any, row: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            places = ir.Constant(_lanes(_I32), list(range(LANES * number, LANES * (number + 1))))
            return builder.zext(builder.shuffle_vector(args[0], args[0], places), _lanes(_I32))

        return Vector(row), generate

    return quarter


quarter_0, quarter_1, quarter_2, quarter_3 = (_quarter(number) for number in range(4))
"""Lanes 0 to 15, 16 to 31, ... of a row as a vector."""


@intrinsic
def joined(typing_context: Any, a: Any, b: Any, c: Any, d: Any) -> Any:
    """The row of the lowest bytes of four vectors."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        a, b, c, d = (builder.trunc(arg, _lanes(_I8)) for arg in args)
        both = ir.Constant(ir.VectorType(_I32, 2 * LANES), list(range(2 * LANES)))
        every = ir.Constant(ir.VectorType(_I32, ROW_LANES), list(range(ROW_LANES)))
        return builder.shuffle_vector(builder.shuffle_vector(a, b, both), builder.shuffle_vector(c, d, both), every)

    return Row(a, b, c, d), generate


@intrinsic
def bits_of(typing_context: Any, mask: Any) -> Any:
    """The 64 bits of a row's mask as an int64, the first lane in the lowest bit."""
    return types.int64(mask), lambda context, builder, signature, args: builder.bitcast(args[0], _I64)


@intrinsic
def mask_of(typing_context: Any, bits: Any, first: Any) -> Any:
    """The mask of 16 lanes from bit `first` on of an int64."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        shift = context.cast(builder, args[1], signature.args[1], types.int64)
        return builder.bitcast(builder.trunc(builder.lshr(args[0], shift), _I16), Mask.form)

    return Mask(bits, first), generate


@intrinsic
def lowest(typing_context: Any, bits: Any) -> Any:
    """The place of the lowest bit that is set in an int64 other than 0."""
    return types.int64(bits), lambda context, builder, signature, args: builder.cttz(args[0], _I1(1))


@intrinsic
def highest(typing_context: Any, bits: Any) -> Any:
    """The place of the highest bit that is set in an int64 other than 0."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.sub(_I64(63), builder.ctlz(args[0], _I1(1)))

    return types.int64(bits), generate
