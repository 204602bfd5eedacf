"""Your own images: a folder or a .zip with train/<class>/ and test/<class>/, or class folders that the seed splits.

The index (which file belongs to which class) is made and checked before any image is decoded. A set that is small as
uint8 is then decoded once, on a thread pool with a progress bar; a larger one is decoded batch by batch while training.
Images of another size than the first one are scaled to its smaller side, square. The set is in colour if one of a
hundred images spread over it is.
"""

import os
import zipfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

import torch
from torch import Tensor
from tqdm import tqdm

from comet_core.config import FIELDS, RunConfig
from comet_core.datasets.base import DatasetError, Images, held_out
from comet_core.datasets.image_files import ImageFiles, opened
from comet_core.datasets.image_sources import SUFFIXES, FolderSource, Source, ZipSource

LARGEST_IN_MEMORY_BYTES = 2**30  # of the whole set as uint8; what is larger is streamed
EXPECTED = (
    "Expected is a folder of images per class, or train/<class>/ and test/<class>/ "
    f"(image files end in {', '.join(sorted(SUFFIXES))})."
)


@dataclass
class _Part:
    names: list[str]
    labels: Tensor

    def chosen(self, where: Tensor) -> "_Part":
        return _Part([self.names[place] for place in torch.nonzero(where).flatten()], self.labels[where])


def load(config: RunConfig) -> Images:
    """Raises DatasetError where the path holds no two classes of images, or an image cannot be read."""
    source = _source(Path(config.dataset_path))
    try:
        return _images(source, config)
    finally:
        source.close()


def _images(source: Source, config: RunConfig) -> Images:
    classes, train, test = _index(source)
    mode, size = _mode(source, train.names), config.image_size or _size(source, train.names[0])
    if not test.names:
        held = held_out(train.labels, config, classes)
        train, test = train.chosen(~held), train.chosen(held)
    train_images, test_images = (ImageFiles(source, part.names, mode, size) for part in (train, test))
    small = (len(train_images) + len(test_images)) * len(mode) * size * size <= LARGEST_IN_MEMORY_BYTES
    return Images(
        train_images=_in_memory(train_images, "training") if small else train_images,
        train_labels=train.labels,
        test_images=_in_memory(test_images, "test") if small else test_images,
        test_labels=test.labels,
        classes=classes,
    )


def _source(path: Path) -> Source:
    if os.path.isdir(path):  # unlike Path's, false for what the system refuses to look at
        return FolderSource(path)
    if not os.path.isfile(path):
        raise DatasetError(
            f"dataset_path is {str(path)!r}, which does not exist as a file or folder; give a folder or a .zip."
        )
    try:
        return ZipSource(path, zipfile.ZipFile(path))
    except OSError as error:
        raise DatasetError(f"dataset_path is {str(path)!r}, which cannot be read ({error}).") from error
    except (zipfile.BadZipFile, NotImplementedError, ValueError) as error:
        raise DatasetError(
            f"{path.name} is no .zip file ({error}); give a folder or a .zip with a folder of images per class."
        ) from error


def _index(source: Source) -> tuple[list[str], _Part, _Part]:
    """Classes, training and test files (none: to be split). A folder around everything is looked through."""
    where = source.path.name
    entries = [(name, PurePosixPath(name.replace("\\", "/")).parts) for name in source.names()]
    folders = [parts for name, parts in entries if name.endswith("/")]
    files = [(name, parts) for name, parts in entries if not name.endswith("/")]
    tops = {parts[0] for _, parts in files}
    while len(tops) == 1 and not tops & {"train", "test"} and any(len(parts) > 2 for _, parts in files):
        folders = [parts[1:] for parts in folders]
        files = [(name, parts[1:]) for name, parts in files]
        tops = {parts[0] for _, parts in files if len(parts) > 1}
    in_parts = bool(tops & {"train", "test"})
    found: dict[str, dict[str, list[str]]] = {"train": {}, "test": {}}
    for name, parts in files:
        if in_parts and len(parts) > 1 and parts[0] not in found:
            raise DatasetError(f"{where} has a folder {parts[0]!r} beside train/ and test/; move it elsewhere.")
        part = found[parts[0]] if in_parts and len(parts) > 1 else found["train"]
        inside = parts[1:] if in_parts else parts
        if len(inside) > 2:
            raise DatasetError(f"{name!r} in {where} lies in a folder inside a class. {EXPECTED}")
        if len(inside) == 2:  # else it lies beside the class folders
            part.setdefault(inside[0], []).append(name)
    classes = sorted(found["train"])
    if not classes:
        raise DatasetError(f"{where} has no images in {'train/' if in_parts else ''}<class>/. {EXPECTED}")
    for parts in folders:
        if not 1 <= len(parts) <= 1 + in_parts:
            continue
        part = found.get(parts[0], {}) if in_parts else found["train"]
        if parts[-1] not in part and (len(parts) == 1 + in_parts or not part):
            raise DatasetError(f"{where} has no images in {'/'.join(parts)}/; add some, or remove the folder.")
    if len(classes) == 1:
        raise DatasetError(f"{where} has one class, {classes[0]!r}; training needs two or more.")
    unknown = sorted(set(found["test"]) - set(classes))
    if unknown:
        raise DatasetError(f"{where} has test/{unknown[0]}/ but no train/{unknown[0]}/; a class needs both.")
    return classes, _part(found["train"], classes), _part(found["test"], classes)


def _part(found: dict[str, list[str]], classes: list[str]) -> _Part:
    entries = [(name, label) for label, entry in enumerate(classes) for name in sorted(found.get(entry, []))]
    return _Part([name for name, _ in entries], torch.tensor([label for _, label in entries], dtype=torch.long))


def _mode(source: Source, names: list[str]) -> str:
    sample = names[:: max(1, len(names) // 100)]
    return "L" if all(opened(source, name).mode in ("1", "L", "LA", "I;16", "I;16B") for name in sample) else "RGB"


def _size(source: Source, name: str) -> int:
    size, largest = min(opened(source, name).size), FIELDS["image_size"].metadata["high"]
    if size > largest:
        raise DatasetError(
            f"{name!r} in {source.path.name} has {size:,} pixels a side, and image_size is 0, which keeps that; "
            f"choose an image_size up to {largest}."
        )
    return size


def _in_memory(files: ImageFiles, part: str) -> Tensor:
    images = torch.empty(files.shape, dtype=torch.uint8)
    with ThreadPoolExecutor(max_workers=os.cpu_count()) as pool:
        decoding = pool.map(files.decoded, files.names)
        bar = tqdm(decoding, f"reading {part} images", total=len(files), unit="image", mininterval=1)
        for place, pixels in enumerate(bar):
            images[place] = torch.from_numpy(pixels)
    return images
