"""What should be trained, on which images, and with how much memory?"""

import math
from pathlib import Path
from typing import Any

import streamlit as st

from comet_core.config import FIELDS, GROUPS, PRESETS, ConfigError, RunConfig, config_from_dict, preset_values, unread
from pages import _charts, _widgets
from storage import runs

UPLOAD_HELP = "A .zip with train/<class>/ and test/<class>/, or with class folders alone, which are then split."
CHECK_FIELDS = ("dataset", "dataset_path", "test_fraction", "image_size", "seed", "batch_size")
NUM_COLUMNS = 3
ICONS = {
    "Data": "photo_library",
    "Model": "account_tree",
    "Training": "model_training",
    "Memory": "memory",
    "Machine": "developer_board",
}


def _key(name: str) -> str:
    """Of an option in the session state, where other pages have a `dataset` too."""
    return f"new_{name}"


def _use_preset() -> None:
    chosen = preset_values(st.session_state["preset"]) if st.session_state["preset"] else {}
    for name, entry in FIELDS.items():
        st.session_state[_key(name)] = chosen.get(name, entry.default)


def _take_upload() -> None:
    """Keep a newly chosen file and put its path into the form; one that is refused leaves nothing."""
    given = st.session_state["upload"]
    st.session_state[_key("dataset_path")], st.session_state["upload_problem"] = "", ""
    if given is not None:
        try:
            path = runs.save_upload(given, given.name)
            st.session_state[_key("dataset_path")] = st.session_state["upload_path"] = path
        except ValueError as error:
            st.session_state["upload_problem"] = str(error)


def _field(name: str) -> Any:
    """The input of one option, from its metadata; below it a place for what is wrong with it."""
    entry: Any = FIELDS[name]
    facts = entry.metadata
    label = f"{facts['label']} ({facts['unit']})" if facts["unit"] else facts["label"]
    common: dict[str, Any] = dict(key=_key(name), help=_help(facts), persist_state="page")
    value: Any
    if facts["menu"]:
        value = st.selectbox(label, list(facts["menu"]), **common)
        st.caption(_widgets.plain(facts["menu"][value]))
    elif entry.type is bool:
        value = st.toggle(label, **common)
    elif entry.type is str:
        value = st.text_input(label, **common).strip()
    else:
        step = 1 if entry.type is int else 10.0 ** math.floor(math.log10(entry.default))
        value = st.number_input(label, step=step, format="%d" if entry.type is int else "%g", **common)
    places[name] = st.empty()
    return value


def _help(facts: Any) -> str:
    if facts["low"] is None:
        return _widgets.plain(facts["help"])
    start = "Above" if facts["open_low"] else "From"
    low, high = (_charts.number_text(facts[end]) for end in ("low", "high"))
    return _widgets.plain(f"{facts['help']} {start} {low} to {high} {facts['unit']}".rstrip() + ".")


def _group(group: str) -> None:
    """A card of inputs. The menus that decide which others matter come first in their group."""
    st.markdown(f"##### :material/{ICONS[group]}: {group}", anchors=False)
    columns: list[Any] = []
    for name, entry in FIELDS.items():
        if entry.metadata["group"] == group and name not in unread(values) and name != "dataset_path":
            columns = columns or list(st.columns(NUM_COLUMNS))
            with columns.pop(0):
                values[name] = _field(name)
    if group == "Data" and values["dataset"] == "image_folder":
        _images()


def _images() -> None:
    left, right = st.columns(2)
    with left:
        st.file_uploader("Upload a .zip of images", key="upload", help=UPLOAD_HELP, on_change=_take_upload)
        if st.session_state["upload_problem"]:
            st.error(_widgets.plain(st.session_state["upload_problem"]))
    with right:
        values["dataset_path"] = _field("dataset_path")
        places["check"] = st.container()


def _restore_upload(path: str) -> None:
    """A refused upload is gone from the disk; with other options the same file may do."""
    given = st.session_state.get("upload")
    if given is not None and path == st.session_state.get("upload_path") and not Path(path).exists():
        given.seek(0)
        runs.save_upload(given, given.name)


