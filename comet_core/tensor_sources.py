"""Tensors to try codecs on: read from a file, or captured from a network in training.

Files are .npy and .safetensors only, because neither can run code when it is read; pickles are refused. A file is
checked by its header before memory is taken for its values. A capture trains a network for some iterations and keeps
what its convolutions and batch norms read in the next one, each with the bound that COMET's momentum rule gives it
(THEORY sections 1 and 4), so that bounds on different layers mean the same to the gradient.
"""

import math
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import safetensors
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from comet_core.codecs.base import ErrorBound
from comet_core.config import RunConfig, config_from_dict, shown
from comet_core.datasets import load_dataset
from comet_core.models import MODELS, build_model

LARGEST_TENSOR_BYTES = 1 << 30
_ALLOWED = f"allowed: 1 value to {LARGEST_TENSOR_BYTES >> 30} GiB of float16, bfloat16, float32 or float64"
_NPY_FLOATS = (np.float16, np.float32, np.float64)
# By version of the format; a third exists for names of columns, which no tensor has. Neither can read objects.
_NPY_HEADERS = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}
_SAFETENSORS_FLOATS = {"F16": 2, "BF16": 2, "F32": 4, "F64": 8}  # name of the dtype -> bytes a value
MOMENTUM_FRACTION = 0.01
NORM_STD_FRACTION = 0.1
CAPTURE_READS = (
    "dataset", "dataset_path", "test_fraction", "image_size", "augment", "model", "max_steps_per_epoch", "batch_size",
    "learning_rate", "momentum", "weight_decay", "seed",
)  # fmt: skip
"""Options of a RunConfig that decide what `capture` gives."""
DEFAULT_BOUNDS = {
    "rule": (1.0, 2.0, 4.0, 8.0, 13.0, 26.0),
    "range_rel": (1e-4, 3e-4, 1e-3, 3e-3, 1e-2, 3e-2),
    "pw_rel": (1e-3, 3e-3, 1e-2, 3e-2, 1e-1),
    "abs": (1e-4, 1e-3, 1e-2, 1e-1),
}
_LISTED = 12  # names in an error


@dataclass(frozen=True, kw_only=True)
class Sample:
    """A float tensor of any shape and, where it was captured, what the rule allows it."""

    name: str
    """File and tensor, or path of the layer in its network."""
    tensor: Tensor
    operator: str = ""
    """Of a captured one: "conv2d" or "batch_norm"."""
    rule_bound: ErrorBound | None = None
    """Of a captured one: absolute; for a batch norm one entry a channel."""
    sign_exact: bool = False
    """Whether a ReLU's backward may read it too: a convolution's input without negative values."""


def read_tensor(text: str) -> Sample:
    """The tensor in FILE.npy, FILE.safetensors or FILE.safetensors:NAME, copied into memory, on the CPU.

    Raises ValueError with a sentence for a file that is missing, broken, of another format or holds no float tensor of
    up to LARGEST_TENSOR_BYTES bytes, and where the name is needed or unknown.
    """
    try:
        path, name = _file_and_name(text)
        if path.suffix.lower() == ".npy" and not name:
            return Sample(name=path.name, tensor=_read_npy(path))
        if path.suffix.lower() == ".safetensors":
            return _read_safetensors(path, name)
    except OSError as error:
        raise ValueError(
            f"the tensor file {shown(text)} cannot be read ({error.strerror or error}); allow it, or copy the file."
        ) from error
    raise ValueError(f"the tensor file is {shown(text)}; allowed: FILE.npy, FILE.safetensors or FILE.safetensors:NAME.")


def _file_and_name(text: str) -> tuple[Path, str]:
    """Names of files and of tensors may have colons in them: the longest part that is a file is the file."""
    for end in (len(text), *(match.start() for match in reversed(list(re.finditer(":", text))))):
        if Path(text[:end]).is_file():
            return Path(text[:end]), text[end + 1 :]
    path = Path(text)
    problem = (
        "an empty name" if not text
        else "a folder" if path.is_dir()
        else "neither a file nor a folder" if path.exists()
        else "which does not exist"
    )  # fmt: skip
    raise ValueError(f"the tensor file is {shown(text)}, {problem}; give a .npy or .safetensors file.")


