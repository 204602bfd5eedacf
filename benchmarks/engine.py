"""Compressed steps beside plain ones on six networks: ratio of the whole graph, step time, peak memory and its floor.

    python -m benchmarks.engine images.zip [--networks resnet18 ...] [--steps 200] [--pairs 15] [--threads 2]

One process a network, with the allocator settings of the lab's worker. It trains the compressed network for --steps
iterations, copies it, and then lets the copy (plain, counted) and the original step in turn on the same batches, the
order changing from pair to pair: times are the median of the pairs' ratios. Another process repeats the plain steps on
the default allocator. Images are cifar10-small's, upscaled where the network wants more than 32 pixels, which makes
them smoother than real ones of that size.

Peak: the process's largest resident size within a step. Static memory: its resident size when a step has ended, with
parameters, gradients, optimizer and data; on the default allocator, which keeps what is freed, its size before the
first step and the bytes of gradients and momentum. SGD is the fused one: the other's temporary for weight decay, as
large as the largest weight, would be the peak of vgg16_bn in either arm. The floor is static memory and the largest
operator's working set: its input, and the gradients of input and output. Writes benchmarks/results/engine.json and
prints the README's table.
"""

import argparse
import copy
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from comet_core.launcher import ALLOCATOR_TUNABLES, WAIT_POLICY

RESULTS = Path(__file__).resolve().parent / "results"
PROJECT = RESULTS.parent.parent
NETWORKS = {  # image size, batch size
    "resnet18": (32, 128),
    "resnet50": (64, 32),
    "vgg16_bn": (64, 32),
    "alexnet": (224, 64),
    "efficientnet_b0": (64, 32),
    "vit_tiny": (64, 32),
}
LEARNING_RATE = {"resnet18": 0.05, "resnet50": 0.02, "vgg16_bn": 0.002, "alexnet": 0.01, "efficientnet_b0": 0.05}
NUM_PLAIN_STEPS = 6  # on the default allocator


def build(name: str, num_classes: int, image_size: int) -> Any:
    from torchvision.models import resnet50

    from comet_core.models import build_model

    if name == "resnet50":
        return resnet50(num_classes=num_classes)
    return build_model(name, num_classes, 3, image_size)


class Arm:
    """A network with its optimizer and session; `step` trains once and says what it took."""

    def __init__(self, model: Any, optimizer: Any, policy: str) -> None:
        import comet_core

        self.model, self.optimizer = model, optimizer
        self.session = comet_core.attach(model, optimizer, policy=policy, tune_allocator=False)

    def step(self, images: Any, labels: Any) -> dict[str, Any]:
        from torch.nn import functional as F

        from comet_core.device_memory import process_rss_bytes

        self.session._memory.reset_peak()
        began = time.perf_counter()
        self.optimizer.zero_grad(set_to_none=True)
        loss = F.cross_entropy(self.model(images), labels)
        loss.backward()
        self.optimizer.step()
        found = self.session.step(train_loss=loss)
        seconds = time.perf_counter() - began
        del loss
        names = (
            "train_loss", "saved_bytes", "held_bytes", "conv_input_saved_bytes", "conv_input_held_bytes",
            "pack_seconds", "unpack_seconds", "peak_rss_bytes",
        )  # fmt: skip
        row = {name: getattr(found, name) for name in names}
        return {**row, "step_seconds": seconds, "rss_bytes_after": process_rss_bytes()}


