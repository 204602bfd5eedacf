"""Launches of `kernels.cu` through CuPy: the error-bounded codec's stages for tensors on a GPU.

The same functions as in `reference.py`, with equal results. CuPy compiles the source once a process and device; memory
comes from torch's allocator, so that peaks are honest, and device and stream are torch's at each launch. A warp codes a
group of 32 bands, so all groups of a tensor are coded in one launch. Payloads are the CPU's, byte for byte.
"""

import importlib.util
from collections.abc import Sequence
from importlib import resources
from typing import Any

import numpy as np
import torch
from torch import Tensor

from comet_core.codecs.kernels.contexts import LANES, Layout, Tables
from comet_core.codecs.kernels.reference import Grid

SOURCE = resources.files(__package__).joinpath("kernels.cu").read_text()
OPTIONS = ("-std=c++17", "-fmad=false")
_BLOCK = 256
GROUPS_A_TASK = 256
"""Enough to keep a GPU busy."""
_NAMES = {torch.float32: "float32", torch.float64: "float64", torch.float16: "float16", torch.bfloat16: "bfloat16"}
_modules: dict[int, Any] = {}


def serves(x: Tensor) -> bool:
    """Whether a tensor lies on a GPU of NVIDIA's, and CuPy is there to launch on it."""
    return x.is_cuda and torch.version.cuda is not None and importlib.util.find_spec("cupy") is not None


def encode_values(
    x: Tensor, start: int, grid: Grid, layout: Layout, tables: Tables
) -> list[tuple[int, int, Tensor] | None]:
    """Twin of reference.encode_values."""
    wide = _wide_codes(x, start, grid)
    code = wide.to(torch.int16) - (tables.low + 127)
    codes = torch.zeros(layout.coded(len(x)), dtype=torch.uint8, device=x.device)
    codes[: len(x)] = torch.where((code > 0) & (code < len(tables.levels)), code, 0)
    escaped, missed = (codes[: len(x)] == 0).nonzero()[:, 0], (wide == 0).nonzero()[:, 0]
    payloads = _encode_bands(codes, len(x), layout, tables)
    escapes = wide[escaped].split(_counts(escaped, layout, len(payloads)))
    exact = x[missed].split(_counts(missed, layout, len(payloads)))
    return [
        (len(of_group), len(values), torch.cat([of_group, values.view(torch.uint8), payload]))
        if len(of_group) <= min(layout.group, len(x) - index * layout.group) // 4
        else None
        for index, (of_group, values, payload) in enumerate(zip(escapes, exact, payloads, strict=True))
    ]


