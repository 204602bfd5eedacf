"""Every float32 there is, all 2**32 bit patterns, through a codec and back: each value held against its bound.

    python -m benchmarks.codec_sweep [--codec error_bounded] [--bounds 1e-3 0.37s 3e37] [--fraction 1] [--seed 0]

A bound that ends in s asks for `sign_exact`. Patterns go through in their own order, so that a chunk of the codec holds
neighbours: values of one sign and one or two powers of two, among them the stretches that a bound quantises, those that
it sends to zero and those that it keeps verbatim. `--fraction` takes a random part in shorter stretches instead.
Counted in float64 and separately: finite values beyond the bound, values that were not finite and came back with other
bits, zeros and signs that changed where these are promised.

Ctrl-C ends it and keeps what was counted. Writes JSON; exits with 1 where anything was counted.
"""

import argparse
import json
import random
import sys
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tqdm import tqdm

from comet_core.codec_bench import codec_of
from comet_core.codecs.base import Codec
from comet_core.trainer import environment

PROJECT = Path(__file__).resolve().parent.parent
NUM_PATTERNS = 1 << 32
SLICE_VALUES = 1 << 23
PART_VALUES = 1 << 16  # of a random part
COUNTED = ("num_over_bound", "num_nonfinite_changed", "num_signs_changed")


def stretches(fraction: float, seed: int) -> list[tuple[int, int]]:
    """First pattern and number of patterns of each slice: all of them, or a random part in their order."""
    size = SLICE_VALUES if fraction >= 1 else PART_VALUES
    places = range(NUM_PATTERNS // size)
    if fraction < 1:
        places = sorted(random.Random(seed).sample(places, max(1, round(fraction * len(places)))))  # type: ignore[assignment]
    return [(place * size, size) for place in places]


def sweep(codec: Codec, bound: float, sign_exact: bool, slices: Iterable[tuple[int, int]]) -> Iterator[Counter[str]]:
    """What was found in each slice: the three counts, patterns and held bytes."""
    for first, size in slices:
        patterns = np.arange(first, first + size, dtype=np.uint32)
        x = torch.from_numpy(patterns.view(np.float32))
        encoded = codec.encode(x, bound, sign_exact=sign_exact)
        y = codec.decode(encoded)
        finite = x.isfinite()
        within = (y.double() - x.double()).abs() <= bound  # false for NaN
        same_bits = y.view(torch.int32) == x.view(torch.int32)
        kept = (y.sign() == x.sign()) if sign_exact else (y == 0) | (x != 0)  # zeros stay zero in any case
        yield Counter(
            num_over_bound=int((finite & ~within).sum()),
            num_nonfinite_changed=int((~finite & ~same_bits).sum()),
            num_signs_changed=int((finite & ~kept).sum()),
            num_patterns=size,
            held_bytes=encoded.nbytes,
        )


def parsed(text: str) -> tuple[float, bool]:
    try:
        bound = float(text.removesuffix("s"))
    except ValueError:
        bound = -1.0
    if not bound >= 0:
        raise argparse.ArgumentTypeError(f"{text!r} is no bound; write a number of 0 or more, followed by s for signs")
    return bound, text.endswith("s")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--codec", default="error_bounded", help="name, or name:key=value,key=value")
    parser.add_argument("--bounds", nargs="+", type=parsed, default=[(1e-3, False), (0.37, True), (3e37, False)])
    parser.add_argument("--fraction", type=float, default=1.0, help="of the patterns; below 1 a random part")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path, default=PROJECT / "benchmarks" / "results" / "codec-sweep.json")
    given = parser.parse_args()
    if not 0 < given.fraction <= 1:
        parser.error(f"--fraction is {given.fraction}; allowed: above 0 to 1.")
    codec, slices = codec_of(given.codec), stretches(given.fraction, given.seed)
    result: dict[str, Any] = {"codec": given.codec, "fraction": given.fraction, "seed": given.seed, "bounds": []}
    result["environment"] = environment(torch.device("cpu"))
    totals: Counter[str] = Counter()
    bar = tqdm(total=len(slices) * len(given.bounds), unit="slice", disable=None)
    try:
        for bound, sign_exact in given.bounds:
            found: Counter[str] = Counter(dict.fromkeys((*COUNTED, "num_patterns", "held_bytes"), 0))
            started = time.perf_counter()
            try:
                for counts in sweep(codec, bound, sign_exact, slices):
                    found.update(counts)
                    totals.update(counts)
                    bar.set_postfix_str(f"{sum(totals[name] for name in COUNTED):,} violations", refresh=False)
                    bar.update()
            finally:
                entry = {"bound": bound, "sign_exact": sign_exact, "seconds": time.perf_counter() - started, **found}
                result["bounds"].append(entry)
    except KeyboardInterrupt:
        print("stopped", file=sys.stderr)
    finally:
        bar.close()
        result["complete"] = totals["num_patterns"] == len(given.bounds) * sum(size for _, size in slices)
        given.output.write_text(json.dumps(result, indent=1) + "\n")
    for entry in result["bounds"]:
        signs = " with signs" if entry["sign_exact"] else ""
        print(f"bound {entry['bound']:g}{signs}: {entry['num_patterns']:,} patterns, "
              + ", ".join(f"{name} {entry[name]:,}" for name in COUNTED))  # fmt: skip
    return int(any(totals[name] for name in COUNTED))


if __name__ == "__main__":
    sys.exit(main())
