"""Tensors from files and from networks: read whole or refused with a sentence, captured as backward would see them."""

import io
import math
import os
import pickle
import struct

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from comet_core import tensor_sources
from comet_core.codecs.base import ErrorBound
from comet_core.config import RunConfig
from comet_core.tensor_sources import CAPTURE_READS, Sample, bounds_of, capture, capture_config, read_tensor

SMALL = dict(dataset="digits", model="resnet20", batch_size=16, schedule="constant")


@pytest.mark.parametrize("dtype", ["<f4", ">f4", "<f2", "<f8"])
@pytest.mark.parametrize("order", ["C", "F"])
def test_a_npy_file_comes_back_value_by_value(tmp_path, dtype, order):
    values = np.asarray(np.arange(24).reshape(2, 3, 4), dtype=dtype, order=order)
    np.save(tmp_path / "x.npy", values)
    found = read_tensor(str(tmp_path / "x.npy"))
    assert found.name == "x.npy" and found.rule_bound is None
    assert np.array_equal(found.tensor.numpy(), values)
    found.tensor[0] = -1  # the file is copied, not mapped
    assert np.array_equal(np.load(tmp_path / "x.npy"), values)


def test_a_tensor_of_a_safetensors_file_is_found_by_name(tmp_path):
    save_file({"a": torch.ones(2, 3), "b:c": torch.zeros(4, dtype=torch.bfloat16)}, tmp_path / "x.safetensors")
    assert read_tensor(f"{tmp_path}/x.safetensors:a").tensor.tolist() == [[1.0] * 3] * 2
    save_file({"only": torch.ones(5)}, tmp_path / "one.SafeTensors")
    assert read_tensor(f"{tmp_path}/one.SafeTensors").name == "one.SafeTensors:only"
    for text in ("x.safetensors", "x.safetensors:d"):
        with pytest.raises(ValueError, match=r"holds a, b:c, asked for was (none by name|d); write"):
            read_tensor(f"{tmp_path}/{text}")


def test_names_of_files_and_tensors_may_have_colons_in_them(tmp_path):
    save_file({"a": torch.ones(2), "b:c": torch.zeros(4)}, tmp_path / "x:y.safetensors")
    assert read_tensor(f"{tmp_path}/x:y.safetensors:b:c").name == "x:y.safetensors:b:c"
    np.save(tmp_path / "x:y.npy", np.ones(3))
    assert read_tensor(f"{tmp_path}/x:y.npy").tensor.tolist() == [1, 1, 1]


def npy_with_header(header: str) -> bytes:
    return b"\x93NUMPY\x01\x00" + struct.pack("<H", len(header)) + header.encode()


class Bomb:
    def __reduce__(self):
        return (exec, ("raise SystemExit('a pickle was run')",))


def pickled_npy() -> bytes:
    data = io.BytesIO()
    np.save(data, np.array([Bomb()], dtype=object), allow_pickle=True)
    return data.getvalue()


def zipped_npy() -> bytes:
    data = io.BytesIO()
    np.savez(data, x=np.ones(3))
    return data.getvalue()


NPY = "{'descr': '<f4', 'fortran_order': False, 'shape': %s, }"


@pytest.mark.parametrize(
    "content",
    [
        b"", b"no file of numbers", pickle.dumps(Bomb()), pickled_npy(), zipped_npy(), npy_with_header("{'descr': 1"),
        npy_with_header(NPY % "(1000,)"), npy_with_header(NPY % "(-5,)"), npy_with_header(NPY % f"({2**62}, 4)"),
        npy_with_header("__import__('os').system('true')"),
    ],
)  # fmt: skip
def test_what_is_no_whole_npy_file_is_refused_and_nothing_is_run(tmp_path, content):
    (tmp_path / "x.npy").write_bytes(content)
    with pytest.raises(ValueError, match=r"^x\.npy (is no whole \.npy file of numbers|holds)"):
        read_tensor(str(tmp_path / "x.npy"))


@pytest.mark.parametrize(
    "values", [np.arange(4), np.ones(2, dtype=bool), np.ones(2, dtype=np.complex64), np.ones((0, 3)), np.array("text")]
)
def test_a_npy_file_without_floats_says_what_is_allowed(tmp_path, values):
    np.save(tmp_path / "x.npy", values)
    with pytest.raises(ValueError, match=r"allowed: 1 value to 1 GiB of float16"):
        read_tensor(str(tmp_path / "x.npy"))


