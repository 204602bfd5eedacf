"""The error-bounded codec on activations of real training, beside the entropy of the codes, SZ3 and zfp.

    pip install '.[benchmark]'                                           # the peers; what is missing is left out
    python -m benchmarks.codec cifar10-small.zip --cache FOLDER [--threads 1] [--repetitions 3] [--every 1]

First, once for a cache: trains the project's resnet20 (batch 128) and resnet18 (batch 64) for 200 iterations and keeps
what each convolution and batch norm reads in the next one, with COMET's momentum rule at 1 % for convolutions and 0.1
standard deviations a channel for batch norms. Then, for each tensor at 1, 4 and 13 times its bound: both entropies, and
every arm with the same number of threads, one after the other within each repetition; medians of so many.

What peers are given. SZ3: absolute mode, the tensor's own four dimensions, three of its predictors; the summary takes
whichever stores a tensor smallest. zfp: fixed accuracy; it keeps well within its tolerance, `max_error` says how far,
and its Python interface knows one thread. Neither has bounds a channel, so for batch norms both get the tensor less its
channel's mean and divided by its standard deviation, with one bound; that step is not in their times, but the 8 bytes a
channel without which nobody could undo it are in their sizes, as step and offset are in ours.

Ours has three arms. `error_bounded` promises the bound, as the peers do. `error_bounded, with signs` also keeps zeros
and signs, as training asks for inputs behind a ReLU, and is measured on those; its entropies are those of such codes.
`error_bounded, dithered` makes errors uniform and independent of the values, and keeps zeros; its bits stand beside the
entropies of plain codes. The comparison with SZ3 in the last two arms is of different promises.

Every result is held against its bound in float64: ours must have none beyond it, those of peers are counted.
Writes benchmarks/results/<name>.json after each tensor and prints the summary as a table.
"""

import argparse
import dataclasses
import json
import os
import re
import statistics
import sys
from collections.abc import Callable, Iterable
from functools import partial
from importlib import import_module
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from tqdm import tqdm

from comet_core.codec_bench import Arm, absolute_bound, codec_arm, entropies, result_of, timed
from comet_core.codecs import get_codec
from comet_core.codecs.base import ErrorBound
from comet_core.config import RunConfig
from comet_core.tensor_sources import MOMENTUM_FRACTION, NORM_STD_FRACTION, capture
from comet_core.trainer import environment

PROJECT = Path(__file__).resolve().parent.parent
OURS = {
    "error_bounded": (get_codec("error_bounded"), False),
    "error_bounded, with signs": (get_codec("error_bounded"), True),
    "error_bounded, dithered": (get_codec("error_bounded", dither=True), False),
}
"""Arm -> its codec, and whether zeros and signs are kept."""
BATCHES = {"resnet20": 128, "resnet18": 64}
MULTIPLES = (1, 4, 13)
SZ3_ALGORITHMS = ("LORENZO_REG", "INTERP_LORENZO", "NOPRED")


def cached(model: str, images: str, cache: Path, num_steps: int) -> list[dict[str, Any]]:
    """The index of a model's captured tensors, captured now where the cache has none made in this way."""
    folder = cache / model
    made_of = {"images": Path(images).name, "batch_size": BATCHES[model], "num_steps": num_steps}
    index = folder / "index.json"
    if index.exists():
        found = json.loads(index.read_text())
        if found["made_of"] == made_of:
            return found["tensors"]
    config = RunConfig(
        model=model, dataset="image_folder", dataset_path=images, batch_size=BATCHES[model], schedule="constant"
    )
    bar = tqdm(desc=f"training {model}", unit="step", disable=None)

    def progress(done: int, total: int) -> None:
        bar.total = total
        bar.update(done - bar.n)

    folder.mkdir(parents=True, exist_ok=True)
    tensors = []
    for sample in capture(config, num_steps, progress=progress):
        np.save(folder / f"{sample.name}.npy", sample.tensor.numpy())
        bound = sample.rule_bound
        assert bound is not None  # every captured tensor has one
        value = bound.value.tolist() if isinstance(bound.value, Tensor) else bound.value
        entry = {"name": sample.name, "operator": sample.operator, "shape": list(sample.tensor.shape)}
        tensors.append({**entry, "sign_exact": sample.sign_exact, "bound": value, "channel_dim": bound.channel_dim})
    bar.close()
    index.write_text(json.dumps({"made_of": made_of, "tensors": tensors}, indent=1) + "\n")
    return tensors


def bound_of(entry: dict[str, Any], multiple: float) -> ErrorBound:
    value = torch.tensor(entry["bound"], dtype=torch.float64) * multiple
    return ErrorBound("abs", value if value.ndim else float(value), entry["channel_dim"])


def for_peers(x: Tensor, entry: dict[str, Any]) -> tuple[Tensor, float]:
    """The tensor as peers get it, and the rule's bound on it: one number."""
    if entry["channel_dim"] is None:
        return x, entry["bound"]
    mean, std = x.double().mean((0, 2, 3), keepdim=True), x.double().std((0, 2, 3), keepdim=True)
    return ((x - mean) / std.where(std > 0, 1)).float(), NORM_STD_FRACTION


