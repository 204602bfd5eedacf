"""`RunConfig`, the menu of every selectable name, validation, JSON in and out.

One flat frozen dataclass: a field's name is the key of `--set key=value`, of the form on the web page and of the JSON
in a run's row, so nothing has to be mapped. Each field carries its label, unit, range and help as metadata; the form,
the CLI and the validation read the same entry. Stdlib only: the web process imports this file and must stay free of
torch. It does not look at the file system or the device: whether a path exists is the data set's question, asked when
it loads.
"""

import json
import os
import platform
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

# name -> what it is, in the words of the page. The engine's registries carry the same names; a test compares them.
MODELS = {
    "resnet20": "ResNet-20 for small images (0.27 M parameters)",
    "resnet18": "ResNet-18 (11 M parameters); a 3x3 stem below 64 pixels",
    "alexnet": "AlexNet (57 M parameters at 1,000 classes); needs images of 64 pixels or more",
    "vgg16_bn": "VGG-16 with batch norm; a small classifier below 64 pixels",
    "efficientnet_b0": "EfficientNet-B0 (4.0 M parameters at ten classes); needs images of 33 pixels or more",
    "vit_tiny": "vision transformer (5.4 M parameters): 12 layers of width 192; patches of 4 pixels, of 8 from 64 on",
}
DATASETS = {
    "digits": "1,797 handwritten digits of 8x8 from scikit-learn; needs no network",
    "fashion_mnist": "70,000 images of clothing, 28x28 (the Debian package dataset-fashion-mnist, or a download)",
    "cifar10": "60,000 colour images of 32x32 in ten classes (a download of 170 MB)",
    "image_folder": "your own images: a folder or a .zip with train/<class>/ and test/<class>/, or class folders alone",
}
POLICIES = {
    "baseline": "plain training; saved tensors are counted, not changed",
    "compress": "saved tensors are stored compressed, within bounds that the controller sets",
}
CONTROLLERS = {
    "noise": "bounds from a budget on the mini-batch's own sampling noise",
    "momentum": "COMET's rule: gradient error at a fraction of the mean momentum",
    "memory": "the smallest noise budget at which what is held for backward fits into given bytes",
    "fixed": "one absolute error bound for every lossy tensor",
}
CODECS = {
    "error_bounded": "quantiser with a bound on every value, packed and entropy coded",
    "group_quantized": "2 bits a value, rounded at random within groups of 256, as ActNN does; reads no bound",
    "dct": "8x8 blocks of each map as JPEG stores them, after JPEG-ACT; reads no bound",
    "cast": "8-bit floats with one scale a tensor; reads no bound",
    "sparse": "a bit a value and the values that are not zero, after Gist; exact",
    "lossless": "byte shuffle and zstd; exact",
}
# codec -> its parameters, each with the values that are allowed, the first one's type being the parameter's
CODEC_PARAMS: dict[str, dict[str, range | tuple[bool | int | str, ...]]] = {
    "error_bounded": {"dither": (False, True), "seed": range(2**32)},
    "group_quantized": {"num_bits": (2, 4, 8), "seed": range(2**32)},
    "dct": {"quality": range(1, 101)},
    "cast": {"dtype": ("float16", "bfloat16", "float8_e4m3fn", "float8_e5m2")},
    "sparse": {},
    "lossless": {},
}
OPTIMIZERS = {
    "sgd": "stochastic gradient descent, with momentum and L2 penalty",
    "adam": "Adam, with L2 penalty; a learning rate of 0.001 is usual",
}
SCHEDULES = {
    "one_cycle": "up to the learning rate over the first 30 % of the steps, then down to zero",
    "cosine": "half a cosine from the learning rate to zero",
    "step": "a tenth of the learning rate after half and after three quarters of the steps",
    "constant": "the learning rate as it is",
}
DEVICES = {"cpu": "the processor", "cuda": "the first visible NVIDIA GPU"}
GROUPS = ("Data", "Model", "Training", "Memory", "Machine")


class ConfigError(ValueError):
    """A configuration that cannot run. `problems` maps a field's name to a sentence about it."""

    def __init__(self, problems: Mapping[str, str]) -> None:
        self.problems = dict(problems)
        super().__init__(" ".join(self.problems.values()))


