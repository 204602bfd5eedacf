"""EfficientNet-B0 of torchvision, for images of 33 pixels and more."""

from torch import nn
from torchvision.models import efficientnet_b0


def build(num_classes: int, in_channels: int, image_size: int) -> nn.Module:
    model = efficientnet_b0(num_classes=num_classes)
    if in_channels != 3:
        model.features[0][0] = nn.Conv2d(in_channels, 32, 3, stride=2, padding=1, bias=False)
        nn.init.kaiming_normal_(model.features[0][0].weight, mode="fan_out")
    return model
