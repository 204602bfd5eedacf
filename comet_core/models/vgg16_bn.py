"""VGG-16 of torchvision with batch norm; below 64 pixels one linear layer instead of three.

The big classifier's 124 million parameters are made for 7x7 pixels; of a small image one is left. It is not even built.
"""

from collections import OrderedDict

from torch import nn
from torchvision.models import vgg


def build(num_classes: int, in_channels: int, image_size: int) -> nn.Module:
    features = vgg.make_layers(vgg.cfgs["D"], batch_norm=True)
    if in_channels != 3:
        features[0] = nn.Conv2d(in_channels, 64, 3, padding=1)
    if image_size >= 64:
        return vgg.VGG(features, num_classes=num_classes)
    for module in features:
        if isinstance(module, nn.Conv2d):  # as torchvision's class does
            nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
            assert module.bias is not None
            nn.init.zeros_(module.bias)
    classifier = nn.Linear(512, num_classes)
    parts = dict(features=features, avgpool=nn.AdaptiveAvgPool2d(1), flatten=nn.Flatten(), classifier=classifier)
    return nn.Sequential(OrderedDict(parts))
