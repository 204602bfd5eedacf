"""Read side: plain functions that return DataFrames, already downsampled.

Every function reads and nothing else. Dtypes follow the columns: numbers that may be missing are float64 with NaN for
"not measured", ids are Int64, flags bool, the rest objects. A measured NaN or infinity comes back as itself; which is
which of the two kinds of NaN says the column `nonfinite` ("train_loss=nan"), None where all numbers were finite.

Lists come from the summary rows and never scan metrics. A curve of more rows than `max_points` is thinned by buckets of
steps; each asked column keeps its smallest and largest value of every bucket, so that no peak is lost.
"""

import json
import re
from collections.abc import Sequence
from dataclasses import fields
from typing import Any

import numpy as np
import pandas as pd
from sqlalchemy import Boolean, Double, Select, Text, and_, func, or_, select

from comet_core.config import FIELDS
from comet_core.metrics import AuditMetrics, ControllerEvent, EvalMetrics, LayerMetrics, StepMetrics
from storage.database import session
from storage.runs import log_path
from storage.tables import (
    LIVE,
    STATUSES,
    AuditRow,
    Base,
    EvalRow,
    EventRow,
    LayerRow,
    Run,
    RunSummary,
    SchedulerLease,
    StepRow,
    join_nonfinite,
)

_FILTERS = ("status", "dataset", "model", "policy")
_HEAVY = ("config", "environment")  # texts that lists leave out
_ACCUMULATORS = ("epoch_", "num_timed_steps", "run_id")  # of the summary: nothing to show


def runs_frame(
    *, status: Sequence[str] = (), dataset: str = "", model: str = "", policy: str = "", search: str = "",
    run_ids: Sequence[int] | None = None, limit: int = 50, offset: int = 0,
) -> pd.DataFrame:  # fmt: skip
    """A page of runs, the newest first: the columns of the run and of its summary. Empty filters let everything pass.

    `search` is looked for in the name; a number finds the run of this id too. `run_ids` keeps only these.
    """
    chosen = _filtered(_overview(), status, dataset, model, policy, search, run_ids)
    return _frame(chosen.order_by(Run.id.desc()).limit(limit).offset(offset))


def count_runs(
    *, status: Sequence[str] = (), dataset: str = "", model: str = "", policy: str = "", search: str = "",
    run_ids: Sequence[int] | None = None,
) -> int:  # fmt: skip
    """How many runs the same filters let pass."""
    with session() as reading:
        counted = _filtered(select(func.count(Run.id)), status, dataset, model, policy, search, run_ids)
        return reading.scalar(counted) or 0


def run(run_id: int) -> dict[str, Any] | None:
    """A run with its summary in one dict, `config` and `environment` as dicts; None where there is no such run."""
    columns = [*_overview().selected_columns, Run.config, Run.environment]
    with session() as reading:
        found = reading.execute(select(*columns).join_from(Run, RunSummary).where(Run.id == run_id)).mappings().first()
    if found is None:
        return None
    texts = {name: json.loads(found[name] or "{}") for name in _HEAVY}
    return {**found, **join_nonfinite(found["nonfinite"]), **texts}


def step_frame(
    run_id: int, columns: Sequence[str] | None = None, *, after_step: int = 0, max_points: int = 2000
) -> pd.DataFrame:
    """`step` and the asked fields of StepMetrics (None: all), in order of step, for steps above `after_step`.

    At most `max_points` rows for each asked column; first and last row and every column's extremes are among them.
    `.attrs["total"]` is the number of rows before thinning. Raises ValueError for what is no field of StepMetrics.
    """
    allowed = [entry.name for entry in fields(StepMetrics)]
    wanted = list(dict.fromkeys(["step", *(allowed if columns is None else columns)]))
    unknown = [name for name in wanted if name not in allowed]
    if unknown:
        raise ValueError(f"columns holds {', '.join(unknown)}; allowed: {', '.join(allowed)}.")
    asked = select(*(getattr(StepRow, name) for name in wanted), StepRow.nonfinite)
    frame = _frame(asked.where(StepRow.run_id == run_id, StepRow.step > after_step).order_by(StepRow.step))
    total = len(frame)
    frame = _thin(frame, wanted[1:], max_points)
    frame.attrs["total"] = total
    return frame