def check_system() -> None:
    """Raise RuntimeError with a clear sentence on systems the engine was never tested on."""
    if platform.system() not in ("Linux", "Darwin"):
        raise RuntimeError(
            f"COMET Lab was tested on Linux (CPU and CUDA) and macOS (CPU) only, this is {platform.system()}; "
            "use one of them, or the Docker image."
        )


def _option(
    default: Any,
    group: str,
    label: str,
    help: str,
    *,
    unit: str = "",
    low: float | None = None,
    high: float | None = None,
    open_low: bool = False,
    menu: Mapping[str, str] | None = None,
) -> Any:
    metadata = dict(group=group, label=label, help=help, unit=unit, low=low, high=high, open_low=open_low, menu=menu)
    return field(default=default, metadata=metadata)


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """Everything that decides a training run's result. Raises ConfigError when built from values that cannot run."""

    name: str = _option("", "Model", "Name", "A name for people; empty: made from model, data set and policy.")

    dataset: str = _option("digits", "Data", "Data set", "Where the images come from.", menu=DATASETS)
    dataset_path: str = _option("", "Data", "Path", "Folder or .zip of images; only for image_folder.")
    test_fraction: float = _option(
        0.2,
        "Data",
        "Test share",
        "Share held out when the data have no test part of their own, split by the seed.",
        unit="fraction",
        low=0.05,
        high=0.5,
    )
    image_size: int = _option(
        0,
        "Data",
        "Image size",
        "Images are resized to this; 0 keeps the size of the data set.",
        unit="pixels",
        low=0,
        high=512,
    )
    augment: bool = _option(True, "Data", "Crop and flip", "Random crop with a margin of an eighth, random mirror.")

    model: str = _option("resnet20", "Model", "Network", "What is trained.", menu=MODELS)

    epochs: int = _option(1, "Training", "Epochs", "Passes over the training images.", low=1, high=10_000)
    max_steps_per_epoch: int = _option(
        0,
        "Training",
        "Steps an epoch at most",
        "Ends an epoch early, for a quick look; 0: the whole data set.",
        unit="steps",
        low=0,
        high=10_000_000,
    )
    batch_size: int = _option(
        128, "Training", "Batch size", "Images a step. Activations grow with it.", unit="images", low=1, high=65_536
    )
    learning_rate: float = _option(
        0.1, "Training", "Learning rate", "The highest value of the schedule.", low=0.0, high=100.0, open_low=True
    )
    schedule: str = _option("one_cycle", "Training", "Schedule", "How the learning rate moves.", menu=SCHEDULES)
    optimizer: str = _option("sgd", "Training", "Optimizer", "How weights follow gradients.", menu=OPTIMIZERS)
    momentum: float = _option(0.9, "Training", "Momentum", "Of SGD; 0 is plain SGD.", low=0.0, high=0.9999)
    weight_decay: float = _option(5e-4, "Training", "Weight decay", "L2 penalty.", low=0.0, high=1.0)
    seed: int = _option(
        0, "Training", "Seed", "Decides weights, order of the data, crops and splits.", low=0, high=2**31 - 1
    )

    policy: str = _option("compress", "Memory", "Policy", "What happens to saved tensors.", menu=POLICIES)
    controller: str = _option(
        "noise", "Memory", "Controller", "What decides the error bounds; only for compress.", menu=CONTROLLERS
    )
    noise_budget: float = _option(
        0.05,
        "Memory",
        "Noise budget, weights",
        "Variance that compression adds to a weight's gradient, as a share of the sampling noise; 0.05 acts like a "
        "batch 5 % smaller.",
        unit="fraction",
        low=0.0,
        high=10.0,
    )
    norm_budget: float = _option(
        0.2,
        "Memory",
        "Noise budget, norms",
        "The same for scale and shift of norm layers.",
        unit="fraction",
        low=0.0,
        high=10.0,
    )
    momentum_fraction: float = _option(
        0.01,
        "Memory",
        "Momentum share",
        "Gradient error as a share of the mean momentum; controller momentum.",
        unit="fraction",
        low=0.0,
        high=1.0,
    )
    error_bound: float = _option(
        1e-3, "Memory", "Error bound", "Largest error of any stored value; controller fixed.", low=0.0, high=1e6
    )
    memory_bytes: int = _option(
        2**30,
        "Memory",
        "Memory for saved tensors",
        "What may be held for backward; controller memory.",
        unit="bytes",
        low=1,
        high=2**50,
    )
    layer_bounds: str = _option(
        "",
        "Memory",
        "Bounds of single layers",
        "As pattern=bound,pattern=bound with layer names as the layer table shows them, * for any text, and exact for "
        "no error; they take the place of the controller's.",
    )
    collect_every: int = _option(
        100,
        "Memory",
        "Collect every",
        "Iterations between two updates of the bounds (W in the papers).",
        unit="steps",
        low=1,
        high=100_000,
    )
    codec: str = _option("error_bounded", "Memory", "Codec", "How lossy tensors are stored.", menu=CODECS)
    codec_params: str = _option(
        "",
        "Memory",
        "Codec parameters",
        "As key=value,key=value; empty: the defaults. "
        + "; ".join(f"{codec}: {', '.join(params)}" for codec, params in CODEC_PARAMS.items() if params)
        + ".",
    )

    device: str = _option("cpu", "Machine", "Device", "Where the run computes.", menu=DEVICES)
    num_threads: int = _option(
        0, "Machine", "Threads", "CPU threads; 0: the cores divided by the slots.", low=0, high=1024
    )

    def __post_init__(self) -> None:
        problems = {}
        for entry in fields(self):
            object.__setattr__(self, entry.name, as_plain(getattr(self, entry.name)))
            sentence = _problem(entry.name, entry.type, getattr(self, entry.name), entry.metadata)
            if sentence:
                problems[entry.name] = sentence
        if "dataset" not in problems and "dataset_path" not in problems:
            if self.dataset == "image_folder" and not self.dataset_path:
                problems["dataset_path"] = "dataset_path is empty, but image_folder needs a folder or a .zip of images."
            elif self.dataset != "image_folder" and self.dataset_path:
                problems["dataset_path"] = (
                    f"dataset_path is {self.dataset_path!r}, but only image_folder reads a path; "
                    f"leave it empty or choose dataset=image_folder (now {self.dataset})."
                )
        if "codec" not in problems and "codec_params" not in problems:
            try:
                parse_codec_params(self.codec, self.codec_params)
            except ValueError as error:
                problems["codec_params"] = f"codec_params: {error}"
        if "layer_bounds" not in problems:
            try:
                parse_layer_bounds(self.layer_bounds)
            except ValueError as error:
                problems["layer_bounds"] = f"layer_bounds: {error}"
        if problems:
            raise ConfigError(problems)

    @property
    def title(self) -> str:
        """The run's name, or one made from what is trained and how."""
        return self.name or f"{self.model} {self.dataset} {self.policy}"

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    def to_json(self) -> str:
        return json.dumps(self.to_dict(), sort_keys=True)


