"""`Dataset`: the seeded batches that a run trains on.

Everything random comes from generators of the seed and the epoch: order, crops and flips do not depend on the policy,
so that twins see equal batches. Images stay uint8, in memory or in their files, and become float32 a batch at a time.
Crops, flips and normalisation happen here in either case, so that streamed batches equal those from memory.
"""

import multiprocessing
import signal
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.data import DataLoader

from comet_core.config import RunConfig
from comet_core.datasets.base import DatasetError, Images, StreamedImages

MOST_WORKERS = 4  # processes that decode streamed images


class Dataset:
    """Batches of normalised float32 images (B, C, S, S) and int64 labels (B,), as the configuration asks."""

    def __init__(self, images: Images, config: RunConfig) -> None:
        self.classes = images.classes
        self._config = config
        size = config.image_size or images.train_images.shape[-1]
        self._train_images, self._test_images = resized(images.train_images, size), resized(images.test_images, size)
        self._train_labels, self._test_labels = images.train_labels, images.test_labels
        self._mean, self._std = mean_and_std(self._train_images)

    @property
    def num_train(self) -> int:
        return len(self._train_labels)

    @property
    def num_test(self) -> int:
        return len(self._test_labels)

    @property
    def num_classes(self) -> int:
        return len(self.classes)

    @property
    def num_channels(self) -> int:
        return self._train_images.shape[1]

    @property
    def image_size(self) -> int:
        return self._train_images.shape[-1]

    @property
    def steps_per_epoch(self) -> int:
        full = -(-self.num_train // self._config.batch_size)
        return min(full, self._config.max_steps_per_epoch or full)

    def train_batches(self, epoch: int) -> Iterator[tuple[Tensor, Tensor]]:
        """One pass in the order of this epoch (1 is the first); the last batch may be smaller."""
        generator = torch.Generator().manual_seed(self._config.seed * 100_003 + epoch)
        order = torch.randperm(self.num_train, generator=generator)
        batches = order.split(self._config.batch_size)[: self.steps_per_epoch]
        for chosen, images in zip(batches, read(self._train_images, batches), strict=True):
            if self._config.augment:
                images = cropped_and_flipped(images, generator)
            yield self._normalised(images), self._train_labels[chosen]

    def test_batches(self) -> Iterator[tuple[Tensor, Tensor]]:
        """The test images in order, no more at once than in training, so that evaluation never sets the peak."""
        batches = torch.arange(self.num_test).split(self._config.batch_size)
        for chosen, images in zip(batches, read(self._test_images, batches), strict=True):
            yield self._normalised(images), self._test_labels[chosen]

    def _normalised(self, images: Tensor) -> Tensor:
        return images.float().sub_(self._mean).div_(self._std)


def read(images: Tensor | StreamedImages, batches: Sequence[Tensor]) -> Iterator[Tensor]:
    """The uint8 images of each batch of places: from memory, or decoded a few batches ahead by other processes."""
    if isinstance(images, Tensor):
        yield from (images[chosen] for chosen in batches)
        return
    workers = min(MOST_WORKERS, torch.get_num_threads() - 1)  # the threads are this run's share of the cores
    # A fork of this process would copy locked locks and CUDA's state; the server imports once, not in every worker.
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch.utils.data", "PIL.Image"])
    loader: DataLoader[np.ndarray | DatasetError] = DataLoader(
        images,  # type: ignore[arg-type]
        batch_sampler=[chosen.tolist() for chosen in batches],
        collate_fn=_as_it_comes,
        num_workers=workers,
        worker_init_fn=_ignore_stop,
        multiprocessing_context=context if workers else None,
        generator=torch.Generator(),  # else it draws from the global one, which the weights come from
    )
    for found in loader:
        if isinstance(found, DatasetError):
            raise found
        yield torch.from_numpy(found)


def _as_it_comes(found: Any) -> Any:
    return found  # an array goes through a pipe; as a tensor it would need shared memory, 64 MiB in a container


def _ignore_stop(worker: int) -> None:
    for number in (signal.SIGINT, signal.SIGTERM):  # they reach the whole group, but the trainer ends its step first
        signal.signal(number, signal.SIG_IGN)


def mean_and_std(images: Tensor | StreamedImages) -> tuple[Tensor, Tensor]:
    """Of the values of each channel, as float32 (1, C, 1, 1), from a sample of the images spread over all of them."""
    sample = 10_000 if isinstance(images, Tensor) else 1000
    places = torch.arange(0, len(images), max(1, len(images) // sample))
    counts = torch.zeros(images.shape[1], 256, dtype=torch.float64)
    for part in read(images, places.split(100)):
        counts += torch.stack([channel.flatten().bincount(minlength=256) for channel in part.unbind(1)])
    shares = counts / counts.sum(1, keepdim=True)
    values = torch.arange(256, dtype=torch.float64)
    mean = shares @ values
    std = (shares @ values.square() - mean.square()).clamp_min(1.0).sqrt()
    return mean.float().view(1, -1, 1, 1), std.float().view(1, -1, 1, 1)


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


def resized(images: Tensor | StreamedImages, size: int) -> Tensor | StreamedImages:
    if images.shape[-1] == size or not isinstance(images, Tensor):  # files are decoded to their size
        return images
    parts = [
        F.interpolate(part.float(), size=(size, size), mode="bilinear", antialias=True).round_().clamp_(0, 255).byte()
        for part in images.split(1000)
    ]
    return torch.cat(parts)