def peak_frame(run_ids: Sequence[int]) -> pd.DataFrame:
    """Of each of these runs the step with the largest peak (on the GPU where there is one) of those with known parts.

    Its StepMetrics with `id`, `name` and `start_rss_bytes` of the run, in the order asked for; runs without such a step
    (none yet, or all recorded before parts were) are left out.
    """
    peak = func.coalesce(StepRow.peak_allocated_bytes, StepRow.peak_rss_bytes)
    place = func.row_number().over(partition_by=StepRow.run_id, order_by=(peak.desc(), StepRow.step))
    known = select(StepRow.run_id, StepRow.step, place.label("place")).where(StepRow.other_bytes.is_not(None))
    ranked = known.where(StepRow.run_id.in_(run_ids)).subquery()
    same = and_(ranked.c.run_id == StepRow.run_id, ranked.c.step == StepRow.step, ranked.c.place == 1)
    rows = _metrics(StepRow, StepMetrics).add_columns(Run.id, Run.name, Run.start_rss_bytes)
    return _in_order(_frame(rows.join(ranked, same).join(Run, Run.id == StepRow.run_id)), run_ids)


def eval_frame(run_id: int) -> pd.DataFrame:
    """The fields of EvalMetrics, a row an evaluation, in order of step."""
    return _frame(_metrics(EvalRow, EvalMetrics).where(EvalRow.run_id == run_id).order_by(EvalRow.step))


def layer_frame(run_id: int, step: int | None = None, *, max_steps: int | None = None) -> pd.DataFrame:
    """The fields of LayerMetrics, of one step or of all, in order of step and name ("conv2" before "conv10").

    Of more than `max_steps` recorded steps as many are taken, evenly, with the first and the last.
    """
    rows = _metrics(LayerRow, LayerMetrics).where(LayerRow.run_id == run_id)
    if step is not None:
        rows = rows.where(LayerRow.step == step)
    if max_steps is not None:
        rows = rows.where(LayerRow.step.in_(_some_steps(LayerRow, run_id, max_steps)))
    return _by_layer(_frame(rows), "step", "name")


def layer_names(run_id: int) -> list[str]:
    """The layers in the model's order, as they first appeared; by name where an earlier version recorded the run."""
    first = select(LayerRow.name, func.min(LayerRow.step), func.min(LayerRow.place)).where(LayerRow.run_id == run_id)
    with session() as reading:
        found = reading.execute(first.group_by(LayerRow.name)).all()
    frame = pd.DataFrame(found, columns=["name", "step", "place"]).astype({"place": float})
    return list(_by_layer(frame, "step", "place", "name")["name"])


def audit_frame(run_id: int, max_steps: int = 300) -> pd.DataFrame:
    """The fields of AuditMetrics in order of step and name, of at most `max_steps` steps with the first and the last.

    `.attrs["total"]` is the number of rows of all steps.
    """
    mine = AuditRow.run_id == run_id
    rows = _metrics(AuditRow, AuditMetrics).where(mine, AuditRow.step.in_(_some_steps(AuditRow, run_id, max_steps)))
    frame = _by_layer(_frame(rows), "step", "name")
    with session() as reading:
        frame.attrs["total"] = reading.scalar(select(func.count()).select_from(AuditRow).where(mine)) or 0
    return frame


def event_frame(run_id: int, max_events: int = 2000) -> pd.DataFrame:
    """The fields of ControllerEvent, the latest `max_events` in the order in which they happened.

    `.attrs["total"]` is the number of all.
    """
    mine = EventRow.run_id == run_id
    newest = _metrics(EventRow, ControllerEvent).where(mine).order_by(EventRow.step.desc(), EventRow.place.desc())
    frame = _frame(newest.limit(max_events)).iloc[::-1].reset_index(drop=True)
    with session() as reading:
        frame.attrs["total"] = reading.scalar(select(func.count()).select_from(EventRow).where(mine)) or 0
    return frame


