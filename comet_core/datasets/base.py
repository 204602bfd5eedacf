"""`Images`, what a source gives, and `Dataset`, the seeded batches that a run trains on.

Everything random comes from generators of the seed and the epoch: order, crops and flips do not depend on the policy,
so that twins see equal batches. Images stay uint8 in memory and become float32 a batch at a time.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from comet_core.config import RunConfig

TEST_BATCH = 500


class DatasetError(ValueError):
    """A sentence: what is wrong with the data, where, and what is allowed."""


@dataclass(frozen=True, kw_only=True)
class Images:
    """uint8 images (N, C, H, W), square, and int64 labels (N,) that index `classes`."""

    train_images: Tensor
    train_labels: Tensor
    test_images: Tensor
    test_labels: Tensor
    classes: list[str]


class Dataset:
    """Batches of normalised float32 images (B, C, S, S) and int64 labels (B,), as the configuration asks."""

    def __init__(self, images: Images, config: RunConfig) -> None:
        self.classes = images.classes
        self._config = config
        size = config.image_size or images.train_images.shape[-1]
        self.train_images, self.test_images = resized(images.train_images, size), resized(images.test_images, size)
        self.train_labels, self.test_labels = images.train_labels, images.test_labels
        values = self.train_images[:: max(1, len(self.train_images) // 10_000)].float()
        self._mean = values.mean((0, 2, 3), keepdim=True)
        self._std = values.std((0, 2, 3), keepdim=True).clamp_min(1.0)

    @property
    def num_classes(self) -> int:
        return len(self.classes)

    @property
    def num_channels(self) -> int:
        return self.train_images.shape[1]

    @property
    def image_size(self) -> int:
        return self.train_images.shape[-1]

    @property
    def steps_per_epoch(self) -> int:
        full = -(-len(self.train_labels) // self._config.batch_size)
        return min(full, self._config.max_steps_per_epoch or full)

    def train_batches(self, epoch: int) -> Iterator[tuple[Tensor, Tensor]]:
        """One pass in the order of this epoch (1 is the first); the last batch may be smaller."""
        generator = torch.Generator().manual_seed(self._config.seed * 100_003 + epoch)
        order = torch.randperm(len(self.train_labels), generator=generator)
        size = self._config.batch_size
        for step in range(self.steps_per_epoch):
            chosen = order[step * size : (step + 1) * size]
            images = self.train_images[chosen]
            if self._config.augment:
                images = cropped_and_flipped(images, generator)
            yield self._normalised(images), self.train_labels[chosen]

    def test_batches(self) -> Iterator[tuple[Tensor, Tensor]]:
        for images, labels in zip(self.test_images.split(TEST_BATCH), self.test_labels.split(TEST_BATCH), strict=True):
            yield self._normalised(images), labels

    def _normalised(self, images: Tensor) -> Tensor:
        return images.float().sub_(self._mean).div_(self._std)


def cropped_and_flipped(images: Tensor, generator: torch.Generator) -> Tensor:
    """Each image shifted by up to an eighth of its size, zeros moving in, and mirrored with a chance of a half."""
    count, size = len(images), images.shape[-1]
    margin = max(1, size // 8)
    padded = F.pad(images, (margin,) * 4)
    top, left = torch.randint(2 * margin + 1, (2, count, 1), generator=generator)
    rows, columns = top + torch.arange(size), left + torch.arange(size)
    flip = torch.rand((count, 1), generator=generator) < 0.5
    columns = torch.where(flip, columns.flip(1), columns)
    picked = torch.arange(count)[:, None, None]
    return padded.permute(0, 2, 3, 1)[picked, rows[:, :, None], columns[:, None, :]].permute(0, 3, 1, 2).contiguous()


def resized(images: Tensor, size: int) -> Tensor:
    if images.shape[-1] == size:
        return images
    parts = [
        F.interpolate(part.float(), size=(size, size), mode="bilinear", antialias=True).round_().clamp_(0, 255).byte()
        for part in images.split(1000)
    ]
    return torch.cat(parts)


def split(images: Tensor, labels: Tensor, config: RunConfig, classes: list[str]) -> Images:
    """Hold out `test_fraction` of every class, chosen by the seed; at least one image on either side."""
    generator = torch.Generator().manual_seed(config.seed)
    test = torch.zeros(len(labels), dtype=torch.bool)
    for label, name in enumerate(classes):
        members = torch.nonzero(labels == label).flatten()
        if len(members) < 2:
            raise DatasetError(
                f"class {name!r} has {len(members)} image, but needs one to train on and one to test on; add images, "
                "or give test/<class>/ folders of their own."
            )
        held = min(max(1, round(config.test_fraction * len(members))), len(members) - 1)
        test[members[torch.randperm(len(members), generator=generator)[:held]]] = True
    return Images(
        train_images=images[~test], train_labels=labels[~test], test_images=images[test], test_labels=labels[test],
        classes=classes,
    )  # fmt: skip
