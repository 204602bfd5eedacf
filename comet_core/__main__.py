"""`python -m comet_core train / plan / bench / data-check`: the engine from a terminal, no database.

What the user can mend is one sentence on stderr and exit code 2. `train` and `bench codec` start themselves once more
with glibc's allocator told to give freed memory back, a setting that only a new process can take up, so that peaks are
honest and codecs are as fast as in training. Where Ctrl-C or TERM stops one of them, what there is until then is kept,
and the exit code is 128 and the signal's number, as a shell gives it.
"""

import signal

if __name__ == "__main__":  # before all else loads: Ctrl-C in that time ends the process without a traceback
    signal.signal(signal.SIGINT, signal.SIG_DFL)

import argparse
import errno
import json
import os
import platform
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

from comet_core import config, launcher, metrics
from comet_core.config import RunConfig

CAPTURED_MODEL, CAPTURE_STEPS = "resnet20", 20


class _Parser(argparse.ArgumentParser):
    """Says what is wrong as everything here does: one sentence on stderr, exit code 2."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"error: {message}; see {self.prog} --help.\n")


def main(arguments: list[str] | None = None) -> int:
    parser = _Parser(prog="python -m comet_core")
    commands = parser.add_subparsers(dest="command", required=True)
    train = commands.add_parser("train", help="train once and print what was saved")
    check = commands.add_parser("data-check", help="read a data set and say what is in it")
    plan = commands.add_parser("plan", help="what fits into memory, with and without compression")
    for command in (train, check, plan):
        command.add_argument("--preset", help=f"start from these values: {', '.join(config.PRESETS)}")
        command.add_argument("--set", action="append", default=[], metavar="KEY=VALUE",
                             help="any option; repeatable, of one given twice the last counts")  # fmt: skip
    train.add_argument("--json", type=Path, metavar="FILE", help="write config, history and summary to this file")
    check.add_argument("--json", action="store_true", help="answer as JSON")
    _add_plan(plan)
    _add_bench(commands.add_parser("bench", help="measure codecs on a tensor"))
    given = parser.parse_args(arguments)
    try:
        config.check_system()
        if given.command == "bench":
            return _layers(given.model) if given.subject == "layers" else _bench(given)
        values = config.preset_values(given.preset) if given.preset else {}
        settings = config.parse_settings(given.set)
        if given.command == "plan":
            settings["model"] = given.model
        run = config.config_from_dict({**values, **settings})
        if given.command == "data-check":
            return _check(run, as_json=given.json)
        if given.command == "plan":
            return _plan(run, given)
        return _train(run, settings, given.json)
    except (ValueError, RuntimeError, OSError) as error:
        if given.command == "data-check" and given.json:
            print(metrics.dumps({"ok": False, "error": str(error)}))
        else:
            print(f"error: {error}", file=sys.stderr)
        return 2


def _add_plan(plan: argparse.ArgumentParser) -> None:
    plan.add_argument("model", metavar="MODEL", help=f"one of {', '.join(config.MODELS)}")
    plan.add_argument("--batch", type=_whole(1, 10**6), metavar="N", default=128, help="images (default: %(default)s)")
    plan.add_argument("--memory", type=_bytes, metavar="SIZE", help="what there is, as 8GiB, 8GB, 512MiB or bytes")
    plan.add_argument("--history", type=Path, nargs="+", default=[], metavar="FILE",
                      help="what `train --json` wrote for the same network: how far off the prediction is")  # fmt: skip
    plan.add_argument("--json", type=Path, metavar="FILE", help="write everything to this file")


def _bytes(text: str) -> int:
    units = {"": 1, "B": 1, "kB": 1e3, "MB": 1e6, "GB": 1e9, "TB": 1e12}
    units |= {"KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}
    found = re.fullmatch(r"([0-9]{1,15}(?:\.[0-9]{1,6})?) ?([A-Za-z]*)", text.strip())
    if not found or found[2] not in units or float(found[1]) == 0:
        raise argparse.ArgumentTypeError(
            f"{config.shown(text)} is no size; write it like 8GiB, 8GB, 512MiB or as a number of bytes"
        )
    return int(float(found[1]) * units[found[2]])


def _add_bench(bench: argparse.ArgumentParser) -> None:
    subjects = bench.add_subparsers(dest="subject", required=True)
    layers = subjects.add_parser("layers", help="the layers of a network whose input can be captured, as JSON")
    layers.add_argument("--model", default="resnet20", help=f"one of {', '.join(config.MODELS)}")
    codec = subjects.add_parser("codec", help="ratio, error and throughput of codecs at several bounds")
    codec.add_argument("--tensor", metavar="FILE", help="a .npy file, or FILE.safetensors[:NAME]; else one is captured")
    codec.add_argument("--model", help=f"network to capture a tensor from, while it trains (default: {CAPTURED_MODEL})")
    codec.add_argument("--layer", metavar="NAME", help="whose input; `bench layers` lists them (default: a middle one)")
    codec.add_argument("--steps", type=_whole(1, 1_000_000), help=f"iterations before it (default: {CAPTURE_STEPS})")
    codec.add_argument("--set", action="append", default=[], metavar="KEY=VALUE",
                       help="an option of that training, such as dataset (default: digits) or seed")  # fmt: skip
    codec.add_argument("--codecs", nargs="+", metavar="CODEC", default=list(config.CODECS),
                       help="names, or name:key=value,key=value (default: all). Their parameters: " + "; ".join(
                           f"{name}: {', '.join(params)}" for name, params in config.CODEC_PARAMS.items() if params
                       ))  # fmt: skip
    codec.add_argument("--kind", choices=("rule", "range_rel", "pw_rel", "abs"), help="what the bounds count: times "
                       "the bound that the momentum rule gives the layer (default for a captured tensor), share of the "
                       "tensor's range (default for a file), share of each value, or absolute")  # fmt: skip
    codec.add_argument("--bounds", nargs="+", type=_number, metavar="BOUND",
                       help="0 is lossless, inf allows anything finite (default: a few of the kind)")  # fmt: skip
    codec.add_argument("--channel-dim", type=_whole(-64, 63), metavar="DIM", help="the quantiser adapts along it; not "
                       "with the rule's bounds, which choose it")  # fmt: skip
    codec.add_argument("--sign-exact", action="store_true", help="zeros and signs come back too, as behind a ReLU")
    codec.add_argument("--repetitions", type=_whole(1, 1000), default=3, help="times are their median "
                       "(default: %(default)s)")  # fmt: skip
    codec.add_argument("--threads", type=_whole(0, config.FIELDS["num_threads"].metadata["high"]), default=0,
                       help="CPU threads; 0: all cores")  # fmt: skip
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


def _whole(low: int, high: int) -> Callable[[str], int]:
    """What argparse calls to read a whole number from `low` to `high`."""

    def read(text: str) -> int:
        number = int(text) if re.fullmatch("-?[0-9]{1,20}", text) else None
        if number is None or not low <= number <= high:
            raise argparse.ArgumentTypeError(f"{config.shown(text)} is not a whole number from {low:,} to {high:,}")
        return number

    return read


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{config.shown(text)} is no number; write it like 0.01 or 1e-3") from None


def _check_output(output: Path | None) -> None:
    """Raise ValueError where --json cannot be written; said before the work, which may take hours."""
    if output is None:
        return
    given = f"--json is {config.shown(str(output))}"
    try:
        if not output.absolute().parent.is_dir():
            raise ValueError(f"{given}, but {output.absolute().parent} is no folder; make it first.")
        if output.is_dir():
            raise ValueError(f"{given}, which is a folder; name a file in it.")
        new = not output.exists()
        if new or output.is_file():
            output.open("a").close()
        elif not os.access(output, os.W_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
        if new:
            output.resolve().unlink()  # of a link, what it points to
    except OSError as error:
        raise ValueError(f"{given}, which cannot be written ({error.strerror}); name another file.") from error


def _write(output: Path | None, values: dict[str, Any]) -> bool:
    """Write the JSON where it was asked for; False, after a sentence, where that fails in spite of the check."""
    try:
        if output is not None:
            output.write_text(metrics.dumps(values) + "\n")
    except OSError as error:
        print(f"error: --json {str(output)!r} could not be written: {error.strerror}.", file=sys.stderr)
        return False
    return True


def _stop_on_signal() -> list[int]:
    """Will hold the signal's number after Ctrl-C or TERM; a second Ctrl-C ends the process at once."""
    received: list[int] = []

    def note(number: int, _: Any) -> None:
        received.append(number)
        signal.signal(signal.SIGINT, signal.SIG_DFL)

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, note)
    return received