def measure(name: str, images_path: str, policy: str, num_steps: int, num_pairs: int, num_threads: int) -> dict:
    import torch

    from comet_core.config import RunConfig
    from comet_core.datasets import load_dataset
    from comet_core.device_memory import process_rss_bytes
    from comet_core.planner import largest_working_set
    from comet_core.trainer import environment, load_kernels

    torch.set_num_threads(num_threads)
    image_size, batch_size = NETWORKS[name]
    config = RunConfig(
        dataset="image_folder", dataset_path=images_path, image_size=image_size, batch_size=batch_size, seed=0
    )
    data = load_dataset(config)
    batches = endless(data, batch_size)
    torch.manual_seed(0)
    model = build(name, data.num_classes, image_size)
    optimizer = sgd(model, LEARNING_RATE.get(name, 0.02))
    load_kernels(config, torch.device("cpu"))
    floor = largest_working_set(model, next(batches)[0])
    start_rss_bytes = process_rss_bytes()
    arms = {policy: Arm(model, optimizer, policy)}
    warm_up = []
    for step in range(1, num_steps + 1):
        warm_up.append(arms[policy].step(*next(batches)))
        if step % 10 == 0 or step == num_steps:
            last = warm_up[-1]
            print(f"{name}, {policy}: step {step} of {num_steps}, loss {last['train_loss']:.3f}, "
                  f"{last['saved_bytes'] / max(last['held_bytes'], 1):.1f}x, {last['step_seconds']:.2f} s",
                  file=sys.stderr)  # fmt: skip
    pairs: list[dict[str, Any]] = []
    if policy == "compress":
        twin = copy.deepcopy(model)
        twin_optimizer = sgd(twin, LEARNING_RATE.get(name, 0.02))
        twin_optimizer.load_state_dict(optimizer.state_dict())
        arms["baseline"] = Arm(twin, twin_optimizer, "baseline")
    for number in range(num_pairs):
        batch = next(batches)
        order = list(arms) if number % 2 else list(arms)[::-1]
        pairs.append({arm: arms[arm].step(*batch) for arm in order})
        print(f"{name}: pair {number + 1} of {num_pairs}, "
              + ", ".join(f"{arm} {row['step_seconds']:.3f} s" for arm, row in pairs[-1].items()),
              file=sys.stderr)  # fmt: skip
    layers = [
        {key: getattr(layer, key) for key in ("name", "operator", "saved_bytes", "held_bytes", "error_bound")}
        for layer in arms[policy].session.layers
    ]
    return {
        "environment": environment(torch.device("cpu")),
        "image_size": image_size,
        "batch_size": batch_size,
        "num_warm_up_steps": num_steps,
        "working_set_bytes": floor,
        "start_rss_bytes": start_rss_bytes,
        "parameter_bytes": sum(parameter.nbytes for parameter in model.parameters()),
        "pairs": pairs[1:],  # in the first the copy's memory is new
        "layers": layers,
    }


def sgd(model: Any, learning_rate: float) -> Any:
    import torch

    return torch.optim.SGD(model.parameters(), lr=learning_rate, momentum=0.9, weight_decay=5e-4, fused=True)


def endless(data: Any, batch_size: int) -> Iterator[tuple[Any, Any]]:
    """Full batches, epoch after epoch."""
    epoch = 0
    while True:
        epoch += 1
        for images, labels in data.train_batches(epoch):
            if len(labels) == batch_size:
                yield images, labels


def summary(found: dict) -> dict:
    """Medians over the pairs; peaks are the largest, above the level at the end of steps."""
    pairs, plain = found["pairs"], found["default_allocator"]["pairs"]

    def median(value: Callable[[dict], float]) -> float:
        return statistics.median(value(pair) for pair in pairs)

    def above_static(rows: list[dict]) -> int:
        return max(row["peak_rss_bytes"] for row in rows) - max(row["rss_bytes_after"] for row in rows)

    mine, twin = [pair["compress"] for pair in pairs], [pair["baseline"] for pair in pairs]
    default = [pair["baseline"] for pair in plain]
    static = found["default_allocator"]["start_rss_bytes"] + 2 * found["parameter_bytes"]
    return {
        "compression_ratio": median(lambda pair: pair["compress"]["saved_bytes"] / pair["compress"]["held_bytes"]),
        "conv_input_ratio": median(
            lambda pair: pair["compress"]["conv_input_saved_bytes"] / max(pair["compress"]["conv_input_held_bytes"], 1)
        ),
        "saved_bytes": median(lambda pair: pair["baseline"]["saved_bytes"]),
        "step_over_baseline": median(lambda pair: pair["compress"]["step_seconds"] / pair["baseline"]["step_seconds"]),
        "baseline_step_seconds": median(lambda pair: pair["baseline"]["step_seconds"]),
        "default_allocator_step_seconds": statistics.median(row["step_seconds"] for row in default),
        "pack_seconds": median(lambda pair: pair["compress"]["pack_seconds"]),
        "unpack_seconds": median(lambda pair: pair["compress"]["unpack_seconds"]),
        "peak_above_static_bytes": above_static(mine),
        "baseline_peak_above_static_bytes": above_static(twin),
        "default_allocator_peak_above_static_bytes": max(row["peak_rss_bytes"] for row in default) - static,
    }


