"""What does a codec make of one tensor: how small, how exact, how fast, and how far from the entropy?"""

from typing import Any, NamedTuple

import pandas as pd
import streamlit as st

from comet_core.config import CODECS, MODELS
from pages import _charts, _codec_charts, _measuring, _widgets
from pages._measuring import Measurement, MeasurementError
from storage import queries

SOURCES = {"capture": "Capture", "upload": "Upload"}


class Kind(NamedTuple):
    """What bounds count in: its name, what that is, the label of the axis, the bounds to start from."""

    name: str
    meaning: str
    axis: str
    start: str


KINDS = {
    "rule": Kind(
        "Times the rule's", "multiples of what COMET's momentum rule at 1 % allows this layer",
        "Bound, as a multiple of the rule's", "1 2 4 8 13 26",
    ),
    "range_rel": Kind(
        "Share of range", "shares of the range of the values", "Bound, as a share of the range",
        "0.0001 0.0003 0.001 0.003 0.01 0.03",
    ),
    "pw_rel": Kind(
        "Share of value", "shares of each value, so that zeros and signs stay", "Bound, as a share of the value",
        "0.001 0.003 0.01 0.03 0.1",
    ),
    "abs": Kind("Absolute", "the largest error of any value", "Bound", "0.0001 0.001 0.01 0.1"),
}  # fmt: skip
DEFAULT_CODECS = ["error_bounded", "group_quantized", "dct", "cast", "lossless"]
UPLOAD_HELP = "A float tensor of up to 512 MB: .npy, or .safetensors with the tensor's name below. Pickles are refused."
CODEC_HELP = (
    "Parameters go behind the name, for example cast:dtype=float16, group_quantized:num_bits=4 or, for errors that do "
    "not follow the values, error_bounded:dither=true."
)
# Column -> its label, format and help
COLUMNS = {
    "codec": ("Codec", "", None),
    "bound": ("Bound", "%g", None),
    "compression_ratio": ("Ratio", "%.2fx", "Original by held bytes."),
    "bits_per_value": ("Bits", "%.3f", "Held bits a value, everything counted."),
    "order0_bits": ("Entropy", "%.3f", "Bits a code of a plain quantiser at this bound."),
    "context_bits": ("In context", "%.3f", "Bits a code, given the codes to the left and above."),
    "max_error": ("Largest", "%.3g", "Largest error of any finite value."),
    "rms_error": ("RMS", "%.3g", "Root of the mean squared error."),
    "num_over_bound": ("Beyond", "%d", "Values beyond the bound; beyond the chosen one where the codec has none."),
    "encode_gb_per_s": ("Encode", "%.2f", "GB of original values a second."),
    "decode_gb_per_s": ("Decode", "%.2f", "GB of original values a second."),
}


@st.cache_data(ttl=3600, max_entries=20, show_spinner="Looking at the network")
def _layers(model: str) -> dict[str, str]:
    return _measuring.layers(model)