def _exit_code(received: list[int], *, stopped: bool, written: bool) -> int:
    return 128 + received[0] if stopped else 0 if written else 2


def _train(run: RunConfig, settings: dict[str, Any], output: Path | None) -> int:
    _use_process_settings()
    _check_output(output)
    stop = _stop_on_signal()  # before the libraries load, which takes seconds
    for name, reason in config.unread(run.to_dict()).items():
        if name in settings:
            print(f"note: {name} is not read with {reason}", file=sys.stderr)
    from tqdm import tqdm

    from comet_core.trainer import train

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
        summary = train(run, recorder, should_stop=lambda: bool(stop), progress=progress, on_start=started.update)
    finally:
        bar.close()
        if summary["status"] != "failed":
            _print_summary(run, summary)
        # Also after a failure: what was recorded is kept.
        history = {"environment": started.get("environment"), **recorder.to_dict(), "summary": summary}
        written = _write(output, {"config": run.to_dict(), **history})
    return _exit_code(stop, stopped=summary["status"] == "stopped", written=written)


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


def _plan(run: RunConfig, given: argparse.Namespace) -> int:
    _use_process_settings()
    _check_output(given.json)
    histories = []
    for path in given.history:
        try:
            history = json.loads(path.read_text())
            assert isinstance(history["config"], dict) and isinstance(history["summary"], dict)
        except (OSError, ValueError, KeyError, TypeError, AssertionError):
            raise ValueError(
                f"--history names {config.shown(str(path))}, which `train --json` did not write; give such files."
            ) from None
        histories.append(history)
    from comet_core.planner import plan

    found = plan(run, given.batch, given.memory, histories=histories,
                 progress=lambda what: print(f"measuring {what}", file=sys.stderr, flush=True))  # fmt: skip
    _print_plan(found)
    return 0 if _write(given.json, found) else 2


