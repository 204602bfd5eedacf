"""Networks to train, by name."""

from collections.abc import Callable
from typing import NamedTuple

from torch import nn

from comet_core.models import alexnet, efficientnet_b0, resnet18, resnet20, vgg16_bn, vit_tiny


class Family(NamedTuple):
    """`build(num_classes, in_channels, image_size)`, and the smallest side of an image that it can be trained on."""

    build: Callable[[int, int, int], nn.Module]
    smallest_image: int


MODELS: dict[str, Family] = {
    # With batch norm the last feature map must hold more than one pixel, or a last batch of one image has no variance.
    "resnet20": Family(resnet20.build, 8),
    "resnet18": Family(resnet18.build, 16),
    "alexnet": Family(alexnet.build, 64),
    "vgg16_bn": Family(vgg16_bn.build, 32),
    "efficientnet_b0": Family(efficientnet_b0.build, 33),
    "vit_tiny": Family(vit_tiny.build, 8),
}


def build_model(name: str, num_classes: int, in_channels: int, image_size: int) -> nn.Module:
    """A network with fresh weights on the CPU, drawn from torch's global generator: seed it first.

    It maps float32 (batch, in_channels, image_size, image_size) to (batch, num_classes). Raises ValueError for an
    unknown name and for images that are too small.
    """
    if name not in MODELS:
        raise ValueError(f"model is {name!r}; allowed: {', '.join(MODELS)}.")
    family = MODELS[name]
    if image_size < family.smallest_image:
        raise ValueError(
            f"{name} needs images of {family.smallest_image} pixels or more, these have {image_size}; "
            f"set image_size={family.smallest_image}, or choose another model."
        )
    return family.build(num_classes, in_channels, image_size)
