"""A folder or a zip as a source of image files: found and checked by name and size, and read.

A zip is read in place, never unpacked: no entry can be written outside a folder, and one whose name tries to is refused
by name. Links may stay within their folder, but not leave it.
"""

import os
import stat
import zipfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import Any, Protocol

from comet_core.datasets.base import DatasetError

SUFFIXES = {".jpg", ".jpeg", ".png", ".bmp", ".gif", ".tif", ".tiff", ".webp"}
LARGEST_FILE_BYTES = 64 * 2**20  # of one image file, unpacked: a zip can claim anything


class Source(Protocol):
    """Where image files are read from, by name. It is pickled into other processes."""

    path: Path

    def names(self) -> Iterator[str]:
        """Names of folders, ending in a slash, and of image files, hidden ones left out.

        Raises DatasetError for what must not be read.
        """
        ...

    def read(self, name: str) -> bytes: ...

    def close(self) -> None:
        """Let go of what is open; reading opens it again."""
        ...


def is_image(name: str) -> bool:
    parts = PurePosixPath(name.replace("\\", "/")).parts
    return bool(parts) and not is_hidden(parts) and PurePosixPath(parts[-1]).suffix.lower() in SUFFIXES


def is_hidden(parts: Iterable[str]) -> bool:
    return any(part.startswith(".") or part == "__MACOSX" for part in parts)


@dataclass
class FolderSource:
    path: Path

    def names(self) -> Iterator[str]:
        def refuse(error: OSError) -> None:
            raise DatasetError(f"{error.filename} cannot be read ({error.strerror}); allow it or move it elsewhere.")

        root = self.path.resolve()
        for folder, subfolders, files in os.walk(root, onerror=refuse):
            subfolders[:] = [name for name in subfolders if not is_hidden([name])]
            for name in subfolders:
                if (Path(folder) / name).is_symlink():
                    raise DatasetError(f"{Path(folder, name)} is a link to a folder; copy the images into {self.path}.")
                yield f"{Path(folder, name).relative_to(root).as_posix()}/"
            for file in files:
                found = Path(folder, file)
                name = found.relative_to(root).as_posix()
                if is_image(name):
                    _check_file(found, root)
                    yield name

    def read(self, name: str) -> bytes:
        return (self.path / name).read_bytes()

    def close(self) -> None:
        pass


def _check_file(found: Path, root: Path) -> None:
    try:
        if found.is_symlink() and not found.resolve(strict=True).is_relative_to(root):
            raise DatasetError(f"{found} is a link that leaves {root}; copy the image into the folder.")
        status = found.stat()
    except (OSError, RuntimeError) as error:  # RuntimeError: a loop of links, before Python 3.13
        raise DatasetError(f"{found} cannot be read ({error}); replace or remove it.") from error
    if not stat.S_ISREG(status.st_mode):
        raise DatasetError(f"{found} is no regular file; replace or remove it.")
    _check_size(str(found), status.st_size)


def _check_size(name: str, num_bytes: int) -> None:
    if num_bytes > LARGEST_FILE_BYTES:
        raise DatasetError(f"{name} has {num_bytes:,} bytes; allowed for one image: {LARGEST_FILE_BYTES:,}.")


@dataclass
class ZipSource:
    path: Path
    _archive: zipfile.ZipFile | None = field(default=None, repr=False)

    def names(self) -> Iterator[str]:
        zip_name = self.path.name
        for entry in self._opened().infolist():
            name = PureWindowsPath(entry.filename)  # it knows both kinds of slash, and drives
            if name.anchor or ".." in name.parts:
                raise DatasetError(
                    f"{zip_name} has an entry {entry.filename!r} that leaves its folder; pack the images without it."
                )
            if entry.is_dir() and not is_hidden(name.parts):
                yield entry.filename
            if entry.is_dir() or not is_image(entry.filename):
                continue
            if entry.flag_bits & 1:
                raise DatasetError(f"{entry.filename!r} in {zip_name} is encrypted; pack it without a password.")
            if entry.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
                raise DatasetError(f"{entry.filename!r} in {zip_name} is neither stored nor deflated; pack it so.")
            _check_size(f"{entry.filename!r} in {zip_name}", entry.file_size)
            yield entry.filename

    def read(self, name: str) -> bytes:
        entry = self._opened().getinfo(name)
        with self._opened().open(entry) as file:
            return file.read(entry.file_size + 1)  # without a number it would unpack more than the entry declares

    def _opened(self) -> zipfile.ZipFile:
        if self._archive is None:
            self._archive = zipfile.ZipFile(self.path)
        return self._archive

    def close(self) -> None:
        if self._archive is not None:
            self._archive.close()
            self._archive = None

    def __getstate__(self) -> dict[str, Any]:
        return {"path": self.path, "_archive": None}  # another process opens its own
