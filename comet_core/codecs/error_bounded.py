"""The error-bounded codec: quantise, check, and code each code in the context of its neighbours; what misses verbatim.

Groups of 32 bands are the tasks: a group's values become codes of a byte, the value that the decoder will return is
compared with the original, and range ANS shortens the codes with a table for each context of left and upper neighbour
(`kernels/context_coder.py`). The tables come from a sample of the tensor (`kernels/contexts.py`). Codes too rare for a
place in the tables are escapes of one byte more; what misses the bound is kept as it is, at the place of an escape.
A group that would not shrink is stored losslessly. Where codes of a byte are too few for the bound, `two_planes.py`
takes two of them, and where those are too few, all is stored losslessly.

No spatial prediction: away from the image it adds the neighbours' noise to each value, which the contexts do not. At
the bounds that training uses, this takes fewer bits than the entropy of the codes given their neighbours' codes cut to
-3..3, because the contexts' levels follow the tensor's own codes.

The quantiser is defined in `kernels/reference.py`. Sources: the check and the verbatim values follow PFPL (Fallin et
al. 2025); the quantiser that of cuSZ (Tian et al. 2020), with a zero of its own for the sign of ReLU results.
"""

import math
from dataclasses import dataclass

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
from comet_core.codecs.grids import FLOATS, finite_range, grid_of
from comet_core.codecs.kernels import coder_of, quantizer_of, reference
from comet_core.codecs.kernels.chunks import run_chunks, scratch
from comet_core.codecs.kernels.contexts import Layout, Tables, layout_of, sample_starts, tables_of
from comet_core.codecs.kernels.reference import Grid
from comet_core.codecs.lossless import decode_bytes, decode_exactly, encode_bytes, encode_exactly
from comet_core.codecs.octaves import Octaves, decode_octaves, encode_octaves
from comet_core.codecs.two_planes import TwoPlanes, decode_in_two, encode_in_two

_EXACT = -1  # in place of a group's number of escapes


@dataclass(frozen=True, slots=True)
class _Meta:
    """parts = step and offset (2, C), tables, then a part for each group. Without meta all parts are exact."""

    inner: int
    sign_exact: bool
    layout: Layout
    num_escapes: tuple[int, ...]
    num_missed: tuple[int, ...]


class ErrorBoundedCodec(Codec):
    """Every finite value within the bound; see `ErrorBound` for its kinds and `Codec` for the rest.

    `sign_exact` keeps zeros apart from non-zeros and the sign of these, so that decoded > 0 is the mask of a ReLU.
    """

    name = "error_bounded"
    guarantee = "bounded"

    def encode(self, tensor: Tensor, bound: float | ErrorBound | None = None, *, sign_exact: bool = False) -> Encoded:
        dense, checked = dense_of(tensor), as_error_bound(bound)
        if checked.kind == "pw_rel":
            return encode_octaves(self, dense, checked) or self.record(dense, encode_exactly(dense))
        grid = grid_of(dense, checked, sign_exact)
        if grid is not None:
            layout = layout_of(dense)
            tables = _tables(flat_of(dense), grid, layout)
            encoded = (
                self._encode_finely(dense, checked, grid, sign_exact)
                if tables is None
                else self._encode_quantized(dense, grid, layout, tables)
            )
            if encoded is not None and encoded.nbytes < dense.nbytes:
                return encoded
        return self.record(dense, encode_exactly(dense))

    def _encode_quantized(self, dense: Tensor, grid: Grid, layout: Layout, tables: Tables) -> Encoded:
        task_values = _groups_a_task(dense) * layout.group
        tasks = flat_of(dense).split(task_values)
        found = run_chunks(
            lambda index: _encode_groups(tasks[index], index * task_values, grid, layout, tables),
            len(tasks),
            threaded=_threaded(dense),
        )
        num_escapes, num_missed, parts = zip(*(group for task in found for group in task), strict=True)
        meta = _Meta(grid.inner, grid.sign_exact, layout, num_escapes, num_missed)
        return self.record(dense, (torch.stack((grid.step, grid.offset)), tables.pack(), *parts), meta)

    def _encode_finely(self, dense: Tensor, bound: ErrorBound, grid: Grid, sign_exact: bool) -> Encoded | None:
        low, high = finite_range(dense, len(grid.step), grid.inner)
        limit = grid.limit.double().cpu()
        reach = 2 * torch.maximum(low.abs(), high.abs()) if sign_exact or bound.channel_dim is None else high - low
        spread = (reach / limit).where(limit > 0, 0).max().item()
        absolute = ErrorBound("abs", limit if bound.channel_dim is not None else limit.item(), bound.channel_dim)
        return encode_in_two(self, dense, absolute, spread, sign_exact)

    def decode(self, encoded: Encoded, device: torch.device | str | None = None) -> Tensor:
        self.check_own(encoded)
        if encoded.meta is None:
            return decode_exactly(encoded).to(device or encoded.device)
        if isinstance(encoded.meta, TwoPlanes):
            return decode_in_two(self, encoded).to(device or encoded.device)
        if isinstance(encoded.meta, Octaves):
            return decode_octaves(self, encoded).to(device or encoded.device)
        grid, tables, parts = _checked(encoded)
        meta, out = encoded.meta, empty_like_record(encoded)
        group_values = meta.layout.group
        groups_a_task = _groups_a_task(out)
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
    codes = _codes_for(x, layout)
    codes[len(x) :] = 0
    groups = x.split(layout.group)
    found = [
        quantizer_of(x).quantize(
            group, start + index * layout.group, grid, tables.low, len(tables.levels),
            codes[index * layout.group :][: len(group)], len(group) // 4,
        )
        for index, group in enumerate(groups)
    ]  # fmt: skip
    result: list[tuple[int, int, bytes | Tensor]] = []
    for group, bands, escaped in zip(
        groups, coder_of(x).encode_bands(codes, len(x), layout, tables), found, strict=True
    ):
        if escaped is not None:
            escapes, missed = escaped
            part = torch.cat([escapes, group[missed].view(torch.uint8), bands])
            if len(part) < group.nbytes:
                held = part.numpy().tobytes() if x.device.type == "cpu" else part
                result.append((len(escapes), len(missed), held))
                continue
        result.append((_EXACT, 0, encode_bytes(group)))
    return result


