"""Map of the package; `attach` and `__version__`, loaded lazily so that importing stays free of torch.

config, metrics, launcher       what a run is and what it reports; stdlib only, safe for a web process
session, activations, operators the saved-tensor engine behind `attach`
controllers, error_models       which error bound each layer gets, and why
codecs/, policies/              ways to store a tensor, ways to spend less memory
models/, datasets/, trainer     what `python -m comet_core train` trains
"""

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"
__all__ = ["__version__", "attach", "codecs"]

if TYPE_CHECKING:
    from comet_core import codecs as codecs
    from comet_core.session import attach


def __getattr__(name: str) -> Any:
    if name == "attach":
        return importlib.import_module("comet_core.session").attach
    if name == "codecs":
        return importlib.import_module("comet_core.codecs")
    raise AttributeError(f"module 'comet_core' has no attribute {name!r}")
