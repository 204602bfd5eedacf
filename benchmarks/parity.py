"""Does compression cost accuracy? A grid of arms and seeds, each run against the baseline of the same seed.

    python -m benchmarks.parity images.zip [--arms "noise, 5 %" ...] [--seeds 0 1 2] [--jobs 2] [--folder runs]

A pair has the same data in the same order, the same initial weights and crops; only what is kept for backward differs.
Every run is a process of its own with one thread and leaves a file in --folder, so that a grid which was cut off goes
on where it was (a run of another configuration or commit is made anew only if its file is deleted). Condensed runs and
the table of paired differences go to benchmarks/results/<name>.json; the 95 % interval is Student's, over the seeds.

Several runs share the machine, so times are not reported; ratios and accuracies do not depend on it.
"""

import argparse
import json
import math
import statistics
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from benchmarks.lab import RESULTS, measure

BASELINE = "baseline"
ARMS: dict[str, list[str]] = {
    BASELINE: [],
    "momentum, 1 %": ["controller=momentum"],
    "noise, 5 %": [],
    "noise, 20 %": ["noise_budget=0.2"],
    "noise, 5 %, dithered": ["codec_params=dither=true"],
    "noise, 5 %, norms 5 %": ["norm_budget=0.05"],
    "noise, 5 %, norms 50 %": ["norm_budget=0.5"],
    "group_quantized, 2 bits": ["codec=group_quantized", "codec_params=num_bits=2"],
}
T_QUANTILES = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262)  # Student's t at 0.975, 1 to 9 degrees
AUDITED = ("slope", "mean_error", "excess_kurtosis", "passed_error")


def run(arm: str, seed: int, images: Path, settings: list[str], folder: Path) -> dict:
    """The condensed run, from its file where there is one."""
    kept = folder / f"{arm.replace(',', '').replace('%', 'percent').replace(' ', '-')}-seed{seed}.json"
    if not kept.exists():
        print(f"{arm}, seed {seed}", file=sys.stderr, flush=True)
        policy = "baseline" if arm == BASELINE else "compress"
        chosen = [f"dataset_path={images}", f"seed={seed}", "num_threads=1", *settings, *ARMS[arm]]
        found = measure(policy, "", chosen)
        found["audits"] = audit_means(found["audits"])
        kept.write_text(json.dumps(found, indent=1) + "\n")
    return json.loads(kept.read_text())


def audit_means(audits: list[dict]) -> list[dict]:
    """Per layer: number of audits, means of what they found, median of measured over predicted error."""
    layers: dict[str, list[dict]] = {}
    for row in audits:
        layers.setdefault(row["name"], []).append(row)
    means = []
    for name, rows in layers.items():
        kept = {"name": name, "operator": rows[0]["operator"], "num_audits": len(rows)}
        for field in AUDITED:
            values = [row[field] for row in rows if isinstance(row[field], float)]
            kept[field] = statistics.fmean(values) if values else None
        ratios = [ratio for row in rows if (ratio := measured_over_predicted(row)) is not None]
        kept["measured_over_predicted"] = statistics.median(ratios) if ratios else None
        kept["within"] = sum(0.7 <= ratio <= 1.4 for ratio in ratios)
        means.append(kept)
    return means


def measured_over_predicted(row: dict) -> float | None:
    measured, predicted = row["measured_sigma"], row["predicted_sigma"]
    return measured / predicted if isinstance(predicted, float) and predicted > 0 else None


def differences(runs: dict[str, dict[int, dict]]) -> list[dict]:
    """Each arm against the baseline, paired by seed, in percentage points of final test accuracy."""
    rows = []
    baseline = runs.get(BASELINE, {})
    for arm, by_seed in runs.items():
        accuracies = [100 * found["summary"]["test_accuracy"] for found in by_seed.values()]
        pairs = [
            100 * (found["summary"]["test_accuracy"] - baseline[seed]["summary"]["test_accuracy"])
            for seed, found in by_seed.items()
            if seed in baseline
        ]
        half = None
        if arm != BASELINE and 2 <= len(pairs) <= len(T_QUANTILES) + 1:
            half = T_QUANTILES[len(pairs) - 2] * statistics.stdev(pairs) / math.sqrt(len(pairs))
        rows.append(
            {
                "arm": arm,
                "num_seeds": len(accuracies),
                "mean_accuracy": statistics.fmean(accuracies),
                "seed_spread": max(accuracies) - min(accuracies),
                "mean_difference": statistics.fmean(pairs) if arm != BASELINE and pairs else None,
                "half_interval": half,
                "compression_ratio": _mean(by_seed, "compression_ratio"),
                "conv_input_ratio": _mean(by_seed, "conv_input_ratio"),
            }
        )
    return rows


def _mean(by_seed: dict[int, dict], name: str) -> float:
    return statistics.fmean(found["summary"][name] for found in by_seed.values())


def table(rows: list[dict]) -> str:
    lines = [
        "| arm | seeds | test accuracy, mean (spread) | against the baseline, points (95 % interval) "
        "| ratio, whole graph | ratio, convolution inputs |",
        "|---|---|---|---|---|---|",
    ]
    for row in rows:
        change = "" if row["mean_difference"] is None else f"{row['mean_difference']:+.2f}"
        if row["half_interval"] is not None:
            change += f" (+-{row['half_interval']:.2f})"
        lines.append(
            f"| {row['arm']} | {row['num_seeds']} | {row['mean_accuracy']:.2f} % ({row['seed_spread']:.2f}) | {change} "
            f"| {row['compression_ratio']:.1f}x | {row['conv_input_ratio']:.1f}x |"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("images", help="folder or .zip with train/<class>/ and test/<class>/")
    parser.add_argument("--model", default="resnet20")
    parser.add_argument("--epochs", type=int, default=8)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--arms", nargs="+", default=list(ARMS), choices=list(ARMS), metavar="ARM")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE")
    parser.add_argument("--jobs", type=int, default=2, help="runs at a time")
    parser.add_argument("--folder", default="var/parity", help="where finished runs are kept")
    parser.add_argument("--name", default="parity")
    given = parser.parse_args()
    images = Path(given.images).resolve()
    folder = Path(given.folder) / f"{given.name}-{given.model}"
    folder.mkdir(parents=True, exist_ok=True)
    settings = [
        "dataset=image_folder", f"model={given.model}", f"epochs={given.epochs}", "batch_size=128",
        "learning_rate=0.2", "schedule=one_cycle", "augment=true", *given.set,
    ]  # fmt: skip
    grid = [(seed, arm) for seed in given.seeds for arm in given.arms]
    runs: dict[str, dict[int, dict]] = {arm: {} for arm in given.arms}
    with ThreadPoolExecutor(given.jobs) as pool:
        for (seed, arm), found in zip(
            grid, pool.map(lambda one: run(one[1], one[0], images, settings, folder), grid), strict=True
        ):
            runs[arm][seed] = found
    rows = differences(runs)
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / f"{given.name}-{given.model}.json").write_text(
        json.dumps({"table": rows, "runs": runs}, indent=1) + "\n"
    )
    print(table(rows))


if __name__ == "__main__":
    main()
