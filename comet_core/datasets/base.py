"""`Images`, what a source gives, and what sources share."""

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from comet_core.config import RunConfig


class DatasetError(ValueError):
    """A sentence: what is wrong with the data, where, and what is allowed."""


class StreamedImages(Protocol):
    """Images that are decoded when asked for, in the DataLoader's workers: it is pickled to get there."""

    @property
    def shape(self) -> tuple[int, int, int, int]: ...

    def __len__(self) -> int: ...

    def __getitems__(self, places: list[int]) -> np.ndarray | DatasetError:
        """uint8 (B, C, S, S). An error is returned: raised in a worker it would come back as a traceback's text."""
        ...


@dataclass(frozen=True, kw_only=True)
class Images:
    """uint8 images (N, C, H, W), square, and int64 labels (N,) that index `classes`."""

    train_images: Tensor | StreamedImages
    train_labels: Tensor
    test_images: Tensor | StreamedImages
    test_labels: Tensor
    classes: list[str]


def held_out(labels: Tensor, config: RunConfig, classes: list[str]) -> Tensor:
    """True where an image is held out for the test: `test_fraction` of every class, chosen by the seed."""
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
    return test


@contextmanager
def alone_in(folder: Path) -> Iterator[None]:
    """Make the folder and wait until no other process is here: twins that start together must not download twice."""
    folder.mkdir(parents=True, exist_ok=True)
    handle = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)
