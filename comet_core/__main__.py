"""`python -m comet_core train / data-check`: the engine from a terminal, no database.

What the user can mend is one sentence on stderr and exit code 2. `train` starts itself once more with glibc's allocator
told to give freed memory back, a setting that only a new process can take up, so that peaks are honest.
"""

import argparse
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
    given = parser.parse_args(arguments)
    try:
        config.check_system()
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


def _train(run: RunConfig, output: Path | None) -> int:
    if platform.libc_ver()[0] == "glibc" and "GLIBC_TUNABLES" not in os.environ:
        environment = {**os.environ, "GLIBC_TUNABLES": launcher.ALLOCATOR_TUNABLES}
        os.execve(sys.executable, [sys.executable, "-m", "comet_core", *sys.argv[1:]], environment)
    if output is not None and not output.resolve().parent.is_dir():
        raise ValueError(f"--json is {str(output)!r}, but {output.resolve().parent} is no folder; make it first.")
    from tqdm import tqdm

    from comet_core.trainer import train

    stop = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: stop.set())
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
