"""A structured fuzzer of `decode`: damaged records of every codec must be refused or decode, and nothing else.

    python -m benchmarks.codec_fuzz [--minutes 10] [--seed 0] [--output benchmarks/results/codec-fuzz.json]
    python -m benchmarks.codec_fuzz --seed 0 --case 1234      # one case again, in this process, with its traceback

A case is one record, of a codec, dtype, layout and parameters that the seed and the number of the case decide, with one
to three damages: bits flipped, bytes cut off, added or set to zero, parts swapped, dropped, doubled or replaced by a
zstd frame that unfolds to 64 MiB, numbers of the header changed within their type. Cases run in a child process, whose
memory is limited to 256 MiB above what it has at the start; a case that ends the process or takes more than 30 seconds
is a crash, as is any exception other than DamagedRecord. Exits with 1 where there was a crash.
"""

import argparse
import dataclasses
import json
import math
import platform
import queue
import random
import resource
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import zstandard

from comet_core.codecs import CODECS, get_codec
from comet_core.codecs.base import Codec, DamagedRecord, Encoded, ErrorBound

PROJECT = Path(__file__).resolve().parent.parent
MEMORY_BYTES = 1 << 28
CASE_SECONDS = 30
MOST_CRASHES = 20  # listed in the results, one of each kind; all are counted
DTYPES = [torch.float32, torch.float16, torch.bfloat16, torch.float64]
DTYPES += [torch.int64, torch.int32, torch.uint8, torch.bool, torch.complex64, torch.complex128]
BOMB = zstandard.ZstdCompressor().compress(bytes(64 << 20))
BOUNDS = (0.0, 0.01, 0.3, ErrorBound("pw_rel", 0.003), ErrorBound("pw_rel", 0.3))
POOLING = dict(kernel_size=(3, 3), stride=(2, 2), padding=(1, 1), dilation=(1, 1), input_size=(12, 14))


def random_codec(rng: random.Random, name: str) -> Codec:
    """A codec with parameters drawn from its range; the defaults where a codec is not listed here."""
    if name == "window_index":
        return get_codec(name, **POOLING)
    params: dict[str, dict[str, Any]] = {
        "error_bounded": {"dither": rng.random() < 0.3},
        "group_quantized": {"num_bits": rng.choice((2, 4, 8))},
        "cast": {"dtype": rng.choice(("float16", "bfloat16", "float8_e4m3fn", "float8_e5m2"))},
        "dct": {"quality": rng.randint(1, 100)},
    }
    return get_codec(name, **params.get(name, {}))


def random_input(rng: random.Random, name: str) -> torch.Tensor:
    """A small tensor, now and then one of several chunks; for window_index often the indices of a pooling."""
    generator = torch.Generator().manual_seed(rng.getrandbits(32))
    if name == "window_index" and rng.random() < 0.8:
        maps = torch.randn(2, 3, 12, 14, generator=generator)
        return torch.nn.functional.max_pool2d(maps, 3, 2, 1, return_indices=True)[1]
    shape = rng.choice([(2, 3, 9, 8), (4, 40), (517,), (), (3, 0, 2), (1, 1, 4, 4)])
    if rng.random() < 0.005:
        shape = (3, 7, 200, 100)
    values = torch.randn(shape, generator=generator, dtype=torch.float64)
    scale = rng.choice((1.0, 100.0, 1e30))
    values = rng.choice((values, values.relu(), values.round()))
    dtype = rng.choice(DTYPES[:-2] if name in ("sign_mask", "interval_mask") else DTYPES)
    x = values > 0 if dtype == torch.bool else values.abs().to(dtype) if dtype == torch.uint8 else values.to(dtype)
    x = x * scale if dtype.is_floating_point else x
    if dtype.is_floating_point and x.numel() and rng.random() < 0.3:
        x.view(-1)[0] = rng.choice((math.nan, math.inf, -math.inf))
    if x.ndim == 4 and rng.random() < 0.3:
        x = x.to(memory_format=torch.channels_last)
    return x


def damaged_bytes(rng: random.Random, data: bytes) -> bytes:
    """Other bytes: flipped, cut off, added, set to zero, moved, or a frame that claims and unfolds to 64 MiB."""
    spoiled = bytearray(data)
    start = rng.randrange(len(data)) if data else 0
    length = rng.choice((1, 2, 8, 64, len(data)))
    kind = rng.choice(("flip", "flip", "header", "cut", "front", "add", "zero", "swap", "bomb"))
    if kind in ("flip", "header") and data:
        for _ in range(rng.choice((1, 1, 2, 8))):
            place = rng.randrange(min(len(data), 16) if kind == "header" else len(data))
            spoiled[place] ^= 1 << rng.randrange(8)
    elif kind == "cut":
        del spoiled[max(len(data) - length, 0) :]
    elif kind == "front":
        del spoiled[:length]
    elif kind == "add":
        spoiled += rng.randbytes(length) if rng.random() < 0.5 else bytes(length)
    elif kind == "zero":
        spoiled[start : start + length] = bytes(len(spoiled[start : start + length]))
    elif kind == "swap":
        spoiled = spoiled[start:] + spoiled[:start]
    elif kind == "bomb":
        spoiled = bytearray(BOMB)
    return bytes(spoiled)


