"""The CUDA source without a GPU: it compiles for the cards in use, and its per-lane functions are the reference's."""

import ctypes
import dataclasses
import importlib.util
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest
import torch

from comet_core.codecs import get_codec, kernels
from comet_core.codecs.base import DamagedRecord, ErrorBound
from comet_core.codecs.kernels import cuda, reference
from comet_core.codecs.kernels.contexts import sample_starts, tables_of
from comet_core.codecs.kernels.reference import Grid
from comet_core.codecs.kernels.tables import Layout, layout_of

CPU = torch.device("cpu")
DTYPES = {"float32": torch.float32, "float64": torch.float64, "float16": torch.float16, "bfloat16": torch.bfloat16}


class HostLayout(ctypes.Structure):
    _fields_ = [(name, ctypes.c_int64) for name in ("left", "up", "restart", "band")]


@pytest.mark.parametrize("architecture", ["sm_80", "sm_90", "sm_100"])
def test_the_source_compiles_for_the_cards_in_use(architecture):
    found = importlib.util.find_spec("nvidia")  # a namespace that several wheels share
    folders = list(found.submodule_search_locations or ()) if found else []
    path = next((path for folder in folders for path in Path(folder).glob("*/lib/libnvrtc.so.*")), None)
    if path is None:
        pytest.skip("missing tool: NVRTC, pip install nvidia-cuda-nvrtc")
    nvrtc = ctypes.CDLL(str(path))
    program = ctypes.c_void_p()
    assert nvrtc.nvrtcCreateProgram(ctypes.byref(program), cuda.SOURCE.encode(), b"kernels.cu", 0, None, None) == 0
    options = [option.encode() for option in (*cuda.OPTIONS, f"-arch={architecture}")]
    failed = nvrtc.nvrtcCompileProgram(program, len(options), (ctypes.c_char_p * len(options))(*options))
    size = ctypes.c_size_t()
    nvrtc.nvrtcGetProgramLogSize(program, ctypes.byref(size))
    log = ctypes.create_string_buffer(size.value)
    nvrtc.nvrtcGetProgramLog(program, log)
    assert not failed and b"warning" not in log.value, log.value.decode()
    nvrtc.nvrtcGetCUBINSize(program, ctypes.byref(size))
    cubin = ctypes.create_string_buffer(size.value)
    assert nvrtc.nvrtcGetCUBIN(program, cubin) == 0
    for name in (
        "encode_bands",
        "decode_bands",
        *(f"{verb}_{dtype}" for verb in ("quantize", "dequantize") for dtype in DTYPES),
    ):
        assert name.encode() in cubin.raw


@pytest.fixture(scope="module")
def host(tmp_path_factory):
    compiler = shutil.which("g++") or shutil.which("clang++")
    if compiler is None:
        pytest.skip("missing tool: a C++ compiler, apt-get install g++")
    folder = tmp_path_factory.mktemp("host")
    (folder / "kernels.cpp").write_text(cuda.SOURCE)
    command = [compiler, "-O2", "-std=c++17", "-ffp-contract=off", "-Wall", "-Wextra", "-Werror", "-shared", "-fPIC"]
    subprocess.run([*command, "kernels.cpp", "-o", "kernels.so"], cwd=folder, check=True)
    library = ctypes.CDLL(str(folder / "kernels.so"))
    library.encode_group.restype = library.decode_group.restype = ctypes.c_int64
    return library


def pointer(array):
    return ctypes.c_void_p(array.data_ptr() if torch.is_tensor(array) else array.ctypes.data)


def values(dtype):
    generator = torch.Generator().manual_seed(0)
    normal = torch.randn(5000, generator=generator, dtype=torch.float64)
    info = torch.finfo(dtype)
    special = [0.0, -0.0, float("nan"), float("inf"), -float("inf"), info.max, info.min, info.tiny, -info.tiny / 8, 1.0]
    some = torch.tensor(special, dtype=torch.float64).repeat(50)
    halves = torch.arange(-600, 600).double() / 8
    yield from (x.to(dtype) for x in (normal, normal * 1e-5, normal * 1e4, some, halves, normal.relu()))
    if dtype.itemsize == 2:
        yield torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(dtype)