def _source() -> tuple[list[str], Any, str]:
    """Inputs of where the tensor comes from: arguments, the uploaded file, the name of a tensor in it."""
    if source == "capture":
        model = st.selectbox("Network", list(MODELS), key="lab_model", bind="query-params")
        try:
            known = _layers(model)
        except MeasurementError as error:
            st.error(_widgets.plain(error))
            st.stop()
        names = list(known)
        middle = [name for name, operator in known.items() if operator == "conv2d"]
        layer = st.selectbox(
            "Input of layer", names, index=names.index(middle[len(middle) // 2]), key=f"lab_layer_{model}",
            format_func=lambda name: f"{name} ({known[name].replace('_', ' ').replace('2d', '')})",
        )  # fmt: skip
        steps = st.number_input(
            "Training steps before", 1, 1000, 20, key="lab_steps", bind="query-params",
            help="On handwritten digits, 128 a step. The network is young; the rule gives bounds that fit it.",
        )  # fmt: skip
        return ["--model", model, "--layer", layer, "--steps", str(steps)], None, ""
    given = st.file_uploader(
        "Tensor file", ["npy", "safetensors"], max_upload_size=_measuring.LARGEST_UPLOAD_MB, help=UPLOAD_HELP
    )
    name = ""
    if given is not None and given.name.lower().endswith(".safetensors"):
        name = st.text_input("Tensor in the file", help="Not needed where the file holds one tensor alone.").strip()
    arguments = []
    channel = st.selectbox(
        "Channels along", ["0", "1", "2", "3"], index=None, placeholder="no channels", key="lab_channel",
        bind="query-params", help="The dimension that the quantiser adapts along; shares are then of its range.",
    )  # fmt: skip
    if channel:
        arguments += ["--channel-dim", channel]
    if st.toggle("Zeros and signs exact", key="lab_signs", bind="query-params", help="As behind a ReLU."):
        arguments += ["--sign-exact"]
    return arguments, given, name


def _bounds() -> list[str]:
    kinds = list(KINDS) if source == "capture" else [kind for kind in KINDS if kind != "rule"]
    kind = st.selectbox(
        "Bounds are", kinds, format_func=lambda kind: KINDS[kind].name, key=f"lab_kind_{source}",
        help="; ".join(f"{KINDS[kind].name}: {KINDS[kind].meaning}" for kind in kinds) + ".",
    )  # fmt: skip
    text = st.text_input(
        "Bounds", KINDS[kind].start, key=f"lab_bounds_{kind}", help="Numbers above 0, with blanks between."
    )
    numbers = text.replace(",", " ").split()
    wrong = [number for number in numbers if not _is_bound(number)]
    if wrong or not 1 <= len(numbers) <= 12:
        what = f"{wrong[0]} is no bound" if wrong else f"these are {len(numbers)} bounds"
        st.markdown(f":red[:material/error: {_widgets.plain(what)}; write 1 to 12 numbers above 0, like 0.01 or 1e-3.]")
        return []
    return ["--kind", kind, "--bounds", *numbers]


def _is_bound(text: str) -> bool:
    """Unlike the command, the charts have no place for 0 and infinity: their axes are logarithms."""
    try:
        return 0 < float(text) < float("inf")
    except ValueError:
        return False


def _start(arguments: list[str], given: Any, name: str) -> None:
    upload = None
    if given is not None:
        given.seek(0)
        upload = (given.name, given)
    busy = sum(queries.live_counts().values()) - queries.live_counts()["queued"] > 0
    try:
        measurement = Measurement(arguments, upload, name)
    except OSError as error:
        st.session_state["lab_error"] = f"The measurement could not be started: {error}"
        return
    st.session_state["lab_running"], st.session_state["lab_error"] = measurement, ""
    st.session_state["lab_shared"] = busy or measurement.shared


def _watch() -> None:
    measurement: Measurement = st.session_state["lab_running"]
    if measurement.is_running:
        share, text = measurement.progress()
        st.progress(share, _widgets.plain(text))
        if st.button("Stop", icon=":material/stop:", help="Ends after the present turn and keeps what was measured."):
            measurement.stop()
        return
    try:
        st.session_state["lab_answer"] = measurement.answer()
    except MeasurementError as error:
        st.session_state["lab_error"] = str(error)
    st.session_state["lab_running"] = None
    st.rerun()


def _numbers(rows: list[dict[str, Any]], names: tuple[str, ...]) -> pd.DataFrame:
    """Numbers that JSON cannot hold came as texts."""
    frame = pd.DataFrame(rows)
    for name in names:
        frame[name] = pd.to_numeric(frame[name])
    return frame


def _head(tensor: dict[str, Any]) -> None:
    number = _charts.number_text
    if tensor["source"] == "captured":
        trained = f"{tensor['num_steps']} training steps on {tensor['settings']['dataset']}"
        where = f"Input of {tensor['name']} in {tensor['model']} after {trained}"
    else:
        where = tensor["name"]
    facts = [
        f"{tensor['dtype']}, {' x '.join(map(str, tensor['shape'])) or 'one value'}",
        number(tensor["original_bytes"], "bytes"),
        f"values from {number(tensor['min'])} to {number(tensor['max'])}",
        f"standard deviation {number(tensor['std'])}",
        f"{number(tensor['zero_fraction'], 'fraction')} zeros",
    ]
    if tensor["num_nonfinite"]:
        facts.append(f"{tensor['num_nonfinite']:,} not finite")
    if tensor["sign_exact"]:
        facts.append("zeros and signs kept")
    st.markdown(f"**{_widgets.plain(where)}**")
    st.caption(_widgets.plain(" · ".join(facts)))


def _show(answer: dict[str, Any]) -> None:
    if not answer["results"]:
        st.info("Stopped before anything was measured. Press Measure to start again.", icon=":material/stop:")
        return
    tensor = answer["tensor"]
    _head(tensor)
    if answer["stopped"]:
        st.warning("Stopped: this is what was measured until then.", icon=":material/stop:")
    results = _numbers(answer["results"], ("bound", "max_error", "rms_error", "relative_rms_error"))
    results["place"] = range(len(results))
    results = results.sort_values("bound", kind="stable")  # codecs without a bound come last
    bounds = _numbers(answer["bounds"], ("bound", "order0_bits", "context_bits"))
    measured = sorted(results["bound"].dropna().unique()) or sorted(bounds["bound"])
    where, what = st.columns(2, gap="medium")
    bound = next(iter(measured), None)
    if len(measured) > 1:
        bound = where.select_slider("At the bound", measured, measured[len(measured) // 2], format_func="{:g}".format)
    if bound is not None and "num_over_bounds" in results:  # codecs without a guarantee are judged by the chosen bound
        place = bounds["bound"].tolist().index(bound)
        results["num_over_bound"] = [
            counts[place] if isinstance(counts, list) else count
            for counts, count in zip(results["num_over_bounds"], results["num_over_bound"], strict=True)
        ]
    rows = results.merge(bounds.drop(columns="error_bound"), how="left", on="bound")
    here = rows[(rows["bound"] == bound) | rows["bound"].isna()]
    codec = what.selectbox("Codec", here["codec"].tolist())
    row = here[here["codec"] == codec].iloc[0]
    _figures(row, bound)
    axis = KINDS[tensor["kind"]].axis
    _widgets.chart("Bits a value", lambda: _codec_charts.bits_over_bound(results, bounds, axis), key="bits")
    left, right = st.columns(2, gap="medium")
    with left:
        _widgets.chart("Error over bits", lambda: _codec_charts.rate_distortion(results), key="distortion")
    with right:
        _errors(answer["results"][row["place"]], _codec_charts.colors(results["codec"])[codec])
    _widgets.chart("Throughput", lambda: _codec_charts.throughput(here), key="throughput")
    threads = answer["environment"]["num_threads"]
    busy = " Other work ran at the same time, so these times say little." if st.session_state["lab_shared"] else ""
    st.caption(
        f"Times are medians of {tensor['repetitions']} on {threads} threads.{busy} The entropies are those of a plain "
        "quantiser's codes, alone and given the codes to the left and above; no table is counted."
    )
    _table(rows)


def _errors(row: dict[str, Any], color: str) -> None:
    if row["histogram"]:
        _widgets.chart("Errors", lambda: _codec_charts.error_histogram(row, color), key="errors")
        return
    with st.container(border=True):
        st.markdown("**Errors**")
        st.caption(f"{_widgets.plain(row['codec'])} gave every value back as it was. {row['note']}")


def _figures(row: pd.Series, bound: float | None) -> None:
    def bits(name: str) -> str:
        return _charts.ABSENT if pd.isna(row[name]) else f"{row[name]:.3f}"

    judged = bound is not None and row["guarantee"] != "exact"
    beyond = f"{row['num_over_bound']:,.0f} values beyond the bound {bound:g}." if judged else None
    _widgets.figures(
        [
            ("Ratio", _charts.number_text(row["compression_ratio"], "x"), "Original by held bytes."),
            ("Bits a value", bits("bits_per_value"), "Held bits by number of values, everything counted."),
            ("Entropy in context", bits("context_bits"), f"Bits a code; without neighbours {bits('order0_bits')}."),
            ("Largest error", _charts.number_text(row["max_error"]), beyond),
        ]
    )


def _table(rows: pd.DataFrame) -> None:
    columns: dict[str, Any] = {
        name: st.column_config.NumberColumn(label, format=form, help=text) if form else label
        for name, (label, form, text) in COLUMNS.items()
    }
    shown = rows[list(COLUMNS)]
    st.dataframe(shown, column_config=columns, hide_index=True, height="content", placeholder=_charts.ABSENT)


_widgets.page_setup("Codec lab")
for name, value in (("lab_running", None), ("lab_answer", None), ("lab_error", ""), ("lab_shared", False)):
    st.session_state.setdefault(name, value)
form, main = st.columns([1, 3], gap="medium")
with form, st.container(border=True):
    source = st.segmented_control(
        "Tensor", list(SOURCES), default="capture", required=True, format_func=SOURCES.__getitem__, key="lab_source",
        bind="query-params", width="stretch",
    )  # fmt: skip
    arguments, given, tensor_name = _source()
    codecs = st.multiselect(
        "Codecs", list(CODECS), DEFAULT_CODECS, key="lab_codecs", accept_new_options=True, help=CODEC_HELP,
        bind="query-params",
    )  # fmt: skip
    bounds = _bounds()
    ready = bool(codecs and bounds) and (source == "capture" or given is not None)
    running = st.session_state["lab_running"] is not None
    if st.button("Measure", type="primary", width="stretch", disabled=not ready or running):
        _start([*arguments, *bounds, "--codecs", *codecs], given, tensor_name)
        st.rerun()
    if source == "upload" and given is None:
        st.caption("Choose a file first.")
    elif not codecs:
        st.caption("Choose a codec first.")
with main:
    if running:
        _widgets.polling(_watch, live=True)
    if st.session_state["lab_error"]:
        st.error(_widgets.plain(st.session_state["lab_error"]), icon=":material/error:")
    if st.session_state["lab_answer"]:
        _show(st.session_state["lab_answer"])
    elif not running:
        with st.container(border=True):
            st.subheader("Nothing measured yet", anchor=False)
            st.markdown(
                "Choose a tensor, codecs and bounds, then press **Measure**. A capture trains a small network for a "
                "few steps first and takes about half a minute; a file is measured at once.\n\n"
                "You will see compression ratio and bits a value beside the entropy of the codes, the errors, the "
                "throughput, and how error and size trade off over the bounds."
            )
