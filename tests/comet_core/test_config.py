"""RunConfig: what is refused, with which sentence, and what survives the way through JSON."""

import subprocess
import sys

import numpy as np
import pytest

from comet_core import config
from comet_core.config import (
    ConfigError,
    RunConfig,
    config_from_dict,
    config_from_json,
    parse_codec_params,
    parse_settings,
)


def test_json_round_trips_every_field():
    given = RunConfig(name="µ <b>", epochs=3, augment=False, noise_budget=0.07, dataset="cifar10", policy="baseline")
    assert config_from_json(given.to_json()) == given


@pytest.mark.parametrize(
    ("values", "field", "words"),
    [
        ({"epochs": 0}, "epochs", "from 1 to 10,000"),
        ({"epochs": 1.5}, "epochs", "a whole number"),
        ({"epochs": True}, "epochs", "a whole number"),
        ({"model": "resnet21"}, "model", "resnet20, resnet18"),
        ({"learning_rate": 0.0}, "learning_rate", "above 0"),
        ({"learning_rate": float("nan")}, "learning_rate", "a number"),
        ({"noise_budget": -0.1}, "noise_budget", "from 0"),
        ({"noise_budget": float("inf")}, "noise_budget", "to 10"),
        ({"augment": 1}, "augment", "true, false"),
        ({"device": "mps"}, "device", "cpu, cuda"),
        ({"name": "x" * 5000}, "name", "4,096"),
        ({"model": ["resnet20"]}, "model", "resnet20, resnet18"),
        ({"seed": 10**5000}, "seed", "seed is a number of thousands of digits; allowed: a whole number"),
        ({"seed": "9" * 5000}, "seed", "99999...99999"),
        ({"codec_params": "dithr=true"}, "codec_params", "'dithr' is no parameter of codec 'error_bounded'; allowed"),
        ({"codec_params": "dither=perhaps"}, "codec_params", "dither is 'perhaps'; allowed: False, True"),
        ({"codec_params": "dither"}, "codec_params", "write key=value,key=value"),
        ({"codec_params": "seed=1,seed=2"}, "codec_params", "codec_params: seed is given twice"),
        ({"codec_params": "seed=--5"}, "codec_params", "seed is '--5'; allowed: a whole number from 0 to 4294967295"),
        ({"codec_params": "seed=" + "9" * 4000}, "codec_params", "99999...99999"),
        ({"codec": "dct", "codec_params": "quality=101"}, "codec_params", "a whole number from 1 to 100"),
        ({"codec": "lossless", "codec_params": "level=3"}, "codec_params", "allowed: none, it has none"),
        ({"codec_params": {"dither": True}}, "codec_params", "must be a text"),
        ({"dataset": "image_folder"}, "dataset_path", "needs a folder or a .zip"),
        ({"dataset_path": "a.zip"}, "dataset_path", "only image_folder reads a path"),
        ({"batchsize": 1}, "batchsize", "batch_size"),
    ],
)
def test_a_value_that_cannot_run_is_refused_by_a_sentence_about_its_field(values, field, words):
    with pytest.raises(ConfigError) as caught:
        config_from_dict(values)
    assert list(caught.value.problems) == [field]
    assert words in caught.value.problems[field] and field in str(caught.value)


def test_all_problems_are_told_at_once():
    with pytest.raises(ConfigError) as caught:
        RunConfig(epochs=0, batch_size=0, model="x")
    assert set(caught.value.problems) == {"epochs", "batch_size", "model"}


def test_settings_of_a_command_line_get_the_types_of_their_fields():
    assert parse_settings(["epochs=3", "learning_rate=1", "augment=False", "name=a=b"]) == {
        "epochs": 3,
        "learning_rate": 1.0,
        "augment": False,
        "name": "a=b",
    }
    with pytest.raises(ConfigError) as caught:
        parse_settings(["epochs=many", "nonsense", "augment=perhaps"])
    assert set(caught.value.problems) == {"epochs", "nonsense", "augment"}