@pytest.mark.parametrize("name", DTYPES)
@pytest.mark.parametrize("sign_exact", [False, True])
@pytest.mark.parametrize("key", [None, 0, 0xDEADBEEF])
def test_the_quantiser_of_a_thread_is_the_references(host, name, sign_exact, key):
    dtype = DTYPES[name]
    work = torch.promote_types(dtype, torch.float32)
    for scale, offset, share in ((0.5, 3.25, 0.5), (0.013, 0, 0.5), (1e-6, -2, 0.3), (300.0, 0.7, 0.6)):
        offset = 0 if sign_exact else offset
        step, inverse, place, limit = torch.tensor([scale, 1 / scale, offset, scale * share]).to(work).split(1)
        grid = Grid(step, inverse, place, limit, 1 << 40, sign_exact, key)
        start, passed_key = ctypes.c_int64((1 << 32) - 99), ctypes.c_int64(-1 if key is None else key)
        packed = torch.cat([step, inverse, place, limit])
        for x in values(dtype):
            wide = torch.empty(len(x), dtype=torch.uint8)
            expected, missed = reference.quantize(x, start.value, grid)
            count = ctypes.c_int64(len(x))
            given = count, start, pointer(packed), int(sign_exact), passed_key
            getattr(host, f"quantize_{name}")(pointer(x), *given, pointer(wide))
            assert torch.equal(wide, expected)
            y, y_expected = torch.empty_like(x), torch.empty_like(x)
            assert torch.equal(reference.dequantize(expected, start.value, grid, y_expected), missed)
            getattr(host, f"dequantize_{name}")(pointer(wide), *given, pointer(y))
            y[missed], y_expected[missed] = 0, 0
            assert torch.equal(y.view(torch.uint8), y_expected.view(torch.uint8))


