"""Which storages that were saved for backward are still alive, who keeps them, and why.

Compression frees memory only where everybody lets go of the original. `session.audit()`, called between forward and
backward, looks for each storage that was saved: at the handles of the session, which say who saved it and why it is
kept as it is; at the Python objects that lead to it (hooks, attributes of modules, variables of running functions); and
at the nodes of graphs that are still alive, for operators outside the model. It walks all of Python's objects, which
takes a tenth of a second or more: a tool to ask with, not for every step.
"""

import functools
import gc
import inspect
import itertools
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from types import FunctionType, MethodType, ModuleType
from typing import Any

from torch import Tensor, UntypedStorage, nn
from torch.autograd.graph import Node

from comet_core.operators import storage_of
from comet_core.saved_records import Entry, ExactHandle, Ledger, RecordHandle, Saver, ShapeHandle

MAX_DEPTH = 4  # of lists in attributes of objects in variables ...
MAX_ITEMS = 1000  # of a container; a data set's million entries are not looked through
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_Handle = ExactHandle | ShapeHandle | RecordHandle


@dataclass(frozen=True, slots=True)
class Keeper:
    """Who keeps a storage alive. `kind`: "saver", "hook", "module", "variable", "graph" or "unknown"."""

    kind: str
    name: str
    why: str


@dataclass(frozen=True, slots=True)
class AliveStorage:
    """A storage that was saved for backward and is still alive."""

    num_bytes: int
    savers: tuple[Saver, ...]
    keepers: tuple[Keeper, ...]


class StorageAudit(list[AliveStorage]):
    """The storages, largest first; as text a table with a line for each keeper."""

    def __str__(self) -> str:
        if not self:
            return "nothing: no storage that was saved for backward is alive"
        rows = [("bytes", "saved by", "kept by", "why")]
        for storage in self:
            saved_by = ", ".join(f"{saver.operator} in {saver.layer or 'the model'}" for saver in storage.savers)
            first = (f"{storage.num_bytes:,}", saved_by)
            for keeper in storage.keepers:
                rows.append((*first, keeper.name, keeper.why))
                first = ("", "")
        widths = [max(len(row[column]) for row in rows) for column in range(3)]
        return "\n".join(
            "  ".join([bytes_.rjust(widths[0]), saved_by.ljust(widths[1]), kept_by.ljust(widths[2]), why]).rstrip()
            for bytes_, saved_by, kept_by, why in rows
        )


def audit(model: nn.Module, ledger: Ledger) -> StorageAudit:
    """The storages of which this session's handles, wherever they are, keep or once kept something."""
    objects = gc.get_objects()
    handles: dict[int, list[_Handle]] = {}
    entries: dict[int, Entry] = {}
    for found in objects:
        if type(found) in (ExactHandle, ShapeHandle, RecordHandle):
            entry: Entry | None = found.entry
            if entry is not None and entry.ledger is ledger and not entry.reference.expired():
                entries[entry.reference.cdata] = entry
                handles.setdefault(entry.reference.cdata, []).append(found)
    if not handles:
        return StorageAudit()
    of_savers = {id(handle.tensor) for some in handles.values() for handle in some if isinstance(handle, ExactHandle)}
    others: dict[int, list[Tensor]] = {identity: [] for identity in handles}
    nodes: list[Node] = []
    for found in objects:
        if issubclass(type(found), Tensor) and id(found) not in of_savers:
            storage = storage_of(found)
            if storage is not None and storage._cdata in others:
                others[storage._cdata].append(found)
            if found.grad_fn is not None:
                nodes.append(found.grad_fn)
    del objects
    wanted = {id(tensor): identity for identity, tensors in others.items() for tensor in tensors}
    keepers = _python_keepers(model, wanted)
    for identity, keeper in _graph_keepers(nodes, wanted, set(handles)):
        keepers.setdefault(identity, []).append(keeper)
    return StorageAudit(
        sorted(
            (
                _alive(entries[identity], some, keepers.get(identity, []), others[identity])
                for identity, some in handles.items()
            ),
            key=lambda storage: -storage.num_bytes,
        )
    )


def _alive(entry: Entry, handles: list[_Handle], others: list[Keeper], tensors: list[Tensor]) -> AliveStorage:
    savers = {handle.saver for handle in handles if handle.saver is not None}
    keepers = [
        Keeper("saver", f"{saver.operator} in {saver.layer or 'the model'}", saver.why)
        for handle in handles
        if isinstance(handle, ExactHandle) and (saver := handle.saver) is not None
    ]
    keepers += others
    if not keepers:
        owners = [owner for tensor in tensors for owner in gc.get_referrers(tensor) if owner is not tensors]
        kinds = sorted({type(owner).__name__ for owner in owners})
        why = f"held by a Python object ({', '.join(kinds)})" if kinds else "nothing in Python leads to it"
        keepers.append(Keeper("unknown", "unknown", why))
    ordered = sorted(savers, key=lambda saver: (saver.layer, saver.operator))
    return AliveStorage(entry.num_bytes, tuple(ordered), tuple(dict.fromkeys(keepers)))