def test_a_tensor_that_is_too_large_is_refused_by_its_header(tmp_path, monkeypatch):
    monkeypatch.setattr(tensor_sources, "LARGEST_TENSOR_BYTES", 399)
    np.save(tmp_path / "x.npy", np.ones(100, dtype=np.float32))
    save_file({"a": torch.ones(100)}, tmp_path / "x.safetensors")
    for name in ("x.npy", "x.safetensors"):
        with pytest.raises(ValueError, match=r"\(100,\)"):
            read_tensor(str(tmp_path / name))


def test_a_broken_safetensors_file_and_one_of_whole_numbers_are_refused(tmp_path):
    path = tmp_path / "x.safetensors"
    for content in (b"", b"\xff" * 100, struct.pack("<Q", 10) + b"{}"):
        path.write_bytes(content)
        with pytest.raises(ValueError, match=r"is no whole \.safetensors file"):
            read_tensor(str(path))
    save_file({"a": torch.ones(3, dtype=torch.int32)}, path)
    with pytest.raises(ValueError, match=r"'a' in x.safetensors is I32 of shape \(3,\); allowed"):
        read_tensor(str(path))


@pytest.mark.parametrize("text", ["nothing.npy", "nothing.safetensors:a", ":"])
def test_a_missing_file_is_named(text):
    with pytest.raises(ValueError, match=r"the tensor file is '.*', which does not exist"):
        read_tensor(text)


def test_what_is_no_file_is_called_what_it_is(tmp_path):
    os.mkfifo(tmp_path / "fifo.npy")
    for text, words in (
        ("", "is '', an empty name"),
        (str(tmp_path), "', a folder; give"),
        (f"{tmp_path}/fifo.npy", "neither a file nor a folder"),
        ("x" * 5000, "cannot be read"),
    ):
        with pytest.raises(ValueError, match=words):
            read_tensor(text)


def test_a_safetensors_file_without_tensors_says_so(tmp_path):
    save_file({}, tmp_path / "x.safetensors")
    for text in ("x.safetensors", "x.safetensors:a"):
        with pytest.raises(ValueError, match=r"^x\.safetensors holds no tensor; write one"):
            read_tensor(f"{tmp_path}/{text}")


def test_another_kind_of_file_says_which_are_allowed(tmp_path):
    (tmp_path / "x.pt").write_bytes(b"")
    with pytest.raises(ValueError, match=r"allowed: FILE.npy, FILE.safetensors or FILE.safetensors:NAME"):
        read_tensor(str(tmp_path / "x.pt"))


def test_a_capture_has_the_inputs_and_the_bounds_of_the_rule():
    layers = ["conv", "stage1.0.bn1", "stage1.1.conv1"]
    told = []
    samples = capture(RunConfig(**SMALL), 2, layers, progress=lambda *entry: told.append(entry))
    assert [sample.name for sample in samples] == layers
    assert [sample.operator for sample in samples] == ["conv2d", "batch_norm", "conv2d"]
    assert [sample.sign_exact for sample in samples] == [False, False, True]  # images are normalised
    assert told == [(0, 3), (1, 3), (2, 3), (3, 3)]
    norm = samples[1]
    assert norm.rule_bound.channel_dim == 1
    assert torch.allclose(norm.rule_bound.value, 0.1 * norm.tensor.double().std((0, 2, 3)))
    again = capture(RunConfig(**SMALL), 2, layers)
    assert all(torch.equal(a.tensor, b.tensor) for a, b in zip(samples, again, strict=True))


def test_noise_within_the_bound_moves_the_weight_gradient_by_the_share_of_momentum(monkeypatch):
    """The rule's own claim (THEORY 1): uniform noise of the bound gives the gradient an error of sigma."""
    kept = {}
    sample_of = tensor_sources._sample

    def spy(name, module, x, energy, optimizer):
        kept["momentum"] = float(optimizer.state[module.weight]["momentum_buffer"].abs().mean())
        kept["module"] = module
        return sample_of(name, module, x, energy, optimizer)

    output_gradient = []
    monkeypatch.setattr(tensor_sources, "_sample", spy)
    full = torch.nn.Module.register_forward_hook

    def listen(module, hook, **options):
        def both(module, given, output):
            output.register_hook(lambda grad: output_gradient.append(grad.clone()))
            return hook(module, given, output)

        return full(module, both, **options)

    monkeypatch.setattr(torch.nn.Module, "register_forward_hook", listen)
    (sample,) = capture(RunConfig(**SMALL, image_size=16), 3, ["stage1.0.conv1"])
    x, bound, module = sample.tensor, sample.rule_bound.value, kept["module"]
    noise = (2 * torch.rand(x.shape, generator=torch.Generator().manual_seed(0)) - 1) * bound * (x != 0)
    error = torch.nn.grad.conv2d_weight(noise, module.weight.shape, output_gradient[-1], padding=module.padding)
    assert float(error.std()) == pytest.approx(0.01 * kept["momentum"], rel=0.15)