def damaged_part(rng: random.Random, part: Any) -> Any:
    """Another part of the same type; tensors also with another dtype or shape."""
    if isinstance(part, bytes):
        return damaged_bytes(rng, part)
    if rng.random() < 0.1:
        return rng.choice((part[:-1], torch.cat([part, part]), part.double(), part[None], part[::2]))
    packed = torch.empty(part.numel(), dtype=part.dtype).copy_(part.reshape(-1))
    raw = damaged_bytes(rng, packed.view(torch.uint8).numpy().tobytes())
    whole = len(raw) // part.itemsize * part.itemsize
    spoiled = torch.empty(whole, dtype=torch.uint8)
    spoiled.numpy()[:] = np.frombuffer(raw[:whole], np.uint8)
    return spoiled.view(part.dtype)


def damaged_number(rng: random.Random, value: Any) -> Any:
    """Another value of the same type: numbers, texts, tuples and dataclasses of them."""
    if isinstance(value, bool):
        return not value
    if isinstance(value, int):
        return rng.choice(
            (0, 1, -1, value + 1, value - 1, value * 2, 1 << 20, (1 << 31) - 1, 1 << 40, 1 << 62, 1 << 70)
        )
    if isinstance(value, float):
        return rng.choice((0.0, -1.0, math.nan, math.inf, -math.inf, 1e300, value * 2))
    if isinstance(value, str):
        return rng.choice(("", "float16", "float8_e5m2", value + "x"))
    if isinstance(value, tuple):
        items = list(value)
        place = rng.randrange(len(items) + 1)
        if place == len(items) or rng.random() < 0.2:
            return rng.choice((value[:-1], value + value[:1], value[::-1]))
        items[place] = damaged_number(rng, items[place])
        return tuple(items)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        name = rng.choice([entry.name for entry in dataclasses.fields(value)])
        return dataclasses.replace(value, **{name: damaged_number(rng, getattr(value, name))})
    return value


def damaged_record(rng: random.Random, encoded: Encoded, other: Encoded) -> Encoded:
    """One damage more; `other` is another record of the same codec."""
    parts = list(encoded.parts)
    kind = rng.choice(
        ("part",) * 8 + ("drop", "double", "exchange", "foreign", "meta", "meta", "shape", "stride", "dtype")
    )
    place = rng.randrange(len(parts)) if parts else 0
    if kind == "part" and parts:
        parts[place] = damaged_part(rng, parts[place])
    elif kind == "drop" and parts:
        del parts[place]
    elif kind == "double" and parts:
        parts.insert(place, parts[place])
    elif kind == "exchange" and parts:
        second = rng.randrange(len(parts))
        parts[place], parts[second] = parts[second], parts[place]
    elif kind == "foreign":
        return dataclasses.replace(encoded, parts=other.parts)
    elif kind == "meta":
        return dataclasses.replace(encoded, meta=damaged_number(rng, encoded.meta))
    elif kind == "shape":
        shape = tuple(min(size, 1 << 62) for size in damaged_number(rng, tuple(encoded.shape)))
        fitting = tuple(math.prod(max(size, 1) for size in shape[axis + 1 :]) for axis in range(len(shape)))
        stride = fitting if rng.random() < 0.7 else encoded.stride
        return dataclasses.replace(encoded, shape=torch.Size(shape), stride=stride)
    elif kind == "stride":
        return dataclasses.replace(encoded, stride=damaged_number(rng, encoded.stride))
    elif kind == "dtype":
        return dataclasses.replace(encoded, dtype=rng.choice(DTYPES))
    return dataclasses.replace(encoded, parts=tuple(parts))


def make_case(seed: int, number: int) -> tuple[Codec, Encoded]:
    """The codec and the damaged record of a case."""
    rng = random.Random(f"{seed}/{number}")
    name = rng.choice(list(CODECS))
    codec = random_codec(rng, name)
    encoded, other = (
        codec.encode(random_input(rng, name), rng.choice(BOUNDS), sign_exact=rng.random() < 0.5)
        for _ in range(2)
    )
    for _ in range(rng.choice((1, 1, 2, 3))):
        encoded = damaged_record(rng, encoded, other)
    return codec, encoded


