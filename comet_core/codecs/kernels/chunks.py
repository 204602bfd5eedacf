"""The thread pool that runs one task a chunk, and the zstd stage, one compressor a thread.

Chunks make large tensors parallel and keep a task's working set in the cache. Everything slow in a task (numba
kernels, zstd) releases the GIL. The caller works too: waking a thread costs as much as a small chunk. The pool is made
on first use with torch's number of threads, and made anew after a fork, because threads do not survive one. Tasks must
not call `run_chunks` themselves.

Without the library zstandard the bytes stay as they are; only this file imports it.
"""

import os
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait
from typing import Any, TypeVar

import numpy as np
import torch

from comet_core.codecs.base import DamagedRecord

try:
    import zstandard
except ImportError:
    zstandard = None  # type: ignore[assignment]

Result = TypeVar("Result")

CHUNK_VALUES = 1 << 18
"""Values a chunk on the CPU."""
_MOST_EXPANSION = 1 << 15  # of zstd: a block of 2**17 equal bytes takes four

_local = threading.local()
_pool: ThreadPoolExecutor | None = None
_pool_lock = threading.Lock()


def _forget_pool() -> None:
    global _pool, _pool_lock
    _pool, _pool_lock = None, threading.Lock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_pool)


def run_chunks(task: Callable[[int], Result], num_chunks: int, *, threaded: bool) -> list[Result]:
    """task(0), ..., task(num_chunks - 1), results in order; where `threaded`, shared by the caller and the pool.

    Not for tasks made of torch operations: these have threads of their own, and on a GPU they belong on the stream of
    the calling thread. Where tasks raise, one of the exceptions is raised when none runs any more.
    """
    global _pool
    num_threads = min(torch.get_num_threads(), num_chunks) if threaded else 1
    if num_threads <= 1:
        return [task(chunk) for chunk in range(num_chunks)]
    with _pool_lock:
        if _pool is None:
            _pool = ThreadPoolExecutor(torch.get_num_threads(), thread_name_prefix="comet-codec")
        pool = _pool
    results: dict[int, Result] = {}
    chunks = iter(range(num_chunks))

    def work() -> None:
        for chunk in chunks:  # next() of an iterator of C is one step for all threads
            results[chunk] = task(chunk)

    helpers = [pool.submit(work) for _ in range(num_threads - 1)]
    try:
        work()
    finally:
        wait(helpers)
    for helper in helpers:
        helper.result()
    return [results[chunk] for chunk in range(num_chunks)]


def scratch(purpose: str, num_bytes: int) -> np.ndarray:
    """This thread's memory for a purpose, (num_bytes,) uint8 with anything in it, the same again at each call.

    Fresh memory costs a page fault for each 4 KiB, which takes as long as coding that much. A thread keeps the most it
    was asked for.
    """
    buffers: dict[str, np.ndarray] = _local.__dict__.setdefault("scratch", {})
    if purpose not in buffers or len(buffers[purpose]) < num_bytes:
        buffers[purpose] = np.empty(num_bytes, np.uint8)
    return buffers[purpose][:num_bytes]


def compress(data: Any) -> bytes:
    """The contiguous buffer `data`, compressed where that makes it smaller, else as it is."""
    raw = memoryview(data).cast("B")
    if zstandard is None or len(raw) == 0:
        return bytes(raw)
    if not hasattr(_local, "compressor"):
        # Packed codes hardly repeat: nearly all of the gain is zstd's entropy coder. Looking for long repeats only is
        # 20 % faster than plain level 1, and up to 5 % smaller at coarse bounds.
        settings = zstandard.ZstdCompressionParameters.from_level(1, window_log=18, hash_log=10, min_match=7)
        _local.compressor = zstandard.ZstdCompressor(compression_params=settings)
    compressed: bytes = _local.compressor.compress(raw)
    return compressed if len(compressed) < len(raw) else bytes(raw)


def check_holds(data: Any, size_bytes: int) -> None:
    """Raise DamagedRecord unless `data` may be what compress gave for `size_bytes` bytes, before memory is taken."""
    if not isinstance(data, bytes) or len(data) > size_bytes:
        found = f"{len(data)} bytes" if isinstance(data, bytes) else type(data).__name__
        raise DamagedRecord(f"a part is {found} where at most {size_bytes} bytes belong")
    if len(data) < size_bytes:
        if zstandard is None:
            raise RuntimeError(
                "this record was compressed with zstandard, which is missing here; pip install zstandard."
            )
        try:
            claimed_bytes = zstandard.frame_content_size(data)
        except zstandard.ZstdError as error:
            raise DamagedRecord(f"a part does not decompress ({error})") from error
        if claimed_bytes != size_bytes or size_bytes > len(data) * _MOST_EXPANSION:
            raise DamagedRecord(
                f"a part of {len(data)} bytes claims to hold {claimed_bytes}; {size_bytes} belong there"
            )


def decompress(data: Any, size_bytes: int) -> np.ndarray:
    """The `size_bytes` bytes that compress was given, as a read-only uint8 array. Raises DamagedRecord for others."""
    check_holds(data, size_bytes)
    if len(data) < size_bytes:
        if not hasattr(_local, "decompressor"):
            _local.decompressor = zstandard.ZstdDecompressor()
        try:
            data = _local.decompressor.decompress(data, allow_extra_data=False)
        except zstandard.ZstdError as error:
            raise DamagedRecord(f"a part does not decompress ({error})") from error
    return np.frombuffer(data, np.uint8)