@st.cache_data(ttl=600, max_entries=50, show_spinner=False)
def _answer(config: RunConfig) -> dict[str, Any]:
    _restore_upload(config.dataset_path)
    try:
        return runs.check_dataset(config)
    except ValueError as error:
        return {"error": str(error)}


def _check(config: RunConfig, again: bool) -> dict[str, Any]:
    """What the data set holds. Raises ValueError with a sentence where it cannot be used; `again`: look once more."""
    part = config_from_dict({name: getattr(config, name) for name in CHECK_FIELDS})
    with st.spinner("Looking through the images"):
        answer = _answer(part)
        if again and "error" in answer:
            _answer.clear(part)
            answer = _answer(part)
    if "error" in answer:
        raise ValueError(answer["error"])
    return answer


def _show_data(found: dict[str, Any]) -> None:
    st.success(
        f"{len(found['classes'])} classes, {found['num_train']:,} training and {found['num_test']:,} test images "
        f"of {found['image_size']}x{found['image_size']} pixels.",
        icon=":material/check:",
    )
    st.caption(_widgets.plain(", ".join(_charts.middle_cut(str(name), 24) for name in found["classes"][:20])))


def _launched() -> None:
    ids: tuple[int, ...] = st.session_state["launched"]
    if not ids:
        return
    names = " and its baseline twin ".join(f"#{run_id}" for run_id in ids)
    st.success(f"Run {names} {'are' if len(ids) > 1 else 'is'} queued.", icon=":material/rocket_launch:")
    for run_id in ids:
        query = {"run": str(run_id)}
        st.page_link("run_detail.py", label=f"Open run #{run_id}", icon=":material/monitoring:", query_params=query)
    if len(ids) > 1:
        query = {"runs": ",".join(map(str, ids))}
        st.page_link("compare.py", label="Compare the two", icon=":material/stacked_line_chart:", query_params=query)


_widgets.page_setup("New run")

if "preset" not in st.session_state or {_key(name) for name in FIELDS} - st.session_state.keys():
    asked = st.query_params.get("preset", "")
    st.session_state["preset"] = asked if asked in PRESETS else next(iter(PRESETS))
    _use_preset()
    st.session_state["launched"], st.session_state["upload_problem"] = (), ""

form, side = st.columns([3, 1], gap="medium")
values: dict[str, Any] = {name: st.session_state[_key(name)] for name in FIELDS}
places: dict[str, Any] = {}
with form:
    st.pills("Start from", list(PRESETS), key="preset", on_change=_use_preset, persist_state="page")
    if st.session_state["preset"]:
        st.caption(_widgets.plain(PRESETS[st.session_state["preset"]][0]))
    for group in GROUPS:
        with st.container(border=True):
            _group(group)

values = {name: FIELDS[name].default if name in unread(values) else value for name, value in values.items()}
with side, st.container(border=True):
    st.markdown("##### Launch", anchors=False)
    st.caption("The twin is the same run without compression: what compression saves and costs is measured against it.")
    is_baseline = values["policy"] == "baseline"
    with_twin = st.button(
        "Launch with baseline twin", type="primary", width="stretch",
        disabled=is_baseline, help="A baseline needs no twin." if is_baseline else None,
    )  # fmt: skip
    alone = st.button("Launch", width="stretch")
    answer = st.container()

pressed = with_twin or alone
try:
    config = config_from_dict(values)
    if pressed or config.dataset == "image_folder":
        with places.get("check", answer):
            found = _check(config, again=pressed)
            if "check" in places:
                _show_data(found)
    if pressed:
        _restore_upload(config.dataset_path)
        st.session_state["launched"] = runs.create_twins(config) if with_twin else (runs.create_run(config),)
except ConfigError as error:
    for name, sentence in error.problems.items():
        if pressed or values[name] != FIELDS[name].default:
            places[name].markdown(f":red[:material/error: {_widgets.plain(sentence)}]")
    if pressed:
        answer.error(f"Nothing was launched. {_widgets.plain(error)}")
except (ValueError, RuntimeError) as error:
    if "check" in places:
        places["check"].error(_widgets.plain(error))
    if pressed:
        answer.error(f"Nothing was launched. {_widgets.plain(error)}")
with answer:
    _launched()
    _widgets.scheduler_notice()
