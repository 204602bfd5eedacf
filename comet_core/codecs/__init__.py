"""Ways to store a tensor: the registry of codecs and `get_codec`."""

import inspect
from typing import Any

from comet_core.codecs.base import Codec
from comet_core.codecs.cast import CastCodec
from comet_core.codecs.dct import DctCodec
from comet_core.codecs.error_bounded import ErrorBoundedCodec
from comet_core.codecs.group_quantized import GroupQuantizedCodec
from comet_core.codecs.interval_mask import IntervalMaskCodec
from comet_core.codecs.lossless import LosslessCodec
from comet_core.codecs.sign_mask import SignMaskCodec
from comet_core.codecs.sparse import SparseCodec
from comet_core.codecs.window_index import WindowIndexCodec
from comet_core.config import shown

CODECS: dict[str, type[Codec]] = {
    "error_bounded": ErrorBoundedCodec,
    "group_quantized": GroupQuantizedCodec,
    "dct": DctCodec,
    "cast": CastCodec,
    "sparse": SparseCodec,
    "lossless": LosslessCodec,
    "sign_mask": SignMaskCodec,
    "interval_mask": IntervalMaskCodec,
    "window_index": WindowIndexCodec,
}


def get_codec(name: str, **params: Any) -> Codec:
    """A codec by its name in CODECS. Raises ValueError for an unknown name, and for wrong or missing parameters."""
    if not isinstance(name, str) or name not in CODECS:
        raise ValueError(f"codec is {shown(name)}; allowed: {', '.join(CODECS)}.")
    known = inspect.signature(CODECS[name]).parameters
    missing = [key for key, param in known.items() if param.default is param.empty and key not in params]
    if missing or not params.keys() <= known.keys():
        raise ValueError(
            f"parameters of codec {name!r} are {', '.join(params) or 'none'}; allowed: {', '.join(known) or 'none'}"
            + (f"; missing: {', '.join(missing)}." if missing else ".")
        )
    return CODECS[name](**params)
