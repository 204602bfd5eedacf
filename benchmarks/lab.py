"""A compressed run and its baseline twin on real images, each in a process of its own: accuracy, ratios, peak, time.

    python -m benchmarks.lab images.zip [--epochs 3] [--seeds 0] [--set key=value ...] [--name lab]

Three arms a seed: compress and baseline with the same allocator settings (the ones the lab's worker uses), and the
baseline on the default allocator, which is what plain training would take. Arms alternate, one at a time, on all cores.
Writes benchmarks/results/<name>.json (machine, versions, each arm's config, evaluations, per-epoch sums and summary)
and prints the table of the README. Figures are of the last epoch where nothing else is said.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from comet_core.launcher import ALLOCATOR_TUNABLES

RESULTS = Path(__file__).resolve().parent / "results"
PROJECT = RESULTS.parent.parent
ARMS = {
    "compress": ("compress", ALLOCATOR_TUNABLES),
    "baseline": ("baseline", ALLOCATOR_TUNABLES),
    "baseline, default allocator": ("baseline", ""),
}


def measure(policy: str, tunables: str, settings: list[str]) -> dict:
    """One training process and what is kept of its JSON."""
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder) / "out.json"
        command = [sys.executable, "-m", "comet_core", "train", "--json", str(output), "--set", f"policy={policy}"]
        command += [part for setting in settings for part in ("--set", setting)]
        subprocess.run(command, cwd=PROJECT, env={**os.environ, "GLIBC_TUNABLES": tunables}, check=True)
        return condensed(json.loads(output.read_text()))


def condensed(found: dict) -> dict:
    """Single steps become sums and medians an epoch, layers those of the last collection, the path a name."""
    epochs: dict[int, dict] = {}
    for step in found["steps"]:
        epoch = epochs.setdefault(step["epoch"], {"seconds": [], "peak_rss_bytes": 0})
        epoch["seconds"].append(step["step_seconds"])
        epoch["peak_rss_bytes"] = max(epoch["peak_rss_bytes"], step["peak_rss_bytes"])
        for name in ("saved_bytes", "held_bytes", "conv_input_saved_bytes", "conv_input_held_bytes"):
            epoch[name] = epoch.get(name, 0) + step[name]
    for epoch in epochs.values():
        seconds = epoch.pop("seconds")
        epoch["num_steps"], epoch["median_step_seconds"] = len(seconds), statistics.median(seconds)
    first, last = found["steps"][0], found["steps"][-1]["step"]
    found["first_step"] = {name: first[name] for name in ("saved_bytes", "held_bytes", "peak_rss_bytes")}
    found["epochs"] = epochs
    collected = max((row["step"] for row in found["layers"]), default=last)
    found["layers"] = [row for row in found["layers"] if row["step"] == collected]
    found["config"]["dataset_path"] = Path(found["config"]["dataset_path"]).name  # where it lay says nothing to others
    del found["steps"]
    return found


def table(arms: dict[str, list[dict]]) -> str:
    """Means over seeds, as Markdown."""

    def mean(arm: str, name: str) -> float:
        return statistics.fmean(run["summary"][name] for run in arms[arm])

    peak, step = mean("baseline", "peak_rss_above_start_bytes"), mean("baseline", "median_step_seconds")
    lines = [
        "| arm | test accuracy | ratio, convolution inputs | ratio, whole graph | peak RSS above the start | of the "
        "baseline's | peak RSS in all | step time over the baseline's |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for arm in (arm for arm, runs in arms.items() if runs):
        above = mean(arm, "peak_rss_above_start_bytes")
        lines.append(
            f"| {arm} | {mean(arm, 'test_accuracy'):.2%} | {mean(arm, 'conv_input_ratio'):.1f}x "
            f"| {mean(arm, 'compression_ratio'):.1f}x | {above / 2**20:,.0f} MiB | {above / peak:.2f} "
            f"| {mean(arm, 'peak_rss_bytes') / 2**20:,.0f} MiB "
            f"| {mean(arm, 'median_step_seconds') / step:.2f} |"
        )
    return "\n".join(lines)


def write(name: str, arms: dict[str, list[dict]]) -> None:
    """After every arm, so that a run that is cut off keeps what it has."""
    RESULTS.mkdir(exist_ok=True)
    written = {"arms": {arm: runs for arm, runs in arms.items() if runs}}
    (RESULTS / f"{name}.json").write_text(json.dumps(written, indent=1) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("images", help="folder or .zip with train/<class>/ and test/<class>/")
    parser.add_argument("--model", default="resnet20")
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE")
    parser.add_argument("--name", default="lab")
    given = parser.parse_args()
    images = Path(given.images).resolve()
    arms: dict[str, list[dict]] = {arm: [] for arm in ARMS}
    for seed in given.seeds:
        settings = [
            "dataset=image_folder", f"dataset_path={images}", f"model={given.model}", f"epochs={given.epochs}",
            f"seed={seed}", "batch_size=128", "schedule=one_cycle", "augment=true", *given.set,
        ]  # fmt: skip
        for arm, (policy, tunables) in ARMS.items():
            print(f"seed {seed}, {arm}", file=sys.stderr)
            arms[arm].append(measure(policy, tunables, settings))
            write(given.name, arms)
    print(table(arms))


if __name__ == "__main__":
    main()
