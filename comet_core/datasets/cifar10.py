"""CIFAR-10: 60,000 colour images of 32x32 in ten classes, downloaded by torchvision once."""

import torch

from comet_core.config import RunConfig, comet_home
from comet_core.datasets.base import DatasetError, Images, alone_in


def load(config: RunConfig) -> Images:
    from torchvision.datasets import CIFAR10

    root = comet_home() / "datasets"
    try:
        with alone_in(root):
            parts = [CIFAR10(str(root), train=train, download=True) for train in (True, False)]
    except (OSError, RuntimeError) as error:
        reason = " ".join(str(error).split())  # torchvision's has several lines
        raise DatasetError(
            f"cifar10 is not in {root} and could not be downloaded ({reason}); check the network, or unpack the "
            "official cifar-10-batches-py there."
        ) from error
    (train_images, train_labels), (test_images, test_labels) = (
        (torch.from_numpy(part.data).permute(0, 3, 1, 2).contiguous(), torch.tensor(part.targets)) for part in parts
    )
    return Images(
        train_images=train_images, train_labels=train_labels, test_images=test_images, test_labels=test_labels,
        classes=list(parts[0].classes),
    )  # fmt: skip
