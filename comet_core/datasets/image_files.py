"""Image files decoded when asked for: one mode, one square size.

What Pillow and zipfile raise for damaged files is nearly anything; all of it becomes a sentence that names the file.
"""

import io
from dataclasses import dataclass

import numpy as np
from PIL import Image, UnidentifiedImageError

from comet_core.datasets.base import DatasetError
from comet_core.datasets.image_sources import Source

MOST_PIXELS = 2**26  # of one image: a small file can claim any number


def opened(source: Source, name: str) -> Image.Image:
    """The image, its header read and its size checked. Raises DatasetError."""
    try:
        image = Image.open(io.BytesIO(source.read(name)))
    except Exception as error:
        raise _unreadable(source, name, error) from error
    if image.width * image.height > MOST_PIXELS:
        raise DatasetError(
            f"{name!r} in {source.path.name} has {image.width:,} x {image.height:,} pixels; allowed: {MOST_PIXELS:,}."
        )
    return image


def _unreadable(source: Source, name: str, error: Exception) -> DatasetError:
    reason = "not a picture that Pillow knows" if isinstance(error, UnidentifiedImageError) else error
    return DatasetError(f"{name!r} in {source.path.name} is no readable image ({reason}); replace or remove it.")


@dataclass
class ImageFiles:
    """Images as `base.StreamedImages`: grey (mode "L") or colour ("RGB"), scaled to squares of `size` pixels."""

    source: Source
    names: list[str]
    mode: str
    size: int

    @property
    def shape(self) -> tuple[int, int, int, int]:
        return len(self.names), len(self.mode), self.size, self.size

    def __len__(self) -> int:
        return len(self.names)

    def __getitems__(self, places: list[int]) -> np.ndarray | DatasetError:
        try:
            return np.stack([self.decoded(self.names[place]) for place in places])
        except DatasetError as error:
            return error

    def decoded(self, name: str) -> np.ndarray:
        """uint8 (C, S, S). Raises DatasetError."""
        image = opened(self.source, name)
        try:
            if image.mode.startswith("I;16"):  # Pillow would clip its values
                image.load()
                image = Image.fromarray((np.asarray(image) >> 8).astype(np.uint8))
            if "transparency" in image.info:
                image = image.convert("RGBA")
            image = image.convert(self.mode)
            if image.size != (self.size, self.size):
                image = image.resize((self.size, self.size), Image.Resampling.BILINEAR)
        except Exception as error:
            raise _unreadable(self.source, name, error) from error
        return np.asarray(image).reshape(self.size, self.size, -1).transpose(2, 0, 1).copy()
