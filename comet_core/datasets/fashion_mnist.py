"""Fashion-MNIST: 70,000 images of clothing, 28x28; from Debian's package where installed, else by a download."""

import gzip
import zlib
from pathlib import Path

import torch
from torch import Tensor

from comet_core.config import RunConfig, comet_home
from comet_core.datasets.base import DatasetError, Images, alone_in

CLASSES = ["T-shirt", "trousers", "pullover", "dress", "coat", "sandal", "shirt", "sneaker", "bag", "ankle boot"]
DEBIAN_FOLDER = Path("/usr/share/datasets/fashion-mnist")
_NAMES = ("train-images-idx3", "train-labels-idx1", "t10k-images-idx3", "t10k-labels-idx1")


def load(config: RunConfig) -> Images:
    folder = DEBIAN_FOLDER if DEBIAN_FOLDER.is_dir() else _downloaded()
    train_images, train_labels, test_images, test_labels = (read_idx(folder / f"{name}-ubyte.gz") for name in _NAMES)
    for images, labels in ((train_images, train_labels), (test_images, test_labels)):
        if images.dim() != 3 or labels.shape != images.shape[:1] or int(labels.max()) >= len(CLASSES):
            raise DatasetError(f"images and labels in {folder} do not belong together; install them again.")
    return Images(
        train_images=train_images.unsqueeze(1), train_labels=train_labels.long(),
        test_images=test_images.unsqueeze(1), test_labels=test_labels.long(), classes=CLASSES,
    )  # fmt: skip


def read_idx(path: Path) -> Tensor:
    """A gzipped IDX file of bytes as a tensor. Raises DatasetError where it is missing or damaged."""
    try:
        data = gzip.decompress(path.read_bytes())
        num_dims = data[3]
        shape = [int.from_bytes(data[4 + 4 * i : 8 + 4 * i], "big") for i in range(num_dims)]
        return torch.frombuffer(bytearray(data), dtype=torch.uint8, offset=4 + 4 * num_dims).view(shape).clone()
    except (OSError, EOFError, zlib.error, IndexError, ValueError, RuntimeError) as error:
        raise DatasetError(f"{path} is missing or no gzipped IDX file ({error}); install it again.") from error


def _downloaded() -> Path:
    from torchvision.datasets import FashionMNIST

    root = comet_home() / "datasets"
    try:
        with alone_in(root):
            FashionMNIST(str(root), download=True)
    except (OSError, RuntimeError) as error:
        reason = " ".join(str(error).split())  # torchvision's has several lines
        raise DatasetError(
            f"fashion_mnist is not at {DEBIAN_FOLDER} and could not be downloaded ({reason}); install the Debian "
            "package dataset-fashion-mnist, or check the network."
        ) from error
    return root / "FashionMNIST" / "raw"
