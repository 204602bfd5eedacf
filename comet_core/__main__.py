"""`python -m comet_core train / bench / data-check`: the engine from a terminal, no database.

What the user can mend is one sentence on stderr and exit code 2. `train` and `bench codec` start themselves once more
with glibc's allocator told to give freed memory back, a setting that only a new process can take up, so that peaks are
honest and codecs are as fast as in training.
"""

import argparse
import json
import os
import platform
import signal
import sys
import threading
from pathlib import Path
from typing import Any

from comet_core import config, launcher, metrics
from comet_core.config import RunConfig


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m comet_core")
    commands = parser.add_subparsers(dest="command", required=True)
    train = commands.add_parser("train", help="train once and print what was saved")
    check = commands.add_parser("data-check", help="read a data set and say what is in it")
    for command in (train, check):
        command.add_argument("--preset", help=f"start from these values: {', '.join(config.PRESETS)}")
        command.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="any option; repeatable")
    train.add_argument("--json", type=Path, metavar="FILE", help="write config, history and summary to this file")
    check.add_argument("--json", action="store_true", help="answer as JSON")
    _add_bench(commands.add_parser("bench", help="measure codecs on a tensor"))
    given = parser.parse_args(arguments)
    try:
        config.check_system()
        if given.command == "bench":
            return _layers(given.model) if given.subject == "layers" else _bench(given)
        values = config.preset_values(given.preset) if given.preset else {}
        run = config.config_from_dict({**values, **config.parse_settings(given.set)})
        if given.command == "data-check":
            return _check(run, as_json=given.json)
        return _train(run, given.json)
    except (ValueError, RuntimeError, OSError) as error:
        if given.command == "data-check" and given.json:
            print(metrics.dumps({"ok": False, "error": str(error)}))
        else:
            print(f"error: {error}", file=sys.stderr)
        return 2


def _add_bench(bench: argparse.ArgumentParser) -> None:
    subjects = bench.add_subparsers(dest="subject", required=True)
    layers = subjects.add_parser("layers", help="the layers of a network whose input can be captured, as JSON")
    layers.add_argument("--model", default="resnet20", help=f"one of {', '.join(config.MODELS)}")
    codec = subjects.add_parser("codec", help="ratio, error and throughput of codecs at several bounds")
    codec.add_argument("--tensor", metavar="FILE", help="a .npy file, or FILE.safetensors[:NAME]; else one is captured")
    codec.add_argument("--model", default="resnet20", help="network to capture a tensor from, while it trains")
    codec.add_argument("--layer", metavar="NAME", help="whose input; `bench layers` lists them (default: a middle one)")
    codec.add_argument("--steps", type=int, default=20, help="iterations before the capture (default: %(default)s)")
    codec.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="any option of the training")
    codec.add_argument("--codecs", nargs="+", metavar="CODEC", default=list(config.CODECS),
                       help="names, or name:key=value,key=value (default: all)")  # fmt: skip
    codec.add_argument("--kind", choices=("rule", "range_rel", "pw_rel", "abs"), help="what the bounds count: times "
                       "the bound that the momentum rule gives the layer (default for a captured tensor), share of the "
                       "tensor's range (default for a file), share of each value, or absolute")  # fmt: skip
    codec.add_argument("--bounds", nargs="+", type=float, metavar="BOUND", help="default: a few of the kind")
    codec.add_argument("--channel-dim", type=int, metavar="DIM", help="of a file: the quantiser adapts along it")
    codec.add_argument("--sign-exact", action="store_true", help="zeros and signs come back too, as behind a ReLU")
    codec.add_argument("--repetitions", type=int, default=3, help="times are their median (default: %(default)s)")
    codec.add_argument("--threads", type=int, default=0, help="CPU threads; 0: all cores")
    codec.add_argument("--progress", choices=("bar", "lines"), default="bar", help="lines: one JSON object each")
    codec.add_argument("--json", type=Path, metavar="FILE", help="write everything measured to this file")