def layers_last(run_id: int) -> pd.DataFrame:
    """The latest row of each layer, in order of name."""
    last = select(LayerRow.name, func.max(LayerRow.step).label("step")).where(LayerRow.run_id == run_id)
    newest = last.group_by(LayerRow.name).subquery()
    same = and_(newest.c.name == LayerRow.name, newest.c.step == LayerRow.step)
    rows = _metrics(LayerRow, LayerMetrics).join(newest, same).where(LayerRow.run_id == run_id)
    return _by_layer(_frame(rows), "name")


def config_differences(run_ids: Sequence[int]) -> pd.DataFrame:
    """The options in which the runs differ: a row an option, a column a run id; an option one lacks is None there."""
    with session() as reading:
        texts = dict(reading.execute(select(Run.id, Run.config).where(Run.id.in_(run_ids))).all())
    configs = {run_id: json.loads(texts[run_id]) for run_id in run_ids if run_id in texts}
    names = dict.fromkeys([*FIELDS, *(name for config in configs.values() for name in config)])
    rows = {name: [config.get(name) for config in configs.values()] for name in names}
    differing = {name: row for name, row in rows.items() if any(value != row[0] for value in row[1:])}
    frame = pd.DataFrame(differing.values(), index=list(differing), columns=list(configs), dtype=object)
    return frame.rename_axis(index="option")


def summary_frame(run_ids: Sequence[int]) -> pd.DataFrame:
    """The columns of `runs_frame`, a row for each of these runs that exists, in the order they were asked for."""
    return _in_order(_frame(_overview().where(Run.id.in_(run_ids))), run_ids)


def trade_off_frame(run_ids: Sequence[int] | None = None) -> pd.DataFrame:
    """Finished runs, all or these, the oldest first, with the columns of `runs_frame`."""
    chosen = _filtered(_overview(), ("finished",), "", "", "", "", run_ids)
    return _frame(chosen.order_by(Run.id))


def log_tail(run_id: int, lines: int = 200) -> str:
    """The last lines that the run's process printed, of progress bars the last state; empty where there is nothing."""
    try:
        with open(log_path(run_id), "rb") as file:
            size = file.seek(0, 2)
            file.seek(max(0, size - 1024 * lines))
            text = file.read().decode(errors="replace")
    except FileNotFoundError:
        return ""
    return "\n".join(line.rstrip("\r").rpartition("\r")[2] for line in text.rstrip("\n").split("\n")[-lines:])


def live_counts() -> dict[str, int]:
    """How many runs are queued, starting, running and stopping; zeros included."""
    waiting = ("queued", *LIVE)
    counted = select(Run.status, func.count()).where(Run.status.in_(waiting)).group_by(Run.status)
    with session() as reading:
        return {**dict.fromkeys(waiting, 0), **dict(reading.execute(counted).all())}


def scheduler_promise() -> float | None:
    """Until when the scheduler has promised to work, in seconds since 1970; in the past, or None: no run will start."""
    with session() as reading:
        return reading.scalar(select(SchedulerLease.expires_at))


def filter_values() -> dict[str, list[str]]:
    """For `status`, `dataset`, `model` and `policy`: the values that some run has."""
    with session() as reading:
        found = {name: set(reading.scalars(select(getattr(Run, name)).distinct())) for name in _FILTERS}
    in_order = [status for status in STATUSES if status in found["status"]]
    return {**{name: sorted(values) for name, values in found.items()}, "status": in_order}


def _overview() -> Select[Any]:
    """Every column of run and summary that a list shows."""
    own = [column for column in Run.__table__.columns if column.name not in _HEAVY]
    summary = [column for column in RunSummary.__table__.columns if not column.name.startswith(_ACCUMULATORS)]
    return select(*own, *summary).join_from(Run, RunSummary)