def peer_arms(num_threads: int) -> dict[str, Callable[[float], Arm]]:
    """Name -> the arm at an absolute bound; what is not installed is said and left out."""
    arms: dict[str, Callable[[float], Arm]] = {}
    for package, add in (("pysz", sz3_arms), ("zfpy", zfp_arms)):
        try:
            arms |= add(import_module(package), num_threads)
        except ImportError as error:
            print(f"{package} is left out ({error}); pip install '.[benchmark]' adds it", file=sys.stderr)
    return arms


def sz3_arms(pysz: Any, num_threads: int) -> dict[str, Callable[[float], Arm]]:
    def arm(algorithm: str, bound: float) -> Arm:
        settings = pysz.szConfig()
        settings.errorBoundMode, settings.absErrorBound = pysz.szErrorBoundMode.ABS, bound
        settings.cmprAlgo, settings.openmp = getattr(pysz.szAlgorithm, algorithm), num_threads > 1
        shapes: list[torch.Size] = []

        def encode(x: Tensor) -> np.ndarray:
            shapes[:] = [x.shape]
            return pysz.sz.compress(x.numpy(), settings)[0]  # it sets the dimensions itself

        def decode(encoded: np.ndarray) -> Tensor:
            return torch.from_numpy(pysz.sz.decompress(encoded, np.float32, tuple(shapes[0]))[0])

        return Arm(encode, decode, len)

    return {f"SZ3 {name}": partial(arm, name) for name in SZ3_ALGORITHMS}


def zfp_arms(zfpy: Any, num_threads: int) -> dict[str, Callable[[float], Arm]]:
    def arm(bound: float) -> Arm:
        def decode(encoded: bytes) -> Tensor:
            return torch.from_numpy(zfpy.decompress_numpy(encoded))

        return Arm(lambda x: zfpy.compress_numpy(x.numpy(), tolerance=bound), decode, len)

    return {"zfp": arm} if num_threads == 1 else {}


def with_more_bytes(arm: Arm, more_bytes: int) -> Arm:
    return dataclasses.replace(arm, nbytes=lambda encoded: arm.nbytes(encoded) + more_bytes)


def measured(
    x: Tensor, entry: dict[str, Any], peers: dict[str, Callable[[float], Arm]], repetitions: int
) -> Iterable[dict[str, Any]]:
    """A row for each bound and arm."""
    given, unit = for_peers(x, entry)
    more_bytes = 0 if entry["channel_dim"] is None else 8 * x.shape[1]
    for multiple in MULTIPLES:
        bound = bound_of(entry, multiple)
        arms = {name: codec_arm(codec, bound, signs)
                for name, (codec, signs) in OURS.items() if entry["sign_exact"] or not signs}  # fmt: skip
        arms |= {name: with_more_bytes(make(unit * multiple), more_bytes) for name, make in peers.items()}
        tensors = {name: x if name in OURS else given for name in arms}
        limits = {name: absolute_bound(x, bound) if name in OURS else torch.tensor(unit * multiple, dtype=torch.float64)
                  for name in arms}  # fmt: skip
        of_codes = {signs: entropies(x, bound, signs) for signs in {False, entry["sign_exact"]}}
        for name, found in timed(arms, tensors, repetitions).items():
            figures = result_of(tensors[name], found, limits[name])
            figures = {key: value for key, value in figures.items() if not key.startswith("histogram")}
            assert name not in OURS or not figures["num_over_bound"], f"{name} broke its bound on {entry['name']}"
            about = {"multiple": multiple, "error_bound": float(limits[name].mean()), "arm": name}
            _, signs = OURS.get(name, (None, False))
            yield {**about, **of_codes[signs], **figures}