def decode_values(
    found: Sequence[tuple[Tensor, int, int]], start: int, grid: Grid, layout: Layout, tables: Tables, out: Tensor
) -> bool:
    """Twin of reference.decode_values."""
    beside, payloads = [], []
    for part, num_escapes, num_missed in found:
        sizes = num_escapes, num_missed * out.itemsize
        *of_group, payload = part.split((*sizes, len(part) - sum(sizes)))
        beside.append(of_group)
        payloads.append(payload)
    codes = torch.empty(len(out), dtype=torch.uint8, device=out.device)
    if not _decode_bands(payloads, layout, tables, codes):
        return False
    escapes, exact = (torch.cat(pieces) for pieces in zip(*beside, strict=True))
    escaped = (codes == 0).nonzero()[:, 0]
    if _counts(escaped, layout, len(found)) != [num_escapes for _, num_escapes, _ in found]:
        return False
    wide = codes + torch.tensor((tables.low + 127) % 256, dtype=torch.uint8, device=codes.device)
    wide[escaped] = escapes
    missed = (wide == 0).nonzero()[:, 0]
    if _counts(missed, layout, len(found)) != [num_missed for *_, num_missed in found]:
        return False
    _launch(
        f"dequantize_{_NAMES[out.dtype]}", -(-len(out) // _BLOCK), _BLOCK, wide, len(out), start, grid.step,
        grid.offset, len(grid.step), grid.inner, int(grid.sign_exact), -1 if grid.key is None else grid.key, out,
    )  # fmt: skip
    out[missed] = exact.view(out.dtype)
    return True


def _counts(places: Tensor, layout: Layout, num_groups: int) -> list[int]:
    """How many of the places lie in each group."""
    counts: list[int] = torch.bincount(places // layout.group, minlength=num_groups).tolist()
    return counts


def quantize_runs(x: Tensor, starts: np.ndarray, grid: Grid, codes: Tensor) -> None:
    """Twin of reference.quantize_runs."""
    length = codes.shape[1]
    for start, of_run in zip(starts.tolist(), codes, strict=True):
        of_run.copy_(_wide_codes(x[start : start + length], start, grid))


def _encode_bands(codes: Tensor, num_values: int, layout: Layout, tables: Tables) -> list[Tensor]:
    """The payload of each group."""
    num_bands = -(-num_values // layout.band)
    num_groups = -(-num_bands // LANES)
    device = codes.device
    states = torch.empty(num_bands * 4, dtype=torch.uint8, device=device)
    words = torch.empty(num_groups * layout.group * 2, dtype=torch.uint8, device=device)
    used = torch.empty(num_groups, dtype=torch.int64, device=device)
    context_of, slots = (_on(device, table) for table in tables.for_encoding)
    _launch(
        "encode_bands", num_groups, LANES, codes, num_values, *_numbers(layout, num_values), _on(device, tables.levels),
        context_of, slots, states, words, used,
    )  # fmt: skip
    counts = used.tolist()
    room = 2 * LANES * layout.band
    return [
        torch.cat([states[4 * LANES * group :][: 4 * LANES], words[room * group :][: 2 * count]])
        for group, count in enumerate(counts)
    ]


def _decode_bands(payloads: Sequence[Tensor], layout: Layout, tables: Tables, codes: Tensor) -> bool:
    """Fill codes from payloads; False where these are not such."""
    num_bands, device = -(-len(codes) // layout.band), codes.device
    num_states = [min(LANES, num_bands - first) for first in range(0, num_bands, LANES)]
    sizes = [len(payload) - 4 * count for payload, count in zip(payloads, num_states, strict=True)]
    if min(sizes) < 0 or any(size % 2 for size in sizes):
        return False
    states = torch.cat([payload[: 4 * count] for payload, count in zip(payloads, num_states, strict=True)])
    words = torch.cat([payload[4 * count :] for payload, count in zip(payloads, num_states, strict=True)])
    first = _on(device, np.cumsum([0, *sizes]) // 2)
    damaged = torch.zeros(1, dtype=torch.int32, device=device)
    context_of, slots = (_on(device, table) for table in tables.for_decoding)
    _launch(
        "decode_bands", len(payloads), LANES, states, words, first, len(codes), *_numbers(layout, len(codes)),
        _on(device, tables.levels), context_of, slots, codes, damaged,
    )  # fmt: skip
    return not int(damaged)


def _numbers(layout: Layout, num_values: int) -> tuple[int, int, int, int]:
    """Left, up, restart and band, of which one alone is no longer than its values."""
    return layout.left, layout.up, layout.restart, min(layout.band, num_values)


def _wide_codes(x: Tensor, start: int, grid: Grid) -> Tensor:
    wide = torch.empty(len(x), dtype=torch.uint8, device=x.device)
    _launch(
        f"quantize_{_NAMES[x.dtype]}", -(-len(x) // _BLOCK), _BLOCK, x, len(x), start, grid.step, grid.inverse,
        grid.offset, grid.limit, len(grid.step), grid.inner, int(grid.sign_exact),
        -1 if grid.key is None else grid.key, wide,
    )  # fmt: skip
    return wide


def _on(device: torch.device, table: np.ndarray) -> Tensor:
    # torch copies arrays of uint32 as bytes: the kernel knows what they are.
    return torch.from_numpy(np.ascontiguousarray(table).view(np.uint8)).to(device)


def _launch(name: str, num_blocks: int, block: int, *args: Any) -> None:
    """Launch a kernel on the current stream of the first tensor's device. Tensors are passed by address."""
    cupy = importlib.import_module("cupy")
    device = args[0].device
    with torch.cuda.device(device), cupy.cuda.Device(device.index):
        module = _modules.get(device.index)
        if module is None:
            module = _modules[device.index] = cupy.RawModule(code=SOURCE, options=OPTIONS)
        with cupy.cuda.ExternalStream(torch.cuda.current_stream(device).cuda_stream):
            passed = [np.intp(arg.data_ptr()) if isinstance(arg, Tensor) else np.int64(arg) for arg in args]
            module.get_function(name)((num_blocks,), (block,), tuple(passed))
