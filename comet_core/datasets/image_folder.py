"""Your own images: a folder or a .zip with train/<class>/ and test/<class>/, or class folders that the seed splits.

A zip is read in place, never unpacked: no entry can be written outside a folder, and one whose name tries to is refused
by name. The index (which file belongs to which class) is made and checked before any image is decoded; decoding runs on
a thread pool with a progress bar. Images of another size than the first one are scaled to its smaller side, square.
"""

import io
import os
import zipfile
import zlib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

import numpy as np
import torch
from PIL import Image
from tqdm import tqdm

from comet_core.config import RunConfig
from comet_core.datasets.base import DatasetError, Images, split

SUFFIXES = {".jpg", ".jpeg", ".png", ".bmp", ".gif", ".tif", ".tiff", ".webp"}
LARGEST_FILE_BYTES = 64 * 2**20  # of one image, unpacked: a zip can claim anything
LARGEST_SET_BYTES = 8 * 2**30  # of the whole set as uint8 in memory
_UNREADABLE = (OSError, ValueError, SyntaxError, zipfile.BadZipFile, zlib.error, Image.DecompressionBombError)


@dataclass(frozen=True)
class _Index:
    classes: list[str]
    train: list[tuple[str, int]]  # name of the file, index of its class
    test: list[tuple[str, int]]  # empty: to be split
    read: Callable[[str], bytes]


def load(config: RunConfig) -> Images:
    """Raises DatasetError where the path holds no two classes of images, or an image cannot be read."""
    path = Path(config.dataset_path)
    if path.is_dir():
        return _decoded(_index(path, _files_of_folder(path), lambda name: (path / name).read_bytes()), path, config)
    if not path.exists():
        raise DatasetError(f"dataset_path is {str(path)!r}, which does not exist; give a folder or a .zip of images.")
    if not zipfile.is_zipfile(path):
        raise DatasetError(f"{path.name} is no .zip file; give a folder or a .zip with a folder of images per class.")
    with zipfile.ZipFile(path) as archive:
        return _decoded(_index(path, _files_of_zip(path, archive), archive.read), path, config)


def _files_of_folder(path: Path) -> list[str]:
    root = path.resolve()
    names = []
    for folder, _, files in os.walk(root):
        for file in files:
            found = Path(folder) / file
            if not found.resolve().is_relative_to(root):
                raise DatasetError(f"{found} is a link that leaves {path}; copy the image into the folder.")
            names.append(found.relative_to(root).as_posix())
    return names


def _files_of_zip(path: Path, archive: zipfile.ZipFile) -> list[str]:
    names = []
    for entry in archive.infolist():
        name = PurePosixPath(entry.filename.replace("\\", "/"))
        if name.is_absolute() or ".." in name.parts or ":" in name.parts[0]:
            raise DatasetError(
                f"{path.name} has an entry {entry.filename!r} that leaves its folder; pack the images again without it."
            )
        if entry.is_dir():
            continue
        if entry.flag_bits & 1:
            raise DatasetError(f"{entry.filename!r} in {path.name} is encrypted; pack the images without a password.")
        if entry.file_size > LARGEST_FILE_BYTES:
            raise DatasetError(
                f"{entry.filename!r} in {path.name} unpacks to {entry.file_size:,} bytes; allowed for one image: "
                f"{LARGEST_FILE_BYTES:,}."
            )
        names.append(entry.filename)
    return names


def _index(path: Path, names: list[str], read: Callable[[str], bytes]) -> _Index:
    """Sort the image files by part and class; a single folder around everything is looked through."""
    files = []
    for name in names:
        parts = PurePosixPath(name.replace("\\", "/")).parts
        hidden = any(part.startswith(".") or part == "__MACOSX" for part in parts)
        if not hidden and PurePosixPath(parts[-1]).suffix.lower() in SUFFIXES:
            files.append((name, parts))
    while files and len({parts[0] for _, parts in files}) == 1 and all(len(parts) > 2 for _, parts in files):
        files = [(name, parts[1:]) for name, parts in files]
    has_parts = {parts[0] for _, parts in files} >= {"train"} and all(len(parts) > 2 for _, parts in files)
    depth = 1 if has_parts else 0
    where = "train/<class>/" if has_parts else "<class>/"
    train: dict[str, list[str]] = {}
    test: dict[str, list[str]] = {}
    for name, parts in files:
        if len(parts) < depth + 2:
            continue  # beside the class folders
        if has_parts and parts[0] not in ("train", "test"):
            raise DatasetError(f"{path.name} has a folder {parts[0]!r} beside train/ and test/; move it elsewhere.")
        part = test if has_parts and parts[0] == "test" else train
        part.setdefault(parts[depth], []).append(name)
    if not train:
        raise DatasetError(
            f"{path.name} has no images in {where}; expected a folder of images per class, or train/<class>/ and "
            f"test/<class>/ (image files end in {', '.join(sorted(SUFFIXES))})."
        )
    if len(train) == 1:
        raise DatasetError(f"{path.name} has one class, {next(iter(train))!r}; training needs two or more.")
    unknown = sorted(set(test) - set(train))
    if unknown:
        raise DatasetError(f"{path.name} has test/{unknown[0]}/ but no train/{unknown[0]}/; a class needs both.")
    classes = sorted(train)
    train_files, test_files = (
        [(name, label) for label, entry in enumerate(classes) for name in sorted(part.get(entry, []))]
        for part in (train, test)
    )
    return _Index(classes, train_files, test_files, read)


def _decoded(index: _Index, path: Path, config: RunConfig) -> Images:
    first = _open(index, index.train[0][0], path)
    size = config.image_size or min(first.size)
    mode = "L" if first.mode in ("1", "L", "I;16") else "RGB"
    channels = 1 if mode == "L" else 3
    total = (len(index.train) + len(index.test)) * channels * size * size
    if total > LARGEST_SET_BYTES:
        raise DatasetError(
            f"{path.name} at {size} pixels needs {total / 2**30:.1f} GiB in memory; allowed: "
            f"{LARGEST_SET_BYTES / 2**30:.0f} GiB. Choose a smaller image_size."
        )

    def decode(entry: tuple[str, int]) -> np.ndarray:
        name = entry[0]
        image = _open(index, name, path).convert(mode)
        if image.size != (size, size):
            image = image.resize((size, size), Image.Resampling.BILINEAR)
        return np.asarray(image).reshape(size, size, channels)

    entries = index.train + index.test
    images = torch.empty((len(entries), channels, size, size), dtype=torch.uint8)
    with ThreadPoolExecutor(max_workers=os.cpu_count()) as pool:
        decoding = tqdm(
            pool.map(decode, entries), total=len(entries), desc="reading images", unit="image", mininterval=1
        )
        for place, pixels in enumerate(decoding):
            images[place] = torch.from_numpy(pixels.transpose(2, 0, 1).copy())
    labels = torch.tensor([label for _, label in entries])
    if not index.test:
        return split(images, labels, config, index.classes)
    count = len(index.train)
    return Images(
        train_images=images[:count], train_labels=labels[:count], test_images=images[count:],
        test_labels=labels[count:], classes=index.classes,
    )  # fmt: skip


def _open(index: _Index, name: str, path: Path) -> Image.Image:
    try:
        image = Image.open(io.BytesIO(index.read(name)))
        image.load()
        return image
    except _UNREADABLE as error:
        raise DatasetError(f"{name!r} in {path.name} is no readable image ({error}); replace or remove it.") from error