def summary_of(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """For each bound and arm: geometric means over tensors against the best SZ3 and the entropy in context; minima."""
    groups: dict[tuple[Any, ...], dict[str, dict[str, Any]]] = {}
    for row in rows:
        groups.setdefault((row["multiple"], row["model"], row["layer"]), {})[row["arm"]] = row
    summary = []
    for multiple in MULTIPLES:
        tensors = {key[1:]: arms for key, arms in groups.items() if key[0] == multiple}
        sz3 = {key: [row for name, row in arms.items() if name.startswith("SZ3")] for key, arms in tensors.items()}
        best = {key: min(found, key=lambda row: row["held_bytes"]) for key, found in sz3.items() if found}
        chosen = {name: {key: arms[name] for key, arms in tensors.items() if name in arms} for name in OURS}
        chosen["SZ3, best of three"] = best
        chosen["zfp"] = {key: arms["zfp"] for key, arms in tensors.items() if "zfp" in arms}
        for name, found in chosen.items():
            if not found:
                continue  # a peer that is not installed
            entry: dict[str, Any] = {"multiple": multiple, "arm": name, "num_tensors": len(found)}
            entry["compression_ratio"] = geometric_mean(row["compression_ratio"] for row in found.values())
            # None where a channel without spread has a bound of 0, and 0 where all codes are the same.
            share = {
                key: row["bits_per_value"] / row["context_bits"] for key, row in found.items() if row["context_bits"]
            }
            if share:
                entry["bits_over_context_entropy"] = geometric_mean(share.values())
                entry["most_bits_over_context_entropy"] = named(max(share.items(), key=lambda pair: pair[1]))
            if best:
                over = {key: row["compression_ratio"] / best[key]["compression_ratio"] for key, row in found.items()}
                entry["ratio_over_sz3"] = geometric_mean(over.values())
                entry["least_ratio_over_sz3"] = named(min(over.items(), key=lambda pair: pair[1]))
            for verb in ("encode", "decode"):
                num_bytes = sum(row["compression_ratio"] * row["held_bytes"] for row in found.values())
                seconds = sum(row[f"{verb}_seconds"] for row in found.values())
                entry[f"{verb}_gb_per_s"] = num_bytes / 1e9 / seconds
                entry[f"least_{verb}_gb_per_s"] = min(row[f"{verb}_gb_per_s"] for row in found.values())
            entry["num_over_bound"] = sum(row["num_over_bound"] for row in found.values())
            summary.append(entry)
    return summary


def geometric_mean(values: Iterable[float]) -> float:
    return statistics.geometric_mean(list(values))


def named(pair: tuple[tuple[str, str], float]) -> dict[str, Any]:
    (model, layer), value = pair
    return {"value": value, "model": model, "layer": layer}


def table(summary: list[dict[str, Any]]) -> str:
    heads = ["tensors", "bound", "arm", "ratio", "over SZ3", "least", "bits over entropy in context", "most"]
    heads += ["encode GB/s", "decode GB/s", "beyond the bound"]
    lines = [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
    for entry in summary:
        cells = [str(entry["num_tensors"]), f"x{entry['multiple']}", entry["arm"]]
        cells += [f"{entry['compression_ratio']:.2f}x"]
        cells += [f"{entry['ratio_over_sz3']:.3f}" if "ratio_over_sz3" in entry else "-"]
        cells += [f"{entry['least_ratio_over_sz3']['value']:.3f}" if "ratio_over_sz3" in entry else "-"]
        cells += [f"{entry['bits_over_context_entropy']:.3f}" if "bits_over_context_entropy" in entry else "-"]
        most = entry.get("most_bits_over_context_entropy")
        cells += [f"{most['value']:.3f}" if most else "-"]
        cells += [f"{entry[f'{verb}_gb_per_s']:.2f}" for verb in ("encode", "decode")]
        lines.append(f"| {' | '.join([*cells, format(entry['num_over_bound'], ',')])} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("images", help=".zip or folder with train/<class>/ and test/<class>/")
    parser.add_argument("--cache", type=Path, required=True, help="folder for captured tensors (0.5 GB), not in here")
    parser.add_argument("--models", nargs="+", choices=list(BATCHES), default=list(BATCHES))
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--every", type=int, default=1, help="measure each so-many-th tensor of a model only")
    parser.add_argument("--layers", default="", metavar="REGEX", help="measure matching layers only")
    parser.add_argument("--name", default="codec-activations")
    given = parser.parse_args()
    if given.cache.resolve().is_relative_to(PROJECT):
        parser.error(f"--cache is {str(given.cache)!r}, inside the project; choose a folder outside.")
    torch.set_num_threads(given.threads)
    os.environ["OMP_NUM_THREADS"] = str(given.threads)  # read when a peer is loaded, which has an OpenMP of its own
    chosen = [
        (model, entry)
        for model in given.models
        for entry in [entry for entry in cached(model, str(Path(given.images).resolve()), given.cache, given.steps)
                      if re.search(given.layers, entry["name"])][:: given.every]
    ]  # fmt: skip
    peers = peer_arms(given.threads)
    facts = {**environment(torch.device("cpu")), "num_threads": given.threads, "num_repetitions": given.repetitions}
    facts |= {package: version(package) for package in ("pysz", "zfpy") if package in sys.modules}
    rows: list[dict[str, Any]] = []
    output = PROJECT / "benchmarks" / "results" / f"{given.name}.json"
    capture_facts = {
        "images": Path(given.images).name, "num_steps": given.steps, "momentum_fraction": MOMENTUM_FRACTION,
        "batch_sizes": {model: BATCHES[model] for model in given.models}, "norm_std_fraction": NORM_STD_FRACTION,
    }  # fmt: skip
    try:
        for model, entry in tqdm(chosen, unit="tensor", disable=None):
            x = torch.from_numpy(np.load(given.cache / model / f"{entry['name']}.npy", allow_pickle=False))
            about = {"model": model, "layer": entry["name"], "operator": entry["operator"], "shape": entry["shape"]}
            rows += [
                {**about, "sign_exact": entry["sign_exact"], **row}
                for row in measured(x, entry, peers, given.repetitions)
            ]
            written = {"environment": facts, "capture": capture_facts, "summary": summary_of(rows), "rows": rows}
            output.write_text(json.dumps(written, indent=1) + "\n")
    except KeyboardInterrupt:
        print(f"stopped; {output.name} has what was measured", file=sys.stderr)
    print(table(summary_of(rows)))


if __name__ == "__main__":
    main()
