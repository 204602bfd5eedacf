"""1,797 handwritten digits of 8x8 from scikit-learn: real images that need no network."""

import torch

from comet_core.config import RunConfig
from comet_core.datasets.base import Images, held_out


def load(config: RunConfig) -> Images:
    from sklearn.datasets import load_digits  # here: it takes a second

    found = load_digits()
    images = torch.from_numpy(found.images * (255 / 16)).round().byte().unsqueeze(1)
    labels = torch.from_numpy(found.target).long()
    classes = [str(digit) for digit in range(10)]
    test = held_out(labels, config, classes)
    return Images(
        train_images=images[~test], train_labels=labels[~test], test_images=images[test], test_labels=labels[test],
        classes=classes,
    )  # fmt: skip