def _decode_groups(
    found: list[tuple[bytes | Tensor, int, int]], start: int, grid: Grid, layout: Layout, tables: Tables, out: Tensor
) -> None:
    """Write the values of groups into out (n,), each given by its part and its counts. Raises DamagedRecord."""
    groups = out.split(layout.group)
    coded = []
    for index, (part, num_escapes, num_missed) in enumerate(found):
        if num_escapes == _EXACT:
            decode_bytes(part, groups[index])
        else:
            data = torch.frombuffer(bytearray(part), dtype=torch.uint8) if isinstance(part, bytes) else part
            sizes = num_escapes, num_missed * out.itemsize
            coded.append((index, num_missed, *data.split((*sizes, len(data) - sum(sizes)))))
    # Groups that lie together are decoded at once; between them may be an exact one.
    runs = [coded] if len(coded) in (0, len(found)) else [[one] for one in coded]
    for run in runs:
        if run:
            begin = run[0][0] * layout.group
            values = out[begin : begin + len(run) * layout.group]
            codes = _codes_for(values, layout)[: len(values)]
            if not coder_of(out).decode_bands([bands for *_, bands in run], layout, tables, codes):
                raise DamagedRecord("the codes of a part do not end where they should")
            for index, num_missed, escapes, exact, _ in run:
                group, place = groups[index], (index * layout.group) - begin
                missed = quantizer_of(out).dequantize(
                    codes[place : place + len(group)], escapes, start + index * layout.group, grid, tables.low,
                    num_missed, group,
                )  # fmt: skip
                if missed is None:
                    raise DamagedRecord("the escapes of a part do not fit its codes")
                group[missed] = exact.clone().view(out.dtype)


def _codes_for(x: Tensor, layout: Layout) -> Tensor:
    """Room for the codes of x, with anything in it."""
    if x.device.type == "cpu":
        return torch.from_numpy(scratch("codes", layout.coded(len(x))))
    return torch.empty(layout.coded(len(x)), dtype=torch.uint8, device=x.device)


def _checked(encoded: Encoded) -> tuple[Grid, Tables, tuple[bytes | Tensor, ...]]:
    """Grid, tables and the groups' parts of a record. Raises DamagedRecord where they do not belong together."""
    meta = encoded.meta
    if not isinstance(meta, _Meta) or encoded.dtype not in FLOATS:
        raise DamagedRecord(f"its numbers are a {type(meta).__name__} for dtype {encoded.dtype}")
    layout, num_values = meta.layout, math.prod(encoded.shape)
    whole = (meta.inner, layout.left, layout.up, layout.restart, layout.band)
    if not all(isinstance(number, int) and 0 < number < 2**48 for number in whole) or layout.group >= 2**31:
        raise DamagedRecord(f"its layout is {layout}, with {meta.inner} neighbours of a channel")
    num_groups = -(-num_values // layout.group)
    check_num_parts(encoded, 2 + num_groups)
    if not len(meta.num_escapes) == len(meta.num_missed) == num_groups:
        raise DamagedRecord(f"it counts {len(meta.num_escapes)} groups of {num_groups}")
    levels, packed, *parts = encoded.parts
    num_channels = levels.shape[1] if isinstance(levels, Tensor) and levels.ndim == 2 else 0
    work = torch.promote_types(encoded.dtype, torch.float32)
    step, offset = tensor_part(encoded, 0, work, 2, num_channels)
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
    return Grid(step, step, offset, step, meta.inner, meta.sign_exact), Tables.unpack(packed), tuple(parts)


def _threaded(x: Tensor) -> bool:
    return x.device.type == "cpu" and coder_of(x) is not reference


def _groups_a_task(x: Tensor) -> int:
    """What the CPU's coder takes at once; on a GPU as many groups as keep it busy."""
    return 2 if x.device.type == "cpu" else 256


def _tables(flat: Tensor, grid: Grid, layout: Layout) -> Tables | None:
    """The tables for a tensor's codes, from a sample; None where codes of a byte do not pay."""
    starts, length = sample_starts(len(flat), layout)
    codes = torch.empty((len(starts), length), dtype=torch.uint8, device=flat.device)
    quantizer_of(flat).quantize_runs(flat, starts, grid, codes)
    return tables_of(codes.cpu().numpy(), layout, len(flat))