def _python_keepers(model: nn.Module, wanted: dict[int, int]) -> dict[int, list[Keeper]]:
    """By storage: what in modules, their hooks and the variables of running functions leads to the wanted tensors."""
    keepers: dict[int, list[Keeper]] = {}

    def look(kind: str, name: str, why: str, value: Any) -> None:
        for found in set(_reachable(value, wanted, set(), MAX_DEPTH)):
            keepers.setdefault(wanted[found], []).append(Keeper(kind, name, why))

    for path, module in model.named_modules():
        place = path or "the model"
        for hooks in _HOOKS:
            for hook in getattr(module, hooks).values():
                name = f"{getattr(hook, '__qualname__', type(hook).__name__)} on {place}"
                look("hook", name, "a hook keeps it", (hook, _globals(hook)))
        for attribute, value in vars(module).items():
            if attribute not in ("_parameters", "_buffers", "_modules", *_HOOKS):
                look("module", f"{path}.{attribute}".lstrip("."), "an attribute of the module keeps it", value)
    for place, function, variables in _running_functions():
        for name, value in variables.items():
            look("variable", name, f"a variable of {function} ({place})", value)
    return keepers


def _running_functions() -> Iterator[tuple[str, str, dict[str, Any]]]:
    """Place, name and variables of every function that runs in any thread, but for the audit's own."""
    frames = list(sys._current_frames().values())
    while frames:
        frame = frames.pop()
        if frame.f_back is not None:
            frames.append(frame.f_back)
        if frame.f_globals.get("__name__") in (__name__, "comet_core.session"):
            continue
        code, variables = frame.f_code, frame.f_locals
        yield f"{code.co_filename.rpartition('/')[2]}:{frame.f_lineno}", code.co_name, dict(variables)
        if code.co_flags & inspect.CO_OPTIMIZED and isinstance(variables, dict):
            variables.clear()  # before Python 3.13 a copy, which would keep what it holds until the function ends
        del frame  # it may be this one, which would keep itself and all of its variables


def _reachable(value: Any, wanted: dict[int, int], seen: set[int], depth: int) -> Iterator[int]:
    """Ids of wanted tensors to which the value leads through containers, closures and attributes; not into modules."""
    if id(value) in wanted:
        yield id(value)
    if depth == 0 or id(value) in seen or isinstance(value, nn.Module | ModuleType | type | str | bytes | int | float):
        return
    seen.add(id(value))
    inside: Iterable[Any] = ()
    if isinstance(value, dict):
        inside = value.values()
    elif isinstance(value, list | tuple | set):
        inside = value
    elif isinstance(value, functools.partial):
        inside = (value.func, *value.args, *value.keywords.values())
    elif isinstance(value, FunctionType):
        inside = (*_cells(value), *(value.__defaults__ or ()))
    elif isinstance(value, MethodType):
        inside = (value.__self__, value.__func__)
    elif not isinstance(value, Tensor) and hasattr(value, "__dict__"):
        inside = list(vars(value).values())
    for entry in itertools.islice(inside, MAX_ITEMS):
        yield from _reachable(entry, wanted, seen, depth - 1)


def _globals(hook: Any) -> list[Any]:
    """The global variables that a hook's own code names."""
    if not isinstance(hook, FunctionType):
        return []
    return [hook.__globals__[name] for name in hook.__code__.co_names if name in hook.__globals__]


def _cells(function: FunctionType) -> list[Any]:
    cells = []
    for cell in function.__closure__ or ():
        try:
            cells.append(cell.cell_contents)
        except ValueError:  # not assigned yet
            continue
    return cells


def _graph_keepers(starts: list[Node], wanted: dict[int, int], storages: set[int]) -> Iterator[tuple[int, Keeper]]:
    """Nodes of living graphs that keep a storage past this session's hooks: operators outside the model, and functions
    of the user's own that put tensors on their context without saving them."""
    seen: set[Node] = set()
    while starts:
        node = starts.pop()
        if node in seen:
            continue
        seen.add(node)
        starts += [following for following, _ in node.next_functions if following is not None]
        for found in set(_reachable(getattr(node, "__dict__", {}), wanted, set(), MAX_DEPTH)):
            yield wanted[found], Keeper("graph", node.name(), "an attribute of its context keeps it, unsaved")
        for storage in _saved_past_hooks(node):
            if storage._cdata in storages:
                yield storage._cdata, Keeper("graph", node.name(), "an operator outside the model saved it too")


def _saved_past_hooks(node: Node) -> Iterator[UntypedStorage]:
    for name in dir(node):
        if not name.startswith("_raw_saved_"):
            continue
        try:
            saved = getattr(node, name)
            values = [one.data for one in (saved if isinstance(saved, list | tuple) else [saved])]
        except (AttributeError, RuntimeError):  # backward has freed it
            continue
        for value in values:
            storage = storage_of(value) if isinstance(value, Tensor) else None
            if storage is not None:
                yield storage
