"""The error-bounded codec: quantise, check, and code each code in the context of its neighbours; what misses verbatim.

Groups of 32 bands are the tasks: a group's values become codes of a byte, the value that the decoder will return is
compared with the original, and range ANS shortens what a prediction from the neighbours' codes leaves of them, with a
table for each context (`kernels/tables.py`, `kernels/context_coder.py`). The tables come from a sample of the tensor
(`kernels/contexts.py`). What is too rare for a place in the tables is an escape of one byte more; what misses the bound
is kept as it is. A group that would not shrink is stored losslessly.

Where codes of a byte are too few for the bound, `two_planes.py` takes two of them or more, unless lossless storage is
smaller. Bounds relative to each value go the way of `octaves.py`.

The quantiser is defined in `kernels/reference.py`. Sources: the check and the verbatim values follow PFPL (Fallin et
al. 2025); the quantiser that of cuSZ (Tian et al. 2020), with a zero of its own for the sign of ReLU results.
"""

import dataclasses
import math
import zlib
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import numpy as np
import torch
from torch import Tensor

from comet_core.codecs.base import (
    Codec,
    DamagedRecord,
    Encoded,
    ErrorBound,
    as_error_bound,
    check_num_parts,
    dense_of,
    empty_like_record,
    flat_of,
    tensor_part,
)
from comet_core.codecs.grids import FLOATS, from_levels_part, grid_of, levels_part, middles_of
from comet_core.codecs.kernels import error_bounded_of, reference
from comet_core.codecs.kernels.chunks import run_chunks
from comet_core.codecs.kernels.contexts import sample_starts, tables_of
from comet_core.codecs.kernels.reference import Grid
from comet_core.codecs.kernels.tables import Layout, Tables, layout_of
from comet_core.codecs.lossless import decode_bytes, decode_exactly, encode_bytes, encode_exactly
from comet_core.codecs.octaves import Octaves, decode_octaves, encode_octaves
from comet_core.codecs.two_planes import TwoPlanes, decode_in_two, encode_in_two
from comet_core.config import check_codec_params

_EXACT = -1  # in place of a group's number of escapes
_REACH_VALUES = 1 << 16
"""About so many values decide how fine the codes of a fine bound are."""


@dataclass(frozen=True, slots=True)
class _Meta:
    """parts = steps and offsets (2, C), tables, then a part for each group. Without meta all parts are exact."""

    inner: int
    sign_exact: bool
    key: int | None
    exponent: int | None
    layout: Layout
    num_escapes: tuple[int, ...]
    num_missed: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class _Choices:
    layout: Layout
    tables: Tables
    middles: tuple[np.ndarray, np.ndarray]


