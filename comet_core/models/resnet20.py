"""ResNet-20 for small images: three stages of three residual blocks, 16 to 64 channels.

He et al., "Deep Residual Learning for Image Recognition", section 4.2, with n = 3. Shortcuts take no parameters where
the size changes (option A there): every second pixel, and zeros for the channels that are new. ReLUs work in place, as
they do in common implementations; the saved-tensor engine has to cope with that.
"""

import torch.nn.functional as F
from torch import Tensor, nn


class Block(nn.Module):
    """Two 3x3 convolutions beside a shortcut."""

    def __init__(self, in_channels: int, channels: int) -> None:
        super().__init__()
        self.stride = channels // in_channels
        self.num_new_channels = channels - in_channels
        self.conv1 = nn.Conv2d(in_channels, channels, 3, stride=self.stride, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(channels)
        self.conv2 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(channels)
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        shortcut = x
        if self.num_new_channels:
            shortcut = F.pad(x[:, :, ::2, ::2], (0, 0, 0, 0, 0, self.num_new_channels))
        out = self.relu(self.bn1(self.conv1(x)))
        out = self.bn2(self.conv2(out))
        out += shortcut
        return self.relu(out)


class ResNet20(nn.Module):
    """float32 (batch, in_channels, height, width) to (batch, num_classes); any size from 8x8."""

    def __init__(self, num_classes: int, in_channels: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(in_channels, 16, 3, padding=1, bias=False)
        self.bn = nn.BatchNorm2d(16)
        self.relu = nn.ReLU(inplace=True)
        self.stage1 = nn.Sequential(Block(16, 16), Block(16, 16), Block(16, 16))
        self.stage2 = nn.Sequential(Block(16, 32), Block(32, 32), Block(32, 32))
        self.stage3 = nn.Sequential(Block(32, 64), Block(64, 64), Block(64, 64))
        self.fc = nn.Linear(64, num_classes)
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")

    def forward(self, x: Tensor) -> Tensor:
        x = self.relu(self.bn(self.conv(x)))
        x = self.stage3(self.stage2(self.stage1(x)))
        return self.fc(x.mean((2, 3)))


def build(num_classes: int, in_channels: int, image_size: int) -> nn.Module:
    return ResNet20(num_classes, in_channels)