def _problem(name: str, kind: Any, value: Any, metadata: Mapping[str, Any]) -> str:
    """A sentence about one field's value, or an empty string where it is fine."""
    menu = metadata["menu"]
    if menu is not None:
        known = isinstance(value, str) and value in menu
        return "" if known else f"{name} is {shown(value)}; allowed: {', '.join(menu)}."
    if kind is str:
        return (
            ""
            if isinstance(value, str) and len(value) <= 4096
            else f"{name} must be a text of at most 4,096 characters."
        )
    if kind is bool:
        return "" if isinstance(value, bool) else f"{name} is {shown(value)}; allowed: true, false."
    low, high = metadata["low"], metadata["high"]
    number = isinstance(value, int if kind is int else (int, float)) and not isinstance(value, bool)
    fits = number and low <= value <= high and not (metadata["open_low"] and value == low)
    if fits:
        return ""
    what = "a whole number" if kind is int else "a number"
    above = f"above {low:,g}" if metadata["open_low"] else f"from {low:,g}"
    unit = f" {metadata['unit']}" if metadata["unit"] else ""
    return f"{name} is {shown(value)}; allowed: {what} {above} to {high:,g}{unit}."


def as_plain(value: Any) -> Any:
    """A single number of numpy or torch as Python's own, which JSON can hold; everything else as it is."""
    return value.item() if getattr(value, "ndim", None) == 0 else value