@pytest.mark.parametrize(
    "shape", [(1,), (50,), (3000,), (3, 5, 7, 7), (4, 4, 16, 16), (8, 3, 32, 32), (1, 2, 100, 130)], ids=str
)
@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("num_codes", [3, 40])
def test_the_coder_of_a_lane_is_the_references(host, shape, memory_format, num_codes):
    if memory_format == torch.channels_last and len(shape) != 4:
        return
    x = torch.empty(shape).to(memory_format=memory_format)
    layout = layout_of(x)
    random = np.random.default_rng(0)
    wide = (np.abs(np.rint(random.standard_normal(x.numel()).cumsum())) % num_codes).astype(np.uint8) + 100
    starts, length = sample_starts(len(wide), layout)
    tables = tables_of(np.stack([wide[start : start + length] for start in starts]), layout, len(wide))
    assert tables is not None
    codes = wide[: layout.group]
    escapes_expected, payload_expected = reference._encode_group(torch.from_numpy(codes), layout, tables)
    num_bands = -(-len(codes) // layout.band)
    of_host, model = HostLayout(layout.left, layout.up, layout.restart, layout.band), cuda._model(CPU, tables)
    states, words = np.zeros(32, np.uint32), np.zeros(len(codes) + 1, np.uint16)
    count, num_escapes, escapes = ctypes.c_int64(len(codes)), ctypes.c_int64(), np.zeros(len(codes), np.uint8)
    context_of, slots = tables.for_encoding
    used = host.encode_group(
        pointer(codes), count, ctypes.byref(of_host), pointer(model), pointer(context_of), pointer(slots),
        pointer(states), pointer(words), pointer(escapes), ctypes.byref(num_escapes),
    )  # fmt: skip
    found = np.concatenate([states[:num_bands].view(np.uint8), words[:used].view(np.uint8)])
    assert np.array_equal(found, payload_expected.numpy())
    escapes = escapes[len(escapes) - num_escapes.value :]
    assert np.array_equal(escapes, escapes_expected.numpy())
    context_of, slots = tables.for_decoding
    decoded = np.zeros_like(codes)
    left = host.decode_group(
        pointer(states), pointer(words), ctypes.c_int64(used), pointer(escapes), num_escapes, count,
        ctypes.byref(of_host), pointer(model), pointer(context_of), pointer(slots), pointer(decoded),
    )  # fmt: skip
    assert left == 0 and (states == 1 << 16).all() and np.array_equal(decoded, codes)


def test_a_layout_has_the_fields_that_the_source_expects():
    assert [name for name, _ in HostLayout._fields_] == list(Layout.__dataclass_fields__)


class HostLaunch:
    """In place of cuda._launch: the same arguments to the host's build, group by group and channel by channel."""

    def __init__(self, host):
        self.host = host

    def __call__(self, name, num_blocks, block, *args):
        verb, _, dtype = name.rpartition("_")
        if dtype == "bands":
            getattr(self, name)(*args)
        else:
            self.values(name, verb == "quantize", *args)

    def values(self, name, quantizes, source, count, start, *grid_and_target):
        *grid, num_channels, inner, sign_exact, key, target = grid_and_target
        assert len(source) == len(target) == count
        step, inverse, offset, limit = grid if quantizes else (grid[0], grid[0], grid[1], grid[0])
        first = 0
        while first < count:
            run = min(inner - (start + first) % inner, count - first)
            channel = (start + first) // inner % num_channels
            packed = torch.stack([entry[channel] for entry in (step, inverse, offset, limit)])
            getattr(self.host, name)(
                pointer(source[first:]), ctypes.c_int64(run), ctypes.c_int64(start + first), pointer(packed),
                sign_exact, ctypes.c_int64(key), pointer(target[first:]),
            )  # fmt: skip
            first += run

    def groups(self, num_values, numbers):
        layout = HostLayout(*numbers)
        for group, first in enumerate(range(0, num_values, 32 * layout.band)):
            count = min(num_values - first, 32 * layout.band)
            yield group, first, ctypes.c_int64(count), -(-count // layout.band), ctypes.byref(layout)

    def encode_bands(
        self, codes, num_values, left, up, restart, band, model, context_of, slots, states, words, escapes, used
    ):
        for group, first, count, num_bands, layout in self.groups(num_values, (left, up, restart, band)):
            of_group, num_escapes = np.zeros(32, np.uint32), ctypes.c_int64()
            own = torch.zeros(count.value, dtype=torch.uint8)
            num_words = self.host.encode_group(
                pointer(codes[first:]), count, layout, pointer(model), pointer(context_of), pointer(slots),
                pointer(of_group), pointer(words[2 * first :]), pointer(own), ctypes.byref(num_escapes),
            )  # fmt: skip
            states.view(torch.int32)[32 * group :][:num_bands] = torch.from_numpy(of_group.view(np.int32))[:num_bands]
            end, taken = 32 * band * (group + 1), num_escapes.value
            escapes[end - taken : end] = own[len(own) - taken :]
            used[group] = torch.tensor([num_words, taken])

    def decode_bands(
        self, states, words, first_words, escapes, first_escapes, num_values, left, up, restart, band, model,
        context_of, slots, codes, damaged,
    ):  # fmt: skip
        first_word, first_escape = (firsts.view(torch.int64).tolist() for firsts in (first_words, first_escapes))
        for group, first, count, num_bands, layout in self.groups(num_values, (left, up, restart, band)):
            of_group = np.full(32, 1 << 16, np.uint32)
            of_group[:num_bands] = states.view(torch.int32)[32 * group :][:num_bands].numpy().view(np.uint32)
            rest = self.host.decode_group(
                pointer(of_group), pointer(words[2 * first_word[group] :]),
                ctypes.c_int64(first_word[group + 1] - first_word[group]), pointer(escapes[first_escape[group] :]),
                ctypes.c_int64(first_escape[group + 1] - first_escape[group]), count, layout, pointer(model),
                pointer(context_of), pointer(slots), pointer(codes[first:]),
            )  # fmt: skip
            if rest or (of_group != 1 << 16).any():
                damaged[0] = 1


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=str)
@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last], ids=str)
@pytest.mark.parametrize("dither", [False, True])
def test_a_record_made_with_the_launches_of_the_gpu_is_the_cpus(
    host, check_codec, monkeypatch, dtype, memory_format, dither
):
    """Everything but the launch itself: what is passed to the kernels, and what is made of their results."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(24, 6, 20, 20, generator=generator).to(dtype).to(memory_format=memory_format)
    x[0, 0, 0, :3] = torch.tensor([float("nan"), float("inf"), 1e4])
    x[3, 2] = 0
    codec = get_codec("error_bounded", dither=dither)
    for bound in (ErrorBound("abs", 0.2), ErrorBound("abs", 0.004), ErrorBound("range_rel", 0.05, 1)):
        for sign_exact in (False, True):
            expected = codec.encode(x, bound, sign_exact=sign_exact)
            with monkeypatch.context() as patch:
                patch.setattr(cuda, "_launch", HostLaunch(host))
                patch.setattr(kernels, "_error_bounded", BytesOnTheCpu)
                record = check_codec(codec, x, bound, sign_exact=sign_exact)
                assert all(same_part(one, other) for one, other in zip(record.parts, expected.parts, strict=True))
                assert record.meta == expected.meta
                damaged = dataclasses.replace(record, parts=(*record.parts[:-1], record.parts[-1][:-2]))
                with pytest.raises(DamagedRecord):
                    codec.decode(damaged)


class BytesOnTheCpu:
    """cuda.py with the parts of a record of a tensor on the CPU."""

    GROUPS_A_TASK, quantize_runs = cuda.GROUPS_A_TASK, staticmethod(cuda.quantize_runs)

    @staticmethod
    def encode_values(*args):
        found = cuda.encode_values(*args)
        return [one and (*one[:2], one[2].numpy().tobytes()) for one in found]

    @staticmethod
    def decode_values(found, *args):
        on_device = [(torch.tensor(list(part), dtype=torch.uint8), *counts) for part, *counts in found]
        return cuda.decode_values(on_device, *args)


def same_part(one, other):
    return torch.equal(one, other) if torch.is_tensor(one) else one == other
