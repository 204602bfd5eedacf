"""A small vision transformer: width 192, 12 layers, 3 heads (ViT-Tiny), from torchvision's blocks.

Dosovitskiy et al., "An Image is Worth 16x16 Words", with the tiny width of Touvron et al. (DeiT). Patches are of 4
pixels below 64 pixels, of 8 from there on; the image is cropped to whole patches.
"""

import torch
from torch import Tensor, nn
from torchvision.models.vision_transformer import Encoder


class VitTiny(nn.Module):
    """float32 (batch, in_channels, size, size) to (batch, num_classes)."""

    def __init__(self, num_classes: int, in_channels: int, image_size: int) -> None:
        super().__init__()
        patch = 4 if image_size < 64 else 8
        self.patches = nn.Conv2d(in_channels, 192, patch, stride=patch)
        self.class_token = nn.Parameter(torch.zeros(1, 1, 192))
        num_tokens = (image_size // patch) ** 2 + 1
        self.encoder = Encoder(num_tokens, 12, 3, 192, 768, dropout=0.0, attention_dropout=0.0)
        self.head = nn.Linear(192, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        tokens = self.patches(x).flatten(2).transpose(1, 2)
        tokens = torch.cat([self.class_token.expand(len(x), -1, -1), tokens], 1)
        return self.head(self.encoder(tokens)[:, 0])


def build(num_classes: int, in_channels: int, image_size: int) -> nn.Module:
    return VitTiny(num_classes, in_channels, image_size)