def _filtered(
    rows: Select[Any], status: Sequence[str], dataset: str, model: str, policy: str, search: str,
    run_ids: Sequence[int] | None,
) -> Select[Any]:  # fmt: skip
    if status:
        rows = rows.where(Run.status.in_(status))
    for column, value in ((Run.dataset, dataset), (Run.model, model), (Run.policy, policy)):
        if value:
            rows = rows.where(column == value)
    if search:
        found = Run.name.icontains(search, autoescape=True)
        number = search.strip().removeprefix("#")
        rows = rows.where(or_(found, Run.id == int(number)) if re.fullmatch("[0-9]{1,9}", number) else found)
    return rows if run_ids is None else rows.where(Run.id.in_(run_ids))


def _metrics(table: type[Base], metric: type) -> Select[Any]:
    return select(*(getattr(table, entry.name) for entry in fields(metric)), table.__table__.c.nonfinite)


def _some_steps(table: type[LayerRow] | type[AuditRow], run_id: int, number: int) -> list[int]:
    """At most so many of the steps that a run has rows of, evenly, the first and the last among them."""
    with session() as reading:
        steps = reading.scalars(select(table.step).where(table.run_id == run_id).distinct().order_by(table.step)).all()
    places = np.linspace(0, len(steps) - 1, min(number, len(steps))).round().astype(int)
    return [steps[place] for place in places]


def _frame(rows: Select[Any]) -> pd.DataFrame:
    """The rows with the dtypes of their columns, numbers that are not finite put back."""
    columns = list(rows.selected_columns)
    with session() as reading:
        found = reading.execute(rows).all()
    values = zip(*found, strict=True) if found else [()] * len(columns)
    frame = pd.DataFrame(
        {column.key: pd.Series(data, dtype=_dtype(column)) for column, data in zip(columns, values, strict=True)}
    )
    for row, nonfinite in frame["nonfinite"].dropna().items():
        for name, value in join_nonfinite(nonfinite).items():
            if name in frame:
                frame.loc[row, name] = value
    return frame


def _in_order(frame: pd.DataFrame, run_ids: Sequence[int]) -> pd.DataFrame:
    return frame.set_index("id", drop=False).loc[[i for i in run_ids if i in set(frame["id"])]].reset_index(drop=True)


def _dtype(column: Any) -> Any:
    if isinstance(column.type, Boolean):
        return "bool"
    if isinstance(column.type, Text):
        return "object"
    if isinstance(column.type, Double) or (column.nullable and not column.key.endswith("id")):
        return "float64"
    return "Int64" if column.nullable else "int64"


def _by_layer(frame: pd.DataFrame, *keys: str) -> pd.DataFrame:
    padded = [re.sub("[0-9]+", lambda number: number[0].zfill(6), name) for name in frame["name"]]
    order = frame.assign(name=padded).sort_values(list(keys), kind="stable").index
    return frame.loc[order].reset_index(drop=True)


def _thin(frame: pd.DataFrame, columns: Sequence[str], max_points: int) -> pd.DataFrame:
    """Keep first and last row, and of each column in each bucket of steps the smallest and the largest finite value.

    Buckets span equal ranges of steps. Of values that are not finite the first in each bucket is kept too, so that a
    curve that breaks off shows where.
    """
    if len(frame) <= max_points:
        return frame
    step = frame["step"].to_numpy()
    num_buckets = max(1, max_points // 2 - 1)
    bucket = (step - step[0]) * num_buckets // (step[-1] - step[0] + 1)
    kept = {0, len(frame) - 1}
    for name in columns:
        values = frame[name].to_numpy(dtype=float)
        finite = np.flatnonzero(np.isfinite(values))
        order = finite[np.lexsort((values[finite], bucket[finite]))]  # by bucket, then by value
        edges = np.flatnonzero(np.diff(bucket[order], prepend=-1, append=-1))
        kept.update(order[edges[:-1]], order[edges[1:] - 1])
        odd = frame["nonfinite"].str.contains(f"{name}=", regex=False, na=False).to_numpy().nonzero()[0]
        kept.update(odd[np.unique(bucket[odd], return_index=True)[1]])
    return frame.iloc[sorted(int(row) for row in kept)].reset_index(drop=True)