def shown(value: Any) -> str:
    """A value in a sentence; long ones lose their middle."""
    try:
        text = repr(value)
    except ValueError:  # Python writes out no number of more than 4,300 digits
        return "a number of thousands of digits"
    return text if len(text) <= 80 else f"{text[:40]}...{text[-20:]}"


def check_codec_params(codec: str, params: Mapping[str, Any]) -> dict[str, Any]:
    """The parameters of a codec of CODEC_PARAMS, as Python's own values; 0 and 1 stand for False and True.

    Raises ValueError with a sentence for an unknown one and for a value of another type or range.
    """
    if not isinstance(params, Mapping):
        raise ValueError(f"codec_params is {shown(params)}; allowed: a dict, such as {{'dither': True}}.")
    known, checked = CODEC_PARAMS[codec], {}
    for name, given in params.items():
        if name not in known:
            raise ValueError(
                f"{shown(name)} is no parameter of codec {codec!r}; allowed: {', '.join(known) or 'none, it has none'}."
            )
        allowed, value = known[name], as_plain(given)
        kind = type(allowed[0])
        if kind is bool and type(value) is int and value in (0, 1):
            value = bool(value)
        if type(value) is not kind or value not in allowed:
            texts = (
                [f"a whole number from {allowed[0]} to {allowed[-1]}"]
                if isinstance(allowed, range)
                else map(str, allowed)
            )
            raise ValueError(f"{name} is {shown(given)}; allowed: {', '.join(texts)}.")
        checked[name] = value
    return checked


def parse_codec_params(codec: str, text: str) -> dict[str, Any]:
    """The parameters that "key=value,key=value" gives a codec of CODEC_PARAMS; an empty text gives none.

    Raises ValueError with a sentence as `check_codec_params` does, and for another form or a key given twice.
    """
    params: dict[str, Any] = {}
    for setting in filter(None, text.split(",")):
        key, equals, raw = (part.strip() for part in setting.partition("="))
        if not equals:
            raise ValueError(f"{shown(setting)} has no value; write key=value,key=value.")
        if key in params:
            raise ValueError(f"{key} is given twice; write it once.")
        kind = type(CODEC_PARAMS[codec].get(key, ("",))[0])
        params[key] = {"true": True, "false": False}.get(raw.lower(), raw) if kind is bool else raw
        if kind is not str and re.fullmatch("-?[0-9]{1,20}", raw):
            params[key] = int(raw)
    return check_codec_params(codec, params)


def check_layer_bounds(bounds: Mapping[str, Any]) -> dict[str, float | None]:
    """Pattern -> absolute bound, None for "exact". Raises ValueError with a sentence for anything else."""
    if not isinstance(bounds, Mapping):
        raise ValueError(f"layer_bounds is {shown(bounds)}; allowed: a dict, such as {{'layer1.*': 1e-3}}.")
    checked: dict[str, float | None] = {}
    for pattern, given in bounds.items():
        value = as_plain(given)
        if not isinstance(pattern, str) or not pattern:
            raise ValueError(f"{shown(pattern)} is no pattern of layer names; give a text such as 'layer1.*'.")
        number = isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value <= 1e6
        if not number and value != "exact":
            raise ValueError(f"{pattern} is {shown(value)}; allowed: a number from 0 to 1e6, or exact.")
        checked[pattern] = None if value == "exact" else float(value)
    return checked


def parse_layer_bounds(text: str) -> dict[str, float | str]:
    """The bounds that "pattern=bound,pattern=exact" gives; an empty text gives none. Raises ValueError as above."""
    bounds: dict[str, Any] = {}
    for setting in filter(None, text.split(",")):
        pattern, equals, raw = (part.strip() for part in setting.partition("="))
        if not equals:
            raise ValueError(f"{shown(setting)} has no bound; write pattern=bound,pattern=exact.")
        if pattern in bounds:
            raise ValueError(f"{pattern} is given twice; write it once.")
        try:
            bounds[pattern] = float(raw)
        except ValueError:
            bounds[pattern] = raw
    check_layer_bounds(bounds)
    return bounds


