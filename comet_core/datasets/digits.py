"""1,797 handwritten digits of 8x8 from scikit-learn: real images that need no network."""

import torch

from comet_core.config import RunConfig
from comet_core.datasets.base import Images, split


def load(config: RunConfig) -> Images:
    from sklearn.datasets import load_digits  # here: it takes a second

    found = load_digits()
    images = torch.from_numpy(found.images * (255 / 16)).round().byte().unsqueeze(1)
    return split(images, torch.from_numpy(found.target).long(), config, [str(digit) for digit in range(10)])