class ErrorBoundedCodec(Codec):
    """Every finite value within the bound; see `ErrorBound` for its kinds and `Codec` for the rest.

    `sign_exact` keeps zeros apart from non-zeros and the sign of these, so that decoded > 0 is the mask of a ReLU.

    With `dither` errors are uniform within the bound and independent of the values (`kernels/reference.py` says which
    values near zero are excepted), instead of a function of them; zeros stay zero. It costs ratio at coarse bounds. The
    noise is a hash of `seed` (0 to 2**32 - 1), of the tensor's own values and of the index: the same tensor gives the
    same record, and another one other noise. Raises ValueError for another `dither` or seed.
    """

    name = "error_bounded"
    guarantee = "bounded"

    def __init__(self, dither: bool = False, seed: int = 0) -> None:
        checked = check_codec_params(self.name, {"dither": dither, "seed": seed})
        self.dither, self.seed = checked["dither"], checked["seed"]

    def encode(self, tensor: Tensor, bound: float | ErrorBound | None = None, *, sign_exact: bool = False) -> Encoded:
        return self.encode_as(tensor, bound, None, sign_exact=sign_exact)

    def choices_of(self, encoded: Encoded) -> Any:
        if not isinstance(encoded.meta, _Meta):
            return None
        grid, tables, _ = _checked(encoded)
        return _Choices(encoded.meta.layout, tables, middles_of(grid))

    def encode_as(
        self, tensor: Tensor, bound: float | ErrorBound | None, choices: Any, *, sign_exact: bool = False
    ) -> Encoded:
        dense, checked = dense_of(tensor), as_error_bound(bound)
        if checked.kind == "pw_rel":
            return encode_octaves(self, dense, checked) or self.record(dense, encode_exactly(dense))
        layout = layout_of(dense)
        known = isinstance(choices, _Choices) and choices.layout == layout
        grid = grid_of(dense, checked, sign_exact, choices.middles if known else None)
        if grid is not None:
            tables: Tables | None
            if known and not self.dither:
                tables = choices.tables
            else:
                grid, tables = self._chosen(dense, grid, layout)
            encoded = (
                self._encode_finely(dense, checked, grid, sign_exact)
                if tables is None
                else self._encode_quantized(dense, grid, layout, tables)
            )
            if encoded is not None and encoded.nbytes < dense.nbytes:
                return encoded
        return self.record(dense, encode_exactly(dense))

    def _chosen(self, dense: Tensor, grid: Grid, layout: Layout) -> tuple[Grid, Tables | None]:
        """The grid, with the dither's key, and tables, from a sample of the tensor."""
        if self.dither:
            grid = dataclasses.replace(grid, key=self.seed)
        sample = _sample(flat_of(dense), grid, layout)
        if self.dither:
            grid = dataclasses.replace(grid, key=zlib.crc32(sample.tobytes(), self.seed))
        return grid, tables_of(sample, layout, dense.numel())

    def _encode_quantized(self, dense: Tensor, grid: Grid, layout: Layout, tables: Tables) -> Encoded:
        task_values = error_bounded_of(dense).GROUPS_A_TASK * layout.group
        tasks = flat_of(dense).split(task_values)
        found = run_chunks(
            lambda index: _encode_groups(tasks[index], index * task_values, grid, layout, tables),
            len(tasks),
            threaded=_threaded(dense),
        )
        num_escapes, num_missed, parts = zip(*(group for task in found for group in task), strict=True)
        levels, exponent = levels_part(grid)
        meta = _Meta(grid.inner, grid.sign_exact, grid.key, exponent, layout, num_escapes, num_missed)
        return self.record(dense, (levels, tables.packed, *parts), meta)

    def _encode_finely(self, dense: Tensor, bound: ErrorBound, grid: Grid, sign_exact: bool) -> Encoded | None:
        limit = grid.limit.double().cpu()
        absolute = ErrorBound("abs", limit if bound.channel_dim is not None else limit.item(), bound.channel_dim)
        in_planes = encode_in_two(self, dense, absolute, _reach(flat_of(dense), grid), sign_exact)
        exact = self.record(dense, encode_exactly(dense))
        return in_planes if in_planes is not None and in_planes.nbytes < exact.nbytes else exact

    def decode(
        self, encoded: Encoded, device: torch.device | str | None = None, *, out: Tensor | None = None
    ) -> Tensor:
        self.check_own(encoded)
        if encoded.meta is None:
            return decode_exactly(encoded, out).to(device or encoded.device)
        if isinstance(encoded.meta, TwoPlanes):
            return decode_in_two(self, encoded).to(device or encoded.device)
        if isinstance(encoded.meta, Octaves):
            return decode_octaves(self, encoded).to(device or encoded.device)
        grid, tables, parts = _checked(encoded)
        meta, out = encoded.meta, empty_like_record(encoded) if out is None else out
        group_values = meta.layout.group
        groups_a_task = error_bounded_of(out).GROUPS_A_TASK
        tasks = flat_of(out).split(groups_a_task * group_values)

        def decode_task(index: int) -> None:
            first = index * groups_a_task
            chosen = slice(first, first + groups_a_task)
            groups = list(zip(parts[chosen], meta.num_escapes[chosen], meta.num_missed[chosen], strict=True))
            _decode_groups(groups, first * group_values, grid, meta.layout, tables, tasks[index])

        run_chunks(decode_task, len(tasks), threaded=_threaded(out))
        return out.to(device or encoded.device)


def _encode_groups(
    x: Tensor, start: int, grid: Grid, layout: Layout, tables: Tables
) -> list[tuple[int, int, bytes | Tensor]]:
    """For each group: numbers of escapes and of missed values, and the part: escapes, missed values, coded bands."""
    found = error_bounded_of(x).encode_values(x, start, grid, layout, tables)
    return [
        quantized if quantized is not None and len(quantized[2]) < group.nbytes else (_EXACT, 0, encode_bytes(group))
        for group, quantized in zip(x.split(layout.group), found, strict=True)
    ]


