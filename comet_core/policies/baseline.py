"""Plain training: saved tensors are counted, not changed."""

from comet_core.policies.base import MemoryPolicy


class BaselinePolicy(MemoryPolicy):
    """Bit-identical to no wrapper at all."""

    name = "baseline"