def _use_process_settings() -> None:
    """Start this process once more with those of allocator and OpenMP that are missing; returns in the new one."""
    settings = {"OMP_WAIT_POLICY": launcher.WAIT_POLICY}
    if platform.libc_ver()[0] == "glibc":
        settings["GLIBC_TUNABLES"] = launcher.ALLOCATOR_TUNABLES
    if not settings.keys() <= os.environ.keys():
        environment = {**settings, **os.environ}
        os.execve(sys.executable, [sys.executable, "-m", "comet_core", *sys.argv[1:]], environment)


def _check_output(output: Path | None) -> None:
    if output is not None and not output.resolve().parent.is_dir():
        raise ValueError(f"--json is {str(output)!r}, but {output.resolve().parent} is no folder; make it first.")


def _stop_on_signal() -> threading.Event:
    """Set by Ctrl-C and by TERM."""
    stop = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: stop.set())
    return stop


def _train(run: RunConfig, output: Path | None) -> int:
    _use_process_settings()
    _check_output(output)
    from tqdm import tqdm

    from comet_core.trainer import train

    stop = _stop_on_signal()
    recorder = metrics.ListRecorder()
    started: dict[str, Any] = {}
    bar = tqdm(unit="step", desc=run.title, disable=None)

    def progress(step: int, num_steps: int) -> None:
        bar.total = num_steps
        last = recorder.steps[-1]
        if last.compression_ratio is not None and last.train_loss is not None:
            bar.set_postfix_str(f"loss {last.train_loss:.3f}, ratio {last.compression_ratio:.1f}x", refresh=False)
        bar.update(step - bar.n)

    summary: dict[str, Any] = {"status": "failed"}
    try:
        summary = train(run, recorder, should_stop=stop.is_set, progress=progress, on_start=started.update)
    finally:
        bar.close()
        if output is not None:  # also after a failure: what was recorded is kept
            written = {
                "config": run.to_dict(),
                "environment": started.get("environment"),
                **recorder.to_dict(),
                "summary": summary,
            }
            output.write_text(metrics.dumps(written) + "\n")
    _print_summary(run, summary)
    return 0


def _print_summary(run: RunConfig, summary: dict[str, Any]) -> None:
    def shown(name: str, text: str, scale: float = 1.0) -> str:
        value = summary.get(name)
        return "-" if value is None else text.format(value / scale)

    print(f"{run.title}: {summary['status']} after {summary['num_steps']:,} steps, {summary['wall_seconds']:.0f} s")
    for label, value in (
        ("test accuracy", shown("test_accuracy", "{:.2%}")),
        ("compression ratio, whole graph, last epoch", shown("compression_ratio", "{:.1f}x")),
        ("compression ratio, convolution inputs, last epoch", shown("conv_input_ratio", "{:.1f}x")),
        ("peak resident memory above the start", shown("peak_rss_above_start_bytes", "{:,.0f} MiB", 2**20)),
        ("peak allocated on the GPU", shown("peak_allocated_bytes", "{:,.0f} MiB", 2**20)),
        ("step time, median", shown("median_step_seconds", "{:.3f} s")),
    ):
        print(f"  {label:<50} {value}")


def _layers(model: str) -> int:
    from comet_core.tensor_sources import layers_by_name

    print(metrics.dumps(layers_by_name(model)))
    return 0


