"""AlexNet of torchvision, for images of 64 pixels and more."""

from torch import nn
from torchvision.models import alexnet


def build(num_classes: int, in_channels: int, image_size: int) -> nn.Module:
    model = alexnet(num_classes=num_classes)
    if in_channels != 3:
        model.features[0] = nn.Conv2d(in_channels, 64, 11, stride=4, padding=2)
    return model