def test_parameters_of_a_codec_are_one_text_that_survives_the_way_through_json():
    given = config_from_dict(parse_settings(["codec_params=dither=true, seed=3"]))
    assert parse_codec_params(given.codec, given.codec_params) == {"dither": True, "seed": 3}
    assert config_from_json(given.to_json()) == given and hash(given) == hash(config_from_json(given.to_json()))
    assert parse_codec_params("cast", "dtype=bfloat16") == {"dtype": "bfloat16"}
    assert parse_codec_params("error_bounded", "dither=0") == {"dither": False}
    assert parse_codec_params("error_bounded", "") == {}


def test_numbers_of_numpy_are_values_that_json_can_hold():
    given = RunConfig(error_bound=np.float32(0.5), seed=np.int64(3), augment=np.bool_(False))
    assert config_from_json(given.to_json()) == RunConfig(error_bound=0.5, seed=3, augment=False)


def test_what_the_other_options_make_meaningless_is_known():
    def because(**changes):
        return config.unread(RunConfig(**changes).to_dict())

    assert because() == {
        "dataset_path": "dataset=digits", "momentum_fraction": "controller=noise", "error_bound": "controller=noise",
        "memory_bytes": "controller=noise",
    }  # fmt: skip
    plain = because(policy="baseline")
    assert {"codec", "codec_params", "controller", "noise_budget", "collect_every"} <= plain.keys()
    assert set(plain.values()) == {"dataset=digits", "policy=baseline"}
    assert because(codec="lossless")["codec_params"] == "codec=lossless"
    assert because(codec="dct")["controller"] == "codec=dct" and "codec_params" not in because(codec="dct")
    assert because(dataset="cifar10")["test_fraction"] == "dataset=cifar10"


@pytest.mark.parametrize("text", ["conv1", "conv1=near", "conv1=-1", "conv1=nan", "conv1=1,conv1=2", "=1"])
def test_wrong_bounds_of_single_layers_are_refused_by_name(text):
    with pytest.raises(ConfigError) as caught:
        RunConfig(layer_bounds=text)
    assert set(caught.value.problems) == {"layer_bounds"} and "layer_bounds" in str(caught.value)


def test_bounds_of_single_layers_are_numbers_or_exact():
    assert config.parse_layer_bounds("layer1.*=1e-3, fc = exact") == {"layer1.*": 1e-3, "fc": "exact"}
    assert config.check_layer_bounds({"layer1.*": np.float32(0.5), "fc": "exact"}) == {"layer1.*": 0.5, "fc": None}
    assert RunConfig(layer_bounds="").layer_bounds == "" and not config.parse_layer_bounds("")


def test_every_preset_is_a_configuration_that_runs():
    for name in config.PRESETS:
        values = config.preset_values(name)
        if values.get("dataset") == "image_folder":
            values["dataset_path"] = "images.zip"
        assert config_from_dict(values).epochs >= 1
    with pytest.raises(ConfigError, match="quick"):
        config.preset_values("slow")


def test_every_field_has_a_label_a_help_and_a_group():
    for name, field in config.FIELDS.items():
        assert field.metadata["label"] and field.metadata["help"], name
        assert field.metadata["group"] in config.GROUPS, name


def test_the_menus_name_what_the_registries_hold():
    from comet_core import codecs, datasets, models
    from comet_core.controllers import CONTROLLERS
    from comet_core.policies import POLICIES

    assert set(config.MODELS) == set(models.MODELS)
    assert set(config.DATASETS) == set(datasets.DATASETS)
    assert set(config.POLICIES) == set(POLICIES)
    assert set(config.CONTROLLERS) == set(CONTROLLERS)
    assert set(config.CODECS) <= set(codecs.CODECS)
    assert config.CODECS.keys() == config.CODEC_PARAMS.keys()


def test_importing_the_package_its_config_and_its_metrics_does_not_load_torch():
    code = (
        "import sys, comet_core, comet_core.config, comet_core.metrics, comet_core.launcher;"
        "loaded = {'torch', 'numpy', 'pandas'} & set(sys.modules); assert not loaded, loaded"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_comet_home_is_absolute(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COMET_HOME", "here")
    assert config.comet_home() == tmp_path / "here"
    monkeypatch.delenv("COMET_HOME")
    assert config.comet_home().is_absolute() and config.comet_home().name == "var"
