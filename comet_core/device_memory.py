"""Current and peak bytes on CPU and CUDA, one interface, the source of each figure in its name.

Linux keeps a high-water mark of resident memory for each process and sets it back when "5" is written to
/proc/self/clear_refs: that gives each iteration a peak of its own. Memory sampled between steps would miss it, and
getrusage's `ru_maxrss` only ever grows. Where there is nothing better (macOS) `ru_maxrss` is given all the same, and
`source` says so. Child processes (a DataLoader's workers) and theirs count with what they share with nobody, at the
moment of asking: their resident size would count forked pages twice.

What the driver gives (`device_used_bytes`: CUDA contexts, other libraries and other processes too) has no high-water
mark; it is that of the moment of asking.
"""

import platform
import resource
from contextlib import suppress
from pathlib import Path

import torch

_PROCESS = Path("/proc/self")


def process_rss_bytes() -> int:
    """Resident memory of this process now, with what its children hold alone: counted as `peak_rss_bytes` is."""
    with suppress(OSError):
        return int((_PROCESS / "statm").read_text().split()[1]) * resource.getpagesize() + _children_bytes(_PROCESS)
    import psutil  # here, because on Linux nothing needs it

    return int(psutil.Process().memory_info().rss)


def peak_rss_source() -> str:
    """Where `peak_rss_bytes` comes from here, and since when it counts. Sets the high-water mark back to find out."""
    if _reset_high_water_mark():
        return "VmHWM of the process since the last reset, with what its children hold alone"
    return "ru_maxrss of the process since its start"


class DeviceMemory:
    """Memory of this process and of `device` (a torch.device or its name); for "cuda" torch must have that GPU.

    `source` is `peak_rss_source()`.
    """

    def __init__(self, device: torch.device | str) -> None:
        self.device = torch.device(device)
        self.source = peak_rss_source()

    def reset_peak(self) -> None:
        """Peaks count from here: what is held now is the new peak."""
        _reset_high_water_mark()
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)

    def peak(self) -> dict[str, int | None]:
        """Largest since the last reset, named like the fields of StepMetrics; None: there is no such memory.

        `device_used_bytes` is that of now.
        """
        cuda = self.device.type == "cuda"
        free, total = torch.cuda.mem_get_info(self.device) if cuda else (0, 0)
        return {
            "peak_rss_bytes": _peak_rss_bytes(),
            "peak_allocated_bytes": torch.cuda.max_memory_allocated(self.device) if cuda else None,
            "peak_reserved_bytes": torch.cuda.max_memory_reserved(self.device) if cuda else None,
            "device_used_bytes": total - free if cuda else None,
        }

    def current(self) -> dict[str, int | None]:
        """What is held now; None: there is no such memory."""
        cuda = self.device.type == "cuda"
        return {
            "rss_bytes": process_rss_bytes(),
            "allocated_bytes": torch.cuda.memory_allocated(self.device) if cuda else None,
            "reserved_bytes": torch.cuda.memory_reserved(self.device) if cuda else None,
        }


def _reset_high_water_mark() -> bool:
    """False where the system has no such thing (macOS) or forbids it (some sandboxes)."""
    try:
        (_PROCESS / "clear_refs").write_text("5")
    except OSError:
        return False
    return True


def _peak_rss_bytes() -> int:
    with suppress(OSError):
        for line in (_PROCESS / "status").read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024 + _children_bytes(_PROCESS)
    # bytes on macOS, KiB elsewhere
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if platform.system() == "Darwin" else 1024)


def _children_bytes(process: Path) -> int:
    """What the processes below hold that nobody else does. Nearly free where there are none: it is asked every step."""
    total = 0
    for listing in process.glob("task/*/children"):
        with suppress(OSError):  # the thread or the child has ended meanwhile
            for child in listing.read_text().split():
                below = Path("/proc", child)
                mapped = (below / "smaps_rollup").read_text().splitlines()
                total += sum(int(line.split()[1]) * 1024 for line in mapped if line.startswith("Private_"))
                total += _children_bytes(below)
    return total