def _print_plan(found: dict[str, Any]) -> None:
    def mib(nbytes: float) -> str:
        return f"{nbytes / 2**20:,.1f} MiB"

    run, with_memory = found["config"], found["memory_bytes"] is not None
    print(f"{run['model']} on {run['dataset']}, batch {run['batch_size']}: {mib(found['saved_bytes'])} for backward")
    print(f"  {'operator':<28}{'saved':>14}{'compressed':>14}")
    for row in found["operators"]:
        print(f"  {row['operator']:<28}{mib(row['saved_bytes']):>14}{mib(row['held_bytes']):>14}")
    print(f"process {mib(found['process_bytes'])}, parameters, gradients and optimizer {mib(found['static_bytes'])}, "
          f"working set {mib(found['working_set_bytes'])}")  # fmt: skip
    print(f"  {'':<28}{'ratio':>10}{'predicted peak':>18}" + (f"{'largest batch':>20}" if with_memory else ""))
    for name, arm in found["arms"].items():
        line = f"  {name:<28}{arm['compression_ratio']:>9.1f}x{mib(arm['predicted_peak_bytes']):>18}"
        if with_memory:
            line += f"{arm['largest_batch']:>20,}" if arm["largest_batch"] else f"{mib(arm['short_bytes']):>14} short"
        print(line)
    print(f"Ratios are those of a network that has hardly trained. Largest batches leave {found['margin']:.0%} of the "
          "predicted peak free.")  # fmt: skip
    for past in found["past"]:
        said = past.get("reason") or (
            f"{past['arm']}, predicted {mib(past['predicted_bytes'])} above its start, measured "
            f"{mib(past['measured_bytes'])} ({past['predicted_over_measured']:.2f})"
        )
        print(f"  a run of batch {past['batch_size']}: {said}")


def _layers(model: str) -> int:
    from comet_core.tensor_sources import layers_by_name

    print(metrics.dumps(layers_by_name(model)))
    return 0