def _decode_groups(
    found: list[tuple[bytes | Tensor, int, int]], start: int, grid: Grid, layout: Layout, tables: Tables, out: Tensor
) -> None:
    """Write the values of groups into out (n,), each given by its part and its counts. Raises DamagedRecord."""
    # Coded groups that lie together are decoded at once; between them may be exact ones.
    for exact, run in groupby(range(len(found)), lambda index: found[index][1] == _EXACT):
        indices = list(run)
        first, end = indices[0] * layout.group, (indices[-1] + 1) * layout.group
        if exact:
            for index, values in zip(indices, out[first:end].split(layout.group), strict=True):
                decode_bytes(found[index][0], values)
        elif not error_bounded_of(out).decode_values(
            found[indices[0] : indices[-1] + 1], start + first, grid, layout, tables, out[first:end]
        ):
            raise DamagedRecord("the codes of a part do not end where they should, or its escapes do not fit them")


def _checked(encoded: Encoded) -> tuple[Grid, Tables, tuple[bytes | Tensor, ...]]:
    """Grid, tables and the groups' parts of a record. Raises DamagedRecord where they do not belong together."""
    meta = encoded.meta
    if not isinstance(meta, _Meta) or encoded.dtype not in FLOATS:
        raise DamagedRecord(f"its numbers are a {type(meta).__name__} for dtype {encoded.dtype}")
    layout, num_values = meta.layout, math.prod(encoded.shape)
    whole = (meta.inner, layout.left, layout.up, layout.restart, layout.band)
    if not all(isinstance(number, int) and 0 < number < 2**48 for number in whole) or layout.group >= 2**31:
        raise DamagedRecord(f"its layout is {layout}, with {meta.inner} neighbours of a channel")
    if meta.key is not None and not (isinstance(meta.key, int) and 0 <= meta.key < 1 << 32):
        raise DamagedRecord(f"its key of the dither is {meta.key!r}")
    num_groups = -(-num_values // layout.group)
    check_num_parts(encoded, 2 + num_groups)
    if not len(meta.num_escapes) == len(meta.num_missed) == num_groups:
        raise DamagedRecord(f"it counts {len(meta.num_escapes)} groups of {num_groups}")
    levels, packed, *parts = encoded.parts
    num_channels = levels.shape[1] if isinstance(levels, Tensor) and levels.ndim == 2 else 0
    work = torch.promote_types(encoded.dtype, torch.float32)
    if meta.exponent is not None and not (isinstance(meta.exponent, int) and -1074 <= meta.exponent < 1024):
        raise DamagedRecord(f"the exponent of its steps is {meta.exponent!r}")
    levels = tensor_part(encoded, 0, work if meta.exponent is None else torch.float16, 2, num_channels)
    step, offset = from_levels_part(levels, meta.exponent, work)
    if not num_channels or not isinstance(packed, bytes):
        raise DamagedRecord(f"it has {num_channels} channels, and tables of type {type(packed).__name__}")
    group_bytes = layout.group * encoded.dtype.itemsize
    for num_escapes, num_missed, part in zip(meta.num_escapes, meta.num_missed, parts, strict=True):
        if num_escapes == _EXACT:
            continue
        if (encoded.device.type == "cpu") != isinstance(part, bytes) or len(part) > group_bytes:
            raise DamagedRecord(f"a part is a {type(part).__name__} of {len(part)} bytes")
        least_bytes = num_escapes + num_missed * encoded.dtype.itemsize + 4  # the state of one band
        if min(num_escapes, num_missed) < 0 or least_bytes > len(part):
            raise DamagedRecord(f"a part of {len(part)} bytes cannot hold {num_escapes} and {num_missed} values")
    return Grid(step, step, offset, step, meta.inner, meta.sign_exact, meta.key), Tables.unpack(packed), tuple(parts)


def _threaded(x: Tensor) -> bool:
    return x.device.type == "cpu" and error_bounded_of(x) is not reference


def _reach(flat: Tensor, grid: Grid) -> Tensor:
    """How many steps some of the values are away from the middle of their channel; float64 on the CPU."""
    # An odd distance takes values of all channels.
    indices = torch.arange(0, len(flat), max(len(flat) // _REACH_VALUES, 1) | 1, device=flat.device)
    channels = (indices // grid.inner) % len(grid.step)
    steps = flat[indices].double() / grid.step[channels].double() - grid.offset[channels].double()
    return steps.abs().where(grid.limit[channels] > 0, 0).cpu()


def _sample(flat: Tensor, grid: Grid, layout: Layout) -> np.ndarray:
    """(runs, length) uint8: q + 128, or 0, of some of a tensor's values."""
    starts, length = sample_starts(len(flat), layout)
    codes = torch.empty((len(starts), length), dtype=torch.uint8, device=flat.device)
    error_bounded_of(flat).quantize_runs(flat, starts, grid, codes)
    return np.asarray(codes.cpu().numpy())
