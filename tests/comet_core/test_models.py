"""Networks: the menu is what can be built, every family trains on the sizes it promises and refuses smaller ones."""

import pytest
import torch
from torch import nn

from comet_core import config
from comet_core.models import MODELS, build_model


def num_parameters(model):
    return sum(parameter.numel() for parameter in model.parameters())


def test_the_menu_names_the_models_that_exist():
    assert list(MODELS) == list(config.MODELS)


@pytest.mark.parametrize("in_channels", [1, 3])
@pytest.mark.parametrize("name", MODELS)
def test_a_model_trains_on_its_smallest_image_also_in_a_batch_of_one(name, in_channels):
    size = MODELS[name].smallest_image
    model = build_model(name, 10, in_channels, size)
    logits = model(torch.randn(1, in_channels, size, size))
    assert logits.shape == (1, 10)
    logits.sum().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


@pytest.mark.parametrize(("name", "size"), [("resnet20", 45), ("resnet18", 33), ("resnet18", 64), ("vgg16_bn", 63)])
def test_other_sizes_work(name, size):
    assert build_model(name, 7, 3, size)(torch.randn(2, 3, size, size)).shape == (2, 7)


@pytest.mark.parametrize("name", MODELS)
def test_too_small_images_are_refused_by_a_sentence(name):
    smallest = MODELS[name].smallest_image
    with pytest.raises(
        ValueError, match=f"{name} needs images of {smallest} pixels or more, these have {smallest - 1};"
    ):
        build_model(name, 10, 3, smallest - 1)


def test_an_unknown_model_is_refused_by_a_sentence():
    with pytest.raises(ValueError, match=r"model is 'resnet19'; allowed: resnet20, "):
        build_model("resnet19", 10, 3, 32)


@pytest.mark.parametrize("name", ["resnet20", "resnet18"])
def test_the_seed_decides_the_weights(name):
    def weights(seed):
        torch.manual_seed(seed)
        return nn.utils.parameters_to_vector(build_model(name, 10, 3, 32).parameters())

    assert torch.equal(weights(1), weights(1)) and not torch.equal(weights(1), weights(2))


def test_resnet20_is_the_one_of_the_paper():
    model = build_model("resnet20", 10, 3, 32)
    assert sum(isinstance(module, nn.Conv2d | nn.Linear) for module in model.modules()) == 20
    assert num_parameters(model) == 269_722  # "0.27M" there
    assert all(module.inplace for module in model.modules() if isinstance(module, nn.ReLU))


def test_small_images_get_a_small_stem_and_a_small_classifier():
    assert build_model("resnet18", 10, 3, 63)(torch.zeros(1, 3, 63, 63)).shape == (1, 10)
    assert num_parameters(build_model("resnet18", 10, 3, 64)) - num_parameters(build_model("resnet18", 10, 3, 63)) == (
        64 * 3 * (7 * 7 - 3 * 3)
    )
    assert 14e6 < num_parameters(build_model("vgg16_bn", 10, 3, 32)) < 15e6
