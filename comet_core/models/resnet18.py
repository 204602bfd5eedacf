"""ResNet-18 of torchvision; below 64 pixels with a 3x3 stem and no max-pool, as is usual for CIFAR."""

from torch import nn
from torchvision.models import resnet18


def build(num_classes: int, in_channels: int, image_size: int) -> nn.Module:
    model = resnet18(num_classes=num_classes)
    if image_size < 64:
        model.conv1 = nn.Conv2d(in_channels, 64, 3, padding=1, bias=False)
        model.maxpool = nn.Identity()
    elif in_channels != 3:
        model.conv1 = nn.Conv2d(in_channels, 64, 7, stride=2, padding=3, bias=False)
    nn.init.kaiming_normal_(model.conv1.weight, mode="fan_out", nonlinearity="relu")
    return model