def table(networks: dict[str, dict]) -> str:
    lines = [
        "| network, input, batch | ratio, whole graph | ratio, convolution inputs | step time over baseline | peak "
        "above static memory over baseline's | over that on the default allocator | MiB: compressed, baseline, floor |",
        "|---|---|---|---|---|---|---|",
    ]
    for name, found in networks.items():
        one = found["summary"]
        peak, other = one["peak_above_static_bytes"], one["baseline_peak_above_static_bytes"]
        size = found["image_size"]
        lines.append(
            f"| {name}, {size}x{size}, {found['batch_size']} | {one['compression_ratio']:.1f}x "
            f"| {one['conv_input_ratio']:.1f}x | {one['step_over_baseline']:.2f} | {peak / other:.2f} "
            f"| {peak / one['default_allocator_peak_above_static_bytes']:.2f} "
            f"| {peak / 2**20:,.0f}, {other / 2**20:,.0f}, {found['working_set_bytes'] / 2**20:,.0f} |"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("images", help="a folder or a .zip of labelled images")
    parser.add_argument("--networks", nargs="+", choices=list(NETWORKS), default=list(NETWORKS), metavar="NAME")
    parser.add_argument("--steps", type=int, default=200, help="compressed iterations before anything is measured")
    parser.add_argument("--pairs", type=int, default=15, help="pairs of steps")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--name", default="engine", help="of the file in benchmarks/results")
    parser.add_argument("--one", choices=("compress", "baseline"), help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.one:
        print(json.dumps(measure(given.networks[0], given.images, given.one, given.steps, given.pairs, given.threads)))
        return

    def run(name: str, policy: str, tunables: str, steps: int, pairs: int) -> dict:
        command = [sys.executable, "-m", "benchmarks.engine", given.images, "--networks", name, "--one", policy]
        command += ["--steps", str(steps), "--pairs", str(pairs), "--threads", str(given.threads)]
        settings = {"GLIBC_TUNABLES": tunables, "OMP_WAIT_POLICY": WAIT_POLICY}
        for library in ("OMP", "MKL", "NUMBA"):
            settings[f"{library}_NUM_THREADS"] = str(given.threads)
        done = subprocess.run(
            command, cwd=PROJECT, env={**os.environ, **settings}, stdout=subprocess.PIPE, text=True, check=True
        )
        return json.loads(done.stdout)

    output = RESULTS / f"{given.name}.json"
    networks = json.loads(output.read_text())["networks"] if output.exists() else {}
    for name in given.networks:
        found = run(name, "compress", ALLOCATOR_TUNABLES, given.steps, given.pairs)
        found["default_allocator"] = run(name, "baseline", "", 2, NUM_PLAIN_STEPS)
        found["summary"] = summary(found)
        networks[name] = found
        ordered = {key: networks[key] for key in NETWORKS if key in networks}
        output.write_text(json.dumps({"images": Path(given.images).name, "networks": ordered}, indent=1) + "\n")
        print(table({name: found}), flush=True)


if __name__ == "__main__":
    main()
