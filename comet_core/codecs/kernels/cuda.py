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

from comet_core.codecs.kernels.reference import Grid
from comet_core.codecs.kernels.tables import LANES, MOST_THRESHOLDS, Layout, Tables

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
    codes, device = _codes(x, start, grid), x.device
    num_bands = -(-len(x) // layout.band)
    num_groups = -(-num_bands // LANES)
    states = torch.empty(num_bands * 4, dtype=torch.uint8, device=device)
    words = torch.empty(num_groups * layout.group * 2, dtype=torch.uint8, device=device)
    escapes = torch.empty(num_groups * layout.group, dtype=torch.uint8, device=device)
    used = torch.empty((num_groups, 2), dtype=torch.int64, device=device)
    context_of, slots = (_on(device, table) for table in tables.for_encoding)
    _launch(
        "encode_bands", num_groups, LANES, codes, len(x), *_numbers(layout, len(x)), _model(device, tables), context_of,
        slots, states, words, escapes, used,
    )  # fmt: skip
    missed = (codes == 0).nonzero()[:, 0]
    exact = x[missed].split(_counts(missed, layout, num_groups))
    room = LANES * min(layout.band, len(x))
    found: list[tuple[int, int, Tensor] | None] = []
    for index, ((num_words, num_escapes), values) in enumerate(zip(used.tolist(), exact, strict=True)):
        pieces = (
            escapes[room * index :][room - num_escapes : room],
            values.view(torch.uint8),
            states[4 * LANES * index :][: 4 * LANES],
            words[2 * room * index :][: 2 * num_words],
        )
        fits = max(num_escapes, len(values)) <= min(layout.group, len(x) - index * layout.group) // 4
        found.append((num_escapes, len(values), torch.cat(pieces)) if fits else None)
    return found


def decode_values(
    found: Sequence[tuple[Tensor, int, int]], start: int, grid: Grid, layout: Layout, tables: Tables, out: Tensor
) -> bool:
    """Twin of reference.decode_values."""
    num_bands, device = -(-len(out) // layout.band), out.device
    pieces, sizes = [], []
    for index, (part, num_escapes, num_missed) in enumerate(found):
        state_bytes = 4 * min(LANES, num_bands - index * LANES)
        of_part = [num_escapes, num_missed * out.itemsize, state_bytes]
        word_bytes = len(part) - sum(of_part)
        if word_bytes < 0 or word_bytes % 2:
            return False
        pieces.append(part.split((*of_part, word_bytes)))
        sizes.append((num_escapes, word_bytes // 2))
    escapes, exact, states, words = (torch.cat(of_kind) for of_kind in zip(*pieces, strict=True))
    first_escape, first_word = (_on(device, np.cumsum([0, *of_kind])) for of_kind in zip(*sizes, strict=True))
    codes = torch.empty(len(out), dtype=torch.uint8, device=device)
    damaged = torch.zeros(1, dtype=torch.int32, device=device)
    context_of, slots = (_on(device, table) for table in tables.for_decoding)
    _launch(
        "decode_bands", len(found), LANES, states, words, first_word, escapes, first_escape, len(out),
        *_numbers(layout, len(out)), _model(device, tables), context_of, slots, codes, damaged,
    )  # fmt: skip
    missed = (codes == 0).nonzero()[:, 0]
    if int(damaged) or _counts(missed, layout, len(found)) != [num_missed for *_, num_missed in found]:
        return False
    _launch(
        f"dequantize_{_NAMES[out.dtype]}", -(-len(out) // _BLOCK), _BLOCK, codes, len(out), start, grid.step,
        grid.offset, len(grid.step), grid.inner, int(grid.sign_exact), -1 if grid.key is None else grid.key, out,
    )  # fmt: skip
    out[missed] = exact.view(out.dtype)
    return True


def _counts(places: Tensor, layout: Layout, num_groups: int) -> list[int]:
    """How many of the places lie in each group."""
    counts: list[int] = torch.bincount(places // layout.group, minlength=num_groups).tolist()
    return counts


def _model(device: torch.device, tables: Tables) -> Tensor:
    """The struct `Model` of the source."""
    numbers = np.array([tables.predicts, tables.shift, tables.frequencies.shape[1]], np.int64).view(np.uint8)
    levels = [
        np.concatenate([[len(levels)], levels, np.zeros(MOST_THRESHOLDS - len(levels))]).astype(np.uint8)
        for levels in (tables.first_levels, tables.second_levels)
    ]
    return _on(device, np.concatenate([numbers, *levels]))


def quantize_runs(x: Tensor, starts: np.ndarray, grid: Grid, codes: Tensor) -> None:
    """Twin of reference.quantize_runs."""
    length = codes.shape[1]
    for start, of_run in zip(starts.tolist(), codes, strict=True):
        of_run.copy_(_codes(x[start : start + length], start, grid))


def _numbers(layout: Layout, num_values: int) -> tuple[int, int, int, int]:
    """Left, up, restart and band, of which one alone is no longer than its values."""
    return layout.left, layout.up, layout.restart, min(layout.band, num_values)


def _codes(x: Tensor, start: int, grid: Grid) -> Tensor:
    codes = torch.empty(len(x), dtype=torch.uint8, device=x.device)
    _launch(
        f"quantize_{_NAMES[x.dtype]}", -(-len(x) // _BLOCK), _BLOCK, x, len(x), start, grid.step, grid.inverse,
        grid.offset, grid.limit, len(grid.step), grid.inner, int(grid.sign_exact),
        -1 if grid.key is None else grid.key, codes,
    )  # fmt: skip
    return codes


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