def test_a_stopped_capture_gives_nothing():
    assert capture(RunConfig(**SMALL), 2, should_stop=lambda: True) == []


@pytest.mark.parametrize(
    ("change", "layers", "sentence"),
    [
        ({"momentum": 0.0}, [], "momentum is 0 and the number of steps 1"),
        ({}, ["stage9"], "layer is 'stage9'; allowed for resnet20: conv, bn, stage1.0.conv1"),
        ({"batch_size": 5000}, [], "batch_size is 5,000"),
    ],
)
def test_a_capture_that_cannot_be_made_is_refused_with_a_sentence(change, layers, sentence):
    with pytest.raises(ValueError, match=sentence):
        capture(RunConfig(**{**SMALL, **change}), 1, layers)


def test_the_rules_bounds_are_multiples_and_files_have_other_kinds():
    x = torch.ones(2, 3)
    rule = Sample(name="a", tensor=x, rule_bound=ErrorBound("abs", torch.tensor([1.0, 2.0, 3.0]), channel_dim=1))
    kind, bounds = bounds_of(rule, numbers=[4, 1])
    assert kind == "rule" and list(bounds) == [1.0, 4.0] and bounds[4.0].value.tolist() == [4, 8, 12]
    file = Sample(name="a", tensor=x)
    kind, bounds = bounds_of(file, channel_dim=-1)
    assert kind == "range_rel" and all(bound.channel_dim == -1 for bound in bounds.values())
    for kind in ("abs", "range_rel", "pw_rel"):
        assert {bound.kind for bound in bounds_of(file, kind)[1].values()} == {kind}
    for sample, options, sentence in (
        (file, {"kind": "rule"}, "gives bounds to captured tensors alone"),
        (rule, {"channel_dim": 1}, "no channel_dim for a captured tensor"),
        (file, {"numbers": [0.1, math.nan]}, "one of the bounds is nan; allowed: numbers from 0"),
        (file, {"numbers": [-1.0]}, "one of the bounds is -1"),
        (file, {"numbers": [0.1, 2, 1e-1]}, r"the bound 0\.1 is given twice"),
    ):
        with pytest.raises(ValueError, match=sentence):
            bounds_of(sample, **options)


def test_the_rule_times_nothing_and_times_infinity_are_bounds_too():
    x = torch.ones(2, 2)
    norm = Sample(name="a", tensor=x, rule_bound=ErrorBound("abs", torch.tensor([0.0, 2.0]), channel_dim=1))
    nothing, anything = bounds_of(norm, numbers=[0, math.inf])[1].values()
    assert (nothing.value.tolist(), anything.value.tolist()) == ([0, 0], [0, math.inf])
    still = Sample(name="a", tensor=x, rule_bound=ErrorBound("abs", 0.0))
    assert [bound.value for bound in bounds_of(still, numbers=[0, math.inf])[1].values()] == [0, 0]


def test_settings_that_a_capture_does_not_read_are_refused():
    for key in ("policy", "epochs", "schedule", "num_threads", "model"):
        with pytest.raises(ValueError, match=f"{key} does not change what is captured; allowed: dataset"):
            capture_config("resnet20", {key: 1})
    given = capture_config("alexnet", {"seed": 3})
    assert (given.seed, given.image_size, given.dataset, given.schedule) == (3, 64, "digits", "constant")


def test_the_settings_of_a_capture_are_all_that_decides_it():
    given = RunConfig(**{**SMALL, "seed": 2, "learning_rate": 0.05, "augment": False, "max_steps_per_epoch": 1})
    same = RunConfig(**{name: getattr(given, name) for name in CAPTURE_READS})
    (one,), (other,) = (capture(config, 2, ["conv"]) for config in (given, same))
    assert torch.equal(one.tensor, other.tensor) and one.rule_bound == other.rule_bound


def test_facts_are_of_the_finite_values():
    facts = tensor_sources.tensor_facts(torch.tensor([1.0, -1.0, 0.0, 0.0, math.nan, math.inf]))
    assert (facts["min"], facts["max"], facts["mean"], facts["num_nonfinite"]) == (-1, 1, 0, 2)
    assert facts["zero_fraction"] == pytest.approx(1 / 3) and facts["original_bytes"] == 24
    assert tensor_sources.tensor_facts(torch.tensor([math.nan]))["mean"] is None