def _read_npy(path: Path) -> Tensor:
    broken = f"{path.name} is no whole .npy file of numbers ({{}}); write it with numpy.save."
    with path.open("rb") as file:
        try:
            read_header = _NPY_HEADERS[np.lib.format.read_magic(file)]
            shape, fortran_order, dtype = read_header(file)
        except (
            Exception
        ) as error:  # a header is a Python literal, so that a wrong one fails in any of its parsers' ways
            raise ValueError(broken.format(error)) from error
        num_values, native = math.prod(shape), dtype.newbyteorder("=")
        allowed = native in _NPY_FLOATS and 0 < num_values * dtype.itemsize <= LARGEST_TENSOR_BYTES
        if not allowed or min(shape, default=1) < 0:
            raise ValueError(f"{path.name} holds {dtype} of shape {shape}; {_ALLOWED}.")
        values = np.fromfile(file, dtype, num_values)
    if values.size < num_values:
        raise ValueError(broken.format(f"{values.size:,} of {num_values:,} values"))
    shaped = values.astype(native, copy=False).reshape(shape, order="F" if fortran_order else "C")
    return torch.from_numpy(shaped)


def _read_safetensors(path: Path, name: str) -> Sample:
    try:
        with safetensors.safe_open(path, framework="pt") as file:
            names = sorted(file.keys())
            if not names:
                raise ValueError(f"{path.name} holds no tensor; write one into it with safetensors' save_file.")
            if (not name and len(names) > 1) or (name and name not in names):
                listed = ", ".join(names[:_LISTED]) + (f" and {len(names) - _LISTED} more" if names[_LISTED:] else "")
                raise ValueError(
                    f"{path.name} holds {listed}, asked for was {name or 'none by name'}; "
                    f"write {path.name}:NAME with one of them."
                )
            name = name or names[0]
            found = file.get_slice(name)
            shape, dtype = found.get_shape(), found.get_dtype()
            num_bytes = math.prod(shape) * _SAFETENSORS_FLOATS.get(dtype, 0)
            if not 0 < num_bytes <= LARGEST_TENSOR_BYTES:
                raise ValueError(f"{name!r} in {path.name} is {dtype} of shape {tuple(shape)}; {_ALLOWED}.")
            return Sample(name=f"{path.name}:{name}", tensor=file.get_tensor(name))
    except safetensors.SafetensorError as error:
        raise ValueError(
            f"{path.name} is no whole .safetensors file ({error}); write it with safetensors' save_file."
        ) from error


def tensor_facts(x: Tensor) -> dict[str, Any]:
    """Shape, dtype and what the values are like, for whoever reads the figures. Statistics are of finite values."""
    values = x[x.isfinite()].double()
    any_finite = values.numel() > 0
    return {
        "shape": list(x.shape),
        "dtype": str(x.dtype).removeprefix("torch."),
        "num_values": x.numel(),
        "original_bytes": x.nbytes,
        "min": float(values.min()) if any_finite else None,
        "max": float(values.max()) if any_finite else None,
        "mean": float(values.mean()) if any_finite else None,
        "std": float(values.std(correction=0)) if any_finite else None,
        "zero_fraction": float((x == 0).double().mean()),
        "num_nonfinite": x.numel() - values.numel(),
    }


def layers_of(model: nn.Module) -> dict[str, str]:
    """Layers that `capture` can keep, path in the model -> operator, in the model's order."""
    kinds = {nn.Conv2d: "conv2d", nn.BatchNorm2d: "batch_norm"}
    return {
        name: operator
        for name, module in model.named_modules()
        for kind, operator in kinds.items()
        if isinstance(module, kind)
    }