def _bench(given: argparse.Namespace) -> int:
    _use_process_settings()
    _check_output(given.json)
    of_capture = [f"--{name}" for name in ("model", "layer", "steps", "set") if getattr(given, name) not in (None, [])]
    if given.tensor is not None and of_capture:
        raise ValueError(f"{', '.join(of_capture)} can only be of a capture, but --tensor names a file; leave one out.")
    twice = [text for place, text in enumerate(given.codecs) if text in given.codecs[:place]]
    if twice:
        raise ValueError(f"codec {config.shown(twice[0])} is given twice; write it once.")
    stop = _stop_on_signal()  # before the libraries load, which takes seconds
    import torch
    from tqdm import tqdm

    from comet_core.codec_bench import codec_of, measure
    from comet_core.codecs.base import ErrorBound
    from comet_core.tensor_sources import (
        CAPTURE_READS,
        Sample,
        bounds_of,
        capture_config,
        captured,
        read_tensor,
        tensor_facts,
    )
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

    def should_stop() -> bool:
        return bool(stop)

    found: dict[str, Any] = {"bounds": [], "results": [], "stopped": True}
    try:
        if given.tensor is not None:
            facts: dict[str, Any] = {"source": "file"}
            sample: Sample | None = read_tensor(given.tensor)
        else:
            steps = given.steps or CAPTURE_STEPS
            model = CAPTURED_MODEL if given.model is None else given.model
            run = capture_config(model, config.parse_settings(given.set))
            # What bounds are refused for is said before the training, not after it.
            some = Sample(name="", tensor=torch.empty(0), rule_bound=ErrorBound("abs", 1.0))
            bounds_of(some, given.kind, given.bounds, given.channel_dim)
            facts = {"source": "captured", "model": run.model, "num_steps": steps}
            facts["settings"] = {name: getattr(run, name) for name in CAPTURE_READS}  # all that repeating it takes
            sample = captured(run, given.layer, steps, should_stop, progress)
        if sample is not None:
            kind, bounds = bounds_of(sample, given.kind, given.bounds, given.channel_dim)
            sign_exact = given.sign_exact or sample.sign_exact
            facts |= {"name": sample.name, "operator": sample.operator, "kind": kind, "sign_exact": sign_exact}
            facts |= {"channel_dim": next(iter(bounds.values())).channel_dim, "repetitions": given.repetitions}
            facts |= tensor_facts(sample.tensor)
            found = measure(
                sample.tensor, given.codecs, bounds, sign_exact=sign_exact, repetitions=given.repetitions,
                should_stop=should_stop, progress=progress,
            )  # fmt: skip
    finally:
        bar.close()
    _print_bench(facts, found)  # before the file is written: a full disk does not take the table along
    written = _write(given.json, {"tensor": facts, "environment": environment(torch.device("cpu")), **found})
    return _exit_code(stop, stopped=found["stopped"], written=written)


def _print_bench(facts: dict[str, Any], found: dict[str, Any]) -> None:
    if "name" in facts:
        where = ""
        if facts["source"] == "captured":
            where = f"{facts['model']} on {facts['settings']['dataset']} after {facts['num_steps']:,} step(s), "
        print(f"{where}{facts['name']}: {facts['dtype']} {facts['shape']}, bounds are {facts['kind']}")
        print(f"{'bound':>10} {'codec':<28} {'ratio':>8} {'bits':>7} {'entropy':>8} {'context':>8} {'max error':>10} "
              f"{'rms error':>10} {'beyond':>9} {'encode':>7} {'decode':>7} GB/s")  # fmt: skip
    limits = {entry["bound"]: entry for entry in found["bounds"]}
    for row in found["results"]:
        limit = limits.get(row["bound"], {})
        bound = "-" if row["bound"] is None else f"{row['bound']:g}"
        order0, context = (
            "-" if limit.get(name) is None else f"{limit[name]:.3f}" for name in ("order0_bits", "context_bits")
        )
        beyond = "see below" if "num_over_bounds" in row else f"{row['num_over_bound']:,}"
        print(f"{bound:>10} {row['codec']:<28} {row['compression_ratio']:>7.2f}x {row['bits_per_value']:>7.3f} "
              f"{order0:>8} {context:>8} {row['max_error']:>10.3g} {row['rms_error']:>10.3g} {beyond:>9} "
              f"{row['encode_gb_per_s']:>7.2f} {row['decode_gb_per_s']:>7.2f}")  # fmt: skip
    free = [row for row in found["results"] if "num_over_bounds" in row]
    if free and limits:
        print("values beyond the bound, of codecs without a guarantee:")
        print(f"{'':>10} {'codec':<28} " + " ".join(f"{bound:>9g}" for bound in limits))
        for row in free:
            shares = [count / facts["num_values"] for count in row["num_over_bounds"]]
            print(f"{'':>10} {row['codec']:<28} " + " ".join(f"{share:>9.2%}" for share in shares))
    for row in found["results"]:
        if row["note"]:
            print(f"{row['codec']}: {row['note']}")
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
