"""Ways to spend less memory on saved tensors, by name."""

from comet_core.policies.base import MemoryPolicy
from comet_core.policies.baseline import BaselinePolicy
from comet_core.policies.compress import CompressPolicy

POLICIES: dict[str, type[MemoryPolicy]] = {"baseline": BaselinePolicy, "compress": CompressPolicy}