def layers_by_name(model: str) -> dict[str, str]:
    """The same for a network of the menu. Raises ValueError for an unknown one."""
    return layers_of(build_model(model, 10, 3, max(32, MODELS[model].smallest_image if model in MODELS else 0)))


def capture(
    config: RunConfig,
    num_steps: int,
    layers: Collection[str] = (),
    *,
    should_stop: Callable[[], bool] = lambda: False,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> list[Sample]:
    """Train plainly for `num_steps` iterations, then keep the float32 inputs of `layers` (none named: of all).

    Network, data, batch, seed and the optimizer's numbers come from `config`, at a constant learning rate. `progress`
    gets (iterations done, in all). The list is empty where `should_stop` asked for that. Raises ValueError for layers
    that the network does not have, a momentum of 0, and data that cannot be trained on; RuntimeError where the loss
    stops being finite.

    Bounds: of a convolution, sigma * sqrt(3 C_out / (R sum d^2)) with sigma 1 % of the mean magnitude of its momentum
    buffer (THEORY 1 and 4), 0 where that is undefined; of a batch norm, 0.1 standard deviations of each channel.
    """
    if not config.momentum > 0 or num_steps < 1:
        raise ValueError(
            f"momentum is {config.momentum:g} and the number of steps {num_steps}; the rule reads momentum, so both "
            "have to be above 0."
        )
    known = layers_by_name(config.model)
    unknown = [name for name in layers if name not in known]
    if unknown:
        raise ValueError(f"layer is {unknown[0]!r}; allowed for {config.model}: {', '.join(known)}.")
    data = load_dataset(config)
    torch.manual_seed(config.seed)
    model = build_model(config.model, data.num_classes, data.num_channels, data.image_size)
    optimizer = torch.optim.SGD(
        model.parameters(), lr=config.learning_rate, momentum=config.momentum, weight_decay=config.weight_decay
    )
    step, epoch = 0, 1
    while True:
        for images, labels in data.train_batches(epoch):
            progress(step, num_steps + 1)
            if should_stop():
                return []
            optimizer.zero_grad(set_to_none=True)
            if step == num_steps:
                samples = _samples(model, optimizer, images, labels, layers or known)
                progress(num_steps + 1, num_steps + 1)
                return samples
            loss = F.cross_entropy(model(images), labels)
            loss.backward()
            optimizer.step()
            step += 1
            if not math.isfinite(loss.item()):
                raise RuntimeError(f"the loss became {loss.item()} at step {step}; lower learning_rate.")
        epoch += 1


def capture_config(model: str, settings: Mapping[str, Any]) -> RunConfig:
    """What the command captures from: digits, scaled to 32 pixels or what the network needs; `settings` change that.

    Raises ValueError for settings that a capture does not read, and for what RunConfig refuses.
    """
    unread = [key for key in settings if key not in CAPTURE_READS or key == "model"]
    if unread:
        allowed = ", ".join(key for key in CAPTURE_READS if key != "model")
        raise ValueError(
            f"{unread[0]} does not change what is captured; allowed: {allowed}. The network is --model's, the learning "
            "rate stays as it is, and --threads are those of the measurement too."
        )
    smallest = MODELS[model].smallest_image if model in MODELS else 0
    return config_from_dict({"image_size": max(32, smallest), "schedule": "constant", **settings, "model": model})


def captured(
    config: RunConfig,
    layer: str | None,
    num_steps: int,
    should_stop: Callable[[], bool],
    progress: Callable[[int, int, str], None],
) -> Sample | None:
    """One layer's input. None takes the convolution in the middle. None where it was stopped. Raises as `capture`."""
    known = layers_by_name(config.model)
    convolutions = [name for name, operator in known.items() if operator == "conv2d"]
    chosen = convolutions[len(convolutions) // 2] if layer is None else layer
    samples = capture(
        config, num_steps, [chosen], should_stop=should_stop,
        progress=lambda done, total: progress(done, total, f"training {config.model}"),
    )  # fmt: skip
    return samples[0] if samples else None


def bounds_of(
    sample: Sample, kind: str | None = None, numbers: Sequence[float] | None = None, channel_dim: int | None = None
) -> tuple[str, dict[float, ErrorBound]]:
    """The kind that the bounds count in ("rule" where None is given and the sample has one, else "range_rel"), and the
    bound behind each number, in rising order.

    0 asks for lossless storage and infinity for any finite values, also where the rule or the range is 0. Raises
    ValueError where the rule is asked of a tensor that was not captured, a channel of one that was, and for numbers
    that are no bound or are given twice.
    """
    kind = kind or ("rule" if sample.rule_bound else "range_rel")
    numbers = sorted(float(number) for number in numbers or DEFAULT_BOUNDS[kind])
    for place, number in enumerate(numbers):
        if not number >= 0:
            raise ValueError(f"one of the bounds is {number:g}; allowed: numbers from 0 (lossless) to inf.")
        if number in numbers[:place]:
            raise ValueError(f"the bound {number:g} is given twice; write it once.")
    rule = sample.rule_bound
    if kind == "rule":
        if rule is None or channel_dim is not None:
            raise ValueError(
                "the momentum rule gives bounds to captured tensors alone, and chooses their channels; give kind "
                "range_rel, pw_rel or abs for a file, and no channel_dim for a captured tensor."
            )
        value = torch.as_tensor(rule.value, dtype=torch.float64)
        scaled = {number: torch.where(value > 0, value * number, 0) for number in numbers}
        values = {number: one if one.ndim else one.item() for number, one in scaled.items()}
        return kind, {number: ErrorBound("abs", one, rule.channel_dim) for number, one in values.items()}
    return kind, {number: ErrorBound(kind, number, channel_dim) for number in numbers}  # type: ignore[arg-type]


def _samples(
    model: nn.Module, optimizer: torch.optim.SGD, images: Tensor, labels: Tensor, layers: Collection[str]
) -> list[Sample]:
    inputs: dict[str, Tensor] = {}
    energy: dict[str, float] = {}  # sum d^2 of a convolution

    def watch(name: str, module: nn.Module) -> list[Any]:
        def keep(_: nn.Module, given: tuple[Tensor, ...]) -> None:
            inputs[name] = given[0].detach().clone(memory_format=torch.contiguous_format)  # before an in-place ReLU

        def listen(_: nn.Module, __: Any, output: Tensor) -> None:
            output.register_hook(lambda grad: energy.update({name: float(grad.double().square().sum())}))

        return [module.register_forward_pre_hook(keep), module.register_forward_hook(listen)]

    handles = [handle for name in layers for handle in watch(name, model.get_submodule(name))]
    try:
        F.cross_entropy(model(images), labels).backward()
    finally:
        for handle in handles:
            handle.remove()
    return [_sample(name, model.get_submodule(name), inputs.pop(name), energy[name], optimizer) for name in layers]


def _sample(name: str, module: nn.Module, x: Tensor, energy: float, optimizer: torch.optim.SGD) -> Sample:
    if not isinstance(module, nn.Conv2d):
        std = NORM_STD_FRACTION * x.double().std((0, 2, 3)).nan_to_num()
        bound = ErrorBound("abs", std, channel_dim=1)
        return Sample(name=name, tensor=x, operator="batch_norm", rule_bound=bound)
    sigma = MOMENTUM_FRACTION * float(optimizer.state[module.weight]["momentum_buffer"].abs().mean())
    heard = energy * float((x != 0).double().mean())  # R * sum d^2
    bound = ErrorBound("abs", sigma * math.sqrt(3 * module.out_channels / heard) if heard > 0 else 0.0)
    return Sample(name=name, tensor=x, operator="conv2d", rule_bound=bound, sign_exact=bool((x >= 0).all()))