def _bench(given: argparse.Namespace) -> int:
    _use_process_settings()
    _check_output(given.json)
    for name, least in (("steps", 1), ("repetitions", 1), ("threads", 0)):
        if getattr(given, name) < least:
            raise ValueError(f"--{name} is {getattr(given, name)}; allowed: {least} or more.")
    stop = _stop_on_signal()  # before the libraries load, which takes seconds
    import torch
    from tqdm import tqdm

    from comet_core.codec_bench import codec_of, measure
    from comet_core.tensor_sources import bounds_of, captured, read_tensor, tensor_facts
    from comet_core.trainer import environment

    if given.threads:
        torch.set_num_threads(given.threads)
    for text in given.codecs:
        codec_of(text)  # a wrong name is said before anything takes time
    bar = tqdm(unit="turn", disable=True if given.progress == "lines" else None)

    def progress(done: int, total: int, text: str) -> None:
        if given.progress == "lines":
            print(json.dumps({"done": done, "total": total, "text": text}), file=sys.stderr, flush=True)
        bar.total = total
        bar.set_description_str(text, refresh=False)
        bar.update(done - bar.n)

    facts: dict[str, Any] = {"source": "file" if given.tensor else "captured"}
    found: dict[str, Any] = {"bounds": [], "results": [], "stopped": True}
    try:
        if not given.tensor:
            facts |= {"model": given.model, "num_steps": given.steps}
        sample = read_tensor(given.tensor) if given.tensor else captured(
            given.model, given.layer, given.steps, config.parse_settings(given.set), stop.is_set, progress
        )  # fmt: skip
        if sample is not None:
            kind, bounds = bounds_of(sample, given.kind, given.bounds, given.channel_dim)
            sign_exact = given.sign_exact or sample.sign_exact
            facts |= {"name": sample.name, "operator": sample.operator, "kind": kind, "sign_exact": sign_exact}
            facts |= {"channel_dim": next(iter(bounds.values())).channel_dim, "repetitions": given.repetitions}
            facts |= tensor_facts(sample.tensor)
            found = measure(
                sample.tensor, given.codecs, bounds, sign_exact=sign_exact, repetitions=given.repetitions,
                should_stop=stop.is_set, progress=progress,
            )  # fmt: skip
    finally:
        bar.close()
    if given.json is not None:
        written = {"tensor": facts, "environment": environment(torch.device("cpu")), **found}
        given.json.write_text(metrics.dumps(written) + "\n")
    _print_bench(facts, found)
    return 0


def _print_bench(facts: dict[str, Any], found: dict[str, Any]) -> None:
    if "name" in facts:
        print(f"{facts['name']}: {facts['dtype']} {facts['shape']}, bounds are {facts['kind']}")
        print(f"{'bound':>10} {'codec':<28} {'ratio':>8} {'bits':>7} {'entropy':>8} {'context':>8} {'max error':>10} "
              f"{'rms error':>10} {'encode':>7} {'decode':>7} GB/s")  # fmt: skip
    limits = {entry["bound"]: entry for entry in found["bounds"]}
    for row in found["results"]:
        limit = limits.get(row["bound"], {})
        bound = "-" if row["bound"] is None else f"{row['bound']:g}"
        order0, context = (
            "-" if limit.get(name) is None else f"{limit[name]:.3f}" for name in ("order0_bits", "context_bits")
        )
        print(f"{bound:>10} {row['codec']:<28} {row['compression_ratio']:>7.2f}x {row['bits_per_value']:>7.3f} "
              f"{order0:>8} {context:>8} {row['max_error']:>10.3g} {row['rms_error']:>10.3g} "
              f"{row['encode_gb_per_s']:>7.2f} {row['decode_gb_per_s']:>7.2f}")  # fmt: skip
    if found["stopped"]:
        print("stopped before everything was measured")


def _check(run: RunConfig, *, as_json: bool) -> int:
    from comet_core.datasets import load_dataset

    data = load_dataset(run)
    facts = {
        "num_train": data.num_train,
        "num_test": data.num_test,
        "num_classes": data.num_classes,
        "classes": data.classes,
        "image_size": data.image_size,
        "num_channels": data.num_channels,
    }
    if as_json:
        print(metrics.dumps({"ok": True, **facts}))
    else:
        print(f"{facts['num_train']:,} training and {facts['num_test']:,} test images of {data.image_size} pixels, "
              f"{data.num_channels} channel(s), {data.num_classes} classes: {', '.join(data.classes)}")  # fmt: skip
    return 0


if __name__ == "__main__":
    sys.exit(main())