def outcome_of(codec: Codec, encoded: Encoded) -> str:
    """`decoded`, `refused`, or what went wrong."""
    try:
        decoded = codec.decode(encoded)
    except DamagedRecord:
        return "refused"
    except Exception as error:
        return f"{type(error).__name__}: {error}".splitlines()[0][:300]
    if (decoded.shape, decoded.dtype) != (encoded.shape, encoded.dtype):
        return f"decoded to {decoded.dtype} of shape {tuple(decoded.shape)}"
    return "decoded"


def run_cases(seed: int, first: int) -> None:
    """In the child: cases from `first` on without end, a line of JSON before each and one after it."""
    torch.set_num_threads(1)
    for name in CODECS:  # what is compiled and loaded on first use does not count as a case's time or memory
        for dtype in DTYPES[:4]:
            codec = random_codec(random.Random(0), name)
            codec.decode(codec.encode(torch.rand(1, 2, 8, 8).to(dtype), 0.1))
    used_bytes = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used_bytes + MEMORY_BYTES, used_bytes + MEMORY_BYTES))
    number = first
    while True:
        codec, encoded = make_case(seed, number)
        print(json.dumps([number, codec.name]), flush=True)
        print(json.dumps([number, codec.name, outcome_of(codec, encoded)]), flush=True)
        number += 1


def fuzz(seed: int, seconds: float) -> dict[str, Any]:
    """Run cases in child processes for so long; counts a codec and the crashes."""
    counts = {name: Counter({"decoded": 0, "refused": 0, "crashed": 0}) for name in CODECS}
    crashes: dict[tuple[str, str], int] = {}  # codec and what went wrong -> the first such case
    end = time.monotonic() + seconds
    number = 0
    while time.monotonic() < end:
        command = [sys.executable, "-m", "benchmarks.codec_fuzz", "--seed", str(seed), "--from-case", str(number)]
        child = subprocess.Popen(command, cwd=PROJECT, stdout=subprocess.PIPE, text=True)
        lines: queue.Queue[str] = queue.Queue()
        threading.Thread(target=forward, args=(child.stdout or [], lines), daemon=True).start()
        running, patience = "", 300.0  # the first start compiles the kernels
        while time.monotonic() < end:
            try:
                line = lines.get(timeout=patience)
            except queue.Empty:
                line = ""
            patience = CASE_SECONDS
            if line:
                number, running, *outcome = json.loads(line)
                what = outcome[0] if outcome else ""
            else:
                child.kill()
                what = f"the process ended with {child.wait()} or took more than {CASE_SECONDS} s"
                if not running:
                    raise RuntimeError(f"the fuzzer itself failed before case {number}: {what}")
            if not what:
                continue
            counts[running]["crashed" if what not in ("decoded", "refused") else what] += 1
            if what not in ("decoded", "refused") and len(crashes) < MOST_CRASHES:
                crashes.setdefault((running, what), number)
            number, running = number + 1, ""
            if not line:
                break
        child.kill()
        child.wait()
    num_crashes = sum(count["crashed"] for count in counts.values())
    listed = [{"case": case, "codec": name, "what": what} for (name, what), case in crashes.items()]
    return {"num_cases": number, "codecs": counts, "num_crashes": num_crashes, "crashes": listed}


def forward(output: Iterable[str], lines: queue.Queue[str]) -> None:
    """Each line of a child's output into the queue, then an empty one for its end."""
    for line in output:
        lines.put(line)
    lines.put("")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path, default=PROJECT / "benchmarks" / "results" / "codec-fuzz.json")
    parser.add_argument("--case", type=int, help="run this case alone and show its traceback")
    parser.add_argument("--from-case", type=int, help=argparse.SUPPRESS)  # what the parent tells its children
    options = parser.parse_args()
    if options.from_case is not None:
        run_cases(options.seed, options.from_case)
    if options.case is not None:
        codec, encoded = make_case(options.seed, options.case)
        print(codec.name, encoded)
        print(codec.decode(encoded))
        return 0
    found = fuzz(options.seed, options.minutes * 60)
    versions = {"python": platform.python_version(), "torch": torch.__version__, "zstandard": zstandard.__version__}
    result = {"seed": options.seed, "minutes": options.minutes, "versions": versions, **found}
    options.output.write_text(json.dumps(result, indent=1) + "\n")
    for name, count in found["codecs"].items():
        print(
            f"{name:<16} {count['decoded']:>8,} decoded {count['refused']:>8,} refused {count['crashed']:>6,} crashed"
        )
    return int(found["num_crashes"] > 0)


if __name__ == "__main__":
    sys.exit(main())