FIELDS = {entry.name: entry for entry in fields(RunConfig)}


def config_from_dict(values: Mapping[str, Any]) -> RunConfig:
    """Build a RunConfig; unknown keys are errors (ConfigError), whole numbers are taken for floats."""
    unknown = {key: f"{key} is not an option; allowed: {', '.join(FIELDS)}." for key in values if key not in FIELDS}
    if unknown:
        raise ConfigError(unknown)
    given: dict[str, Any] = {
        key: float(value) if FIELDS[key].type is float and type(value) is int else value
        for key, value in values.items()
    }
    return RunConfig(**given)


def config_from_json(text: str) -> RunConfig:
    return config_from_dict(json.loads(text))


def parse_settings(settings: list[str]) -> dict[str, Any]:
    """Turn `key=value` texts from a command line into typed values; of one given twice the last counts.

    Raises ConfigError naming each bad one.
    """
    values: dict[str, Any] = {}
    problems = {}
    for text in settings:
        key, equals, raw = text.partition("=")
        if not equals or key not in FIELDS:
            problems[key] = f"{shown(text)} is not an option; write key=value with a key of: {', '.join(FIELDS)}."
            continue
        kind = FIELDS[key].type
        try:
            values[key] = {"true": True, "false": False}[raw.lower()] if kind is bool else kind(raw)  # type: ignore[operator]
        except (ValueError, KeyError):
            wanted = {int: "a whole number", float: "a number", bool: "true or false"}[kind]  # type: ignore[index]
            problems[key] = f"{key} is {shown(raw)}; allowed: {wanted}."
    if problems:
        raise ConfigError(problems)
    return values


def unread(values: Mapping[str, Any]) -> dict[str, str]:
    """Options that a run of these values does not read -> because of which of the others. All fields have to be given.

    The form hides them; a twin without compression carries them along unread.
    """
    lossy_only = {
        "controller": "", "collect_every": "", "layer_bounds": "", "noise_budget": "noise", "norm_budget": "noise",
        "momentum_fraction": "momentum", "error_bound": "fixed", "memory_bytes": "memory",
    }  # fmt: skip
    found = {}
    if values["dataset"] != "image_folder":
        found["dataset_path"] = f"dataset={values['dataset']}"
    if values["dataset"] not in ("image_folder", "digits"):
        found["test_fraction"] = f"dataset={values['dataset']}"
    if values["optimizer"] != "sgd":
        found["momentum"] = f"optimizer={values['optimizer']}"
    if values["policy"] != "compress":
        found |= dict.fromkeys(["codec", "codec_params", *lossy_only], f"policy={values['policy']}")
        return found
    if not CODEC_PARAMS.get(values["codec"]):
        found["codec_params"] = f"codec={values['codec']}"
    if values["codec"] != "error_bounded":
        return found | dict.fromkeys(lossy_only, f"codec={values['codec']}")
    other = {name for name, controller in lossy_only.items() if controller not in ("", values["controller"])}
    return found | dict.fromkeys(other, f"controller={values['controller']}")


# name -> (what it shows, the values that differ from the defaults)
PRESETS: dict[str, tuple[str, dict[str, Any]]] = {
    "quick": ("ResNet-20 on handwritten digits, a minute on a laptop", {"epochs": 2, "batch_size": 64}),
    "fashion": (
        "ResNet-20 on 70,000 images of clothing, one epoch",
        {"dataset": "fashion_mnist", "batch_size": 128},
    ),
    "images": (
        "ResNet-20 on your own images, three epochs with crop and flip",
        {"dataset": "image_folder", "epochs": 3, "learning_rate": 0.2},
    ),
}


def preset_values(name: str) -> dict[str, Any]:
    """The values of a preset that differ from the defaults. Raises ConfigError for an unknown name."""
    if name not in PRESETS:
        raise ConfigError({"preset": f"preset is {name!r}; allowed: {', '.join(PRESETS)}."})
    return dict(PRESETS[name][1])


def comet_home() -> Path:
    """Absolute folder for database, uploads, checkpoints and logs: COMET_HOME, else `var/` in the project."""
    given = os.environ.get("COMET_HOME")
    return Path(given).expanduser().resolve() if given else Path(__file__).resolve().parent.parent / "var"
