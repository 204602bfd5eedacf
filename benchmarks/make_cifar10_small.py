"""Rebuilds the small image set of the README's figures from the official CIFAR-10 files.

    python -m benchmarks.make_cifar10_small [cifar-10-python.tar.gz or cifar-10-batches-py] [--output cifar10-small.zip]

Without a path torchvision downloads CIFAR-10 (170 MB) into COMET_HOME. 2,000 training and 400 test images of each class
become train/<class>/<number>.jpg and test/<class>/<number>.jpg. The number counts the class's images from 0 in the
order of the official files; one shuffle a class chooses, seeded with 7. The same input and Pillow give the same bytes.

Equal to the set that was measured, as checked against its zip: all 24,000 names, their order, the uncompressed zip, and
the JPEG settings (size, quantisation tables, subsampling: Pillow's quality 75). Not checked, for want of the official
files beside it: that its numbers count in the same order, so its images may be others of the same class, and that no
other encoding came before, so pixels may differ a little. Either moves accuracies and ratios by what another draw of
images does. The zip's time stamps differ. The official files are pickles: use a path only to files that you trust.
"""

import argparse
import io
import pickle
import random
import sys
import tarfile
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from comet_core.config import comet_home

FILES = {"test": ["test_batch"], "train": [f"data_batch_{number}" for number in range(1, 6)]}
CHOSEN = {"test": 400, "train": 2000}  # images a class
CLASSES = ["airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck"]
SEED = 7


def chosen_numbers(per_class: dict[str, int]) -> dict[tuple[str, str], list[int]]:
    """Of the images that each class has in a part, the numbers of those that are taken, by (part, class)."""
    generator = random.Random(SEED)
    found = {}
    for part, count in CHOSEN.items():
        for name in CLASSES:
            numbers = list(range(per_class[part]))
            generator.shuffle(numbers)
            found[part, name] = sorted(numbers[:count])
    return found


def small_zip(batches: dict[str, Any]) -> bytes:
    """The zip, from the official files' contents by name: "data" uint8 (N, 3072) and "labels"."""
    images = {part: np.concatenate([batches[name]["data"] for name in names]) for part, names in FILES.items()}
    labels = {part: np.concatenate([batches[name]["labels"] for name in names]) for part, names in FILES.items()}
    chosen = chosen_numbers({part: len(images[part]) // len(CLASSES) for part in FILES})
    output = io.BytesIO()
    with zipfile.ZipFile(output, "w") as archive:
        for (part, name), numbers in chosen.items():
            members = images[part][labels[part] == CLASSES.index(name)]
            for number in numbers:
                encoded = io.BytesIO()
                pixels = members[number].reshape(3, 32, 32).transpose(1, 2, 0)
                Image.fromarray(np.ascontiguousarray(pixels)).save(encoded, "JPEG", quality=75)
                archive.writestr(zipfile.ZipInfo(f"{part}/{name}/{number:04}.jpg"), encoded.getvalue())
    return output.getvalue()


def official_files(path: Path) -> dict[str, Any]:
    """Contents of the official files by name, from their folder or their archive."""
    names = [name for names in FILES.values() for name in names]
    if path.is_dir():
        return _unpickled(names, lambda name: (path / name).read_bytes())
    with tarfile.open(path) as archive:
        return _unpickled(names, lambda name: archive.extractfile(f"cifar-10-batches-py/{name}").read())  # type: ignore[union-attr]


def _unpickled(names: list[str], read: Callable[[str], bytes]) -> dict[str, Any]:
    return {name: pickle.loads(read(name), encoding="latin1") for name in names}


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("path", nargs="?", type=Path, help="the official archive, or the folder unpacked from it")
    parser.add_argument("--output", type=Path, default=Path("cifar10-small.zip"))
    given = parser.parse_args(arguments)
    path = given.path
    try:
        if path is None:
            from torchvision.datasets import CIFAR10

            path = comet_home() / "datasets" / "cifar-10-batches-py"
            CIFAR10(str(path.parent), download=True)
        contents = small_zip(official_files(path))
        given.output.write_bytes(contents)
    except (OSError, RuntimeError, KeyError, IndexError, ValueError, tarfile.TarError, pickle.UnpicklingError) as error:
        sys.exit(
            f"error: {path} is not the official CIFAR-10 for Python, or {given.output} cannot be written ({error})."
        )
    print(f"{given.output}: {len(contents):,} bytes")


if __name__ == "__main__":
    main()
