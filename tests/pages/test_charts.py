"""Charts and numbers: what is drawn is what was measured."""

from dataclasses import fields

import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st

from comet_core.metrics import EvalMetrics, LayerMetrics, StepMetrics, axis_label
from pages import _charts
from pages._charts import Curve

NAN, INF = float("nan"), float("inf")


def curve(values, column="train_loss", metric=StepMetrics, name="run", nonfinite=None, **style):
    frame = pd.DataFrame({"step": range(1, len(values) + 1), column: np.array(values, dtype=float)})
    frame["nonfinite"] = pd.Series(nonfinite or [None] * len(values), dtype="object")
    return Curve(frame=frame, metric=metric, column=column, name=name, color="#0072B2", **style)


def test_a_run_keeps_its_look_and_no_two_of_36_neighbours_share_it():
    assert len({_charts.run_style(run_id) for run_id in range(7, 43)}) == 36
    assert _charts.run_style(5) == _charts.run_style(5)


@pytest.mark.parametrize("metric", [StepMetrics, EvalMetrics])
def test_every_metric_is_drawn_under_its_own_label(metric):
    for entry in fields(metric):
        if entry.name != "step":
            figure = _charts.lines([curve([1.0, 2.0], column=entry.name, metric=metric)])
            unit = {"bytes": "bytes", "fraction": "%"}.get(entry.metadata["unit"], entry.metadata["unit"])
            label = axis_label(metric, entry.name)
            assert figure.layout.title.text == label.replace(f"({entry.metadata['unit']})", f"({unit})")
            assert figure.layout.xaxis.title.text == "Step"


def test_curves_of_two_metrics_stand_under_what_their_labels_share():
    def title(*columns: str) -> str:
        return _charts.lines([curve([2**30], column=column) for column in columns]).layout.title.text

    assert title("saved_bytes", "held_bytes") == "Saved for backward (GiB)"
    assert title("compression_ratio", "conv_input_ratio") == "Compression ratio (x)"
    both = [curve([1.0]), curve([1.0], column="test_loss", metric=EvalMetrics)]
    assert _charts.lines(both).layout.title.text == "Loss"


def test_peaks_count_from_the_start_where_there_is_no_gpu():
    steps = pd.DataFrame({"peak_rss_bytes": [5.0, 7.0], "peak_allocated_bytes": [NAN, 3.0]})
    above, column, label = _charts.peaks(steps, False, 4.0)
    assert (above[column].tolist(), label) == ([1.0, 3.0], "Peak resident memory above the start")
    assert steps["peak_rss_bytes"].tolist() == [5.0, 7.0]
    assert _charts.peaks(steps, False, None)[1:] == ("peak_rss_bytes", "")
    assert _charts.peaks(steps, True, 4.0)[1:] == ("peak_allocated_bytes", "")


def peak_frame(**columns):
    """Two runs of 10 MiB above 100, of which the network had 2: the second one compresses."""
    known = dict(parameter_bytes=2, optimizer_bytes=1, gradient_bytes=1, batch_bytes=0, scratch_bytes=0)
    frame = pd.DataFrame([known, known]) * 2**20
    frame = frame.assign(peak_held_bytes=[4 * 2**20, 2**20], peak_saved_bytes=4 * 2**20, start_rss_bytes=102.0 * 2**20)
    frame = frame.assign(other_bytes=[102 * 2**20, 105 * 2**20], peak_rss_bytes=110 * 2**20, peak_allocated_bytes=NAN)
    return frame.assign(id=[3, 4], name=["<b>", "twin"], step=[7, 9], **columns)


def test_the_bars_of_a_waterfall_stand_on_each_other_and_end_at_the_peak():
    figure = _charts.waterfall(peak_frame())
    first, hollow, second = figure.data
    for bars in (first, second):
        tops = np.add(bars.base, bars.y)
        assert np.allclose(bars.base[1:-1], tops[:-2]), "a part begins where the one before ends"
        assert bars.y[-1] == tops[-2] == 10.0, "the last part ends at the peak, which is above libraries and data"
        assert list(bars.x) == ["parameters", "optimizer", "gradients", "batch", "held", "scratch", "other", "peak"]
    assert (hollow.x, hollow.base, hollow.y) == (("held",), (4.0,), (4.0,)) and second.y[4] == 1.0
    assert list(figure.layout.xaxis.categoryarray) == list(first.x), "the hollow bar does not come first"
    assert first.name == "#3 &lt;b&gt;" and first.marker.color != second.marker.color
    assert figure.layout.yaxis.title.text == "Resident above libraries and data (MiB)"


def test_on_a_gpu_a_waterfall_begins_at_nothing():
    figure = _charts.waterfall(peak_frame().assign(other_bytes=0, peak_allocated_bytes=[8 * 2**20, 5 * 2**20]))
    assert [bars.y[-1] for bars in figure.data if len(bars.x) > 1] == [8.0, 5.0]
    assert figure.layout.yaxis.title.text == "Allocated on the GPU (MiB)"


def test_memory_that_was_used_again_goes_down_in_a_waterfall():
    frame = peak_frame().assign(peak_rss_bytes=105 * 2**20, other_bytes=[97 * 2**20, 100 * 2**20])
    (first, _, second), words = _charts.waterfall(frame).data, list(_charts.PART_WORDS.values())
    assert (first.y[words.index("other")], second.y[words.index("other")], first.y[-1]) == (-3.0, 0.0, 5.0)


def test_values_that_are_not_finite_are_gaps_with_a_cross():
    marked = ["train_loss=nan", None, "train_loss=inf", None]
    line, crosses = _charts.lines([curve([NAN, 0.0, INF, 3.0], nonfinite=marked)]).data
    assert line.x.tolist() == [1, 2, 3, 4]
    assert np.array_equal(line.y, [NAN, 0.0, NAN, 3.0], equal_nan=True)
    assert not line.connectgaps
    assert crosses.x.tolist() == [1, 3]
    assert list(crosses.customdata) == ["NaN", "∞"]


def test_what_was_not_measured_is_left_out_and_zero_is_a_value():
    (line,) = _charts.lines([curve([0.0, NAN, -0.0, 1.0])]).data
    assert line.x.tolist() == [1, 3, 4]
    assert line.y.tolist() == [0.0, 0.0, 1.0]


def test_a_curve_of_nothing_but_nan_is_drawn():
    line, crosses = _charts.lines([curve([NAN, NAN], nonfinite=["train_loss=nan"] * 2)]).data
    assert np.isnan(line.y).all()
    assert crosses.y.tolist() == [0.0, 0.0]


def test_names_are_text_in_charts():
    name = _charts.lines([curve([1.0], name="<b>x</b> & <script>")]).data[0].name
    assert name == "&lt;b&gt;x&lt;/b&gt; &amp; &lt;script&gt;"


def test_thinned_curves_say_how_many_points_they_show():
    thinned = curve([1.0, 2.0, 3.0])
    assert not _charts.lines([thinned]).layout.annotations
    thinned.frame.attrs["total"] = 30_000
    assert _charts.lines([thinned]).layout.annotations[0].text == "showing 3 of 30,000 points"


def test_bytes_of_several_curves_share_one_unit():
    small, large = _charts.lines([curve([2**20], "held_bytes"), curve([3 * 2**30], "held_bytes")]).data
    assert (small.y.tolist(), large.y.tolist()) == ([2**-10], [3.0])


def test_bounds_have_a_line_a_layer_and_leave_exact_layers_out():
    rows = [
        dict(step=step, name=f"<i>{n}</i>", error_bound=NAN if n == 2 else n / step)
        for step in (1, 2)
        for n in (0, 1, 2)
    ]
    figure = _charts.bounds(pd.DataFrame(rows))
    assert [trace.name for trace in figure.data] == ["&lt;i&gt;1&lt;/i&gt;"]
    assert figure.layout.title.text.startswith(axis_label(LayerMetrics, "error_bound"))


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 5)), min_size=1, max_size=12))
def test_the_front_holds_exactly_what_nothing_beats(points):
    def beats(a, b):
        return a[0] <= b[0] and a[1] >= b[1] and a != b

    expected = [not any(beats(other, point) for other in points) for point in points]
    cost, value = zip(*points, strict=True)
    assert _charts.pareto(cost, value).tolist() == expected


def runs_frame(**columns):
    frame = pd.DataFrame(dict(id=[3, 7, 9], name=["a", "<b>", "c"], policy=["baseline", "compress", "compress"]))
    return frame.assign(last_test_accuracy=[0.9, 0.8, 0.7], **columns)


def test_a_point_carries_its_run_and_incomplete_runs_are_left_out():
    figure = _charts.trade_offs(runs_frame(max_held_bytes=[2**30, 2**20, NAN]), "max_held_bytes", "last_test_accuracy")
    points = figure.data[-1]
    assert list(points.customdata) == [3, 7]
    assert points.y.tolist() == [90.0, 80.0]
    assert "&lt;b&gt;" in points.hovertext[1]
    assert figure.layout.xaxis.title.text == "Saved for backward, really held (GiB)"


def test_the_front_turns_round_where_more_is_better():
    frame = runs_frame(compression_ratio=[1.0, 14.0, 7.0])
    assert _charts.on_front(frame, "compression_ratio", "last_test_accuracy").tolist() == [True, True, False]


@pytest.mark.parametrize(
    ("value", "unit", "text"),
    [
        (None, "bytes", "–"), (0, "bytes", "0 bytes"), (0.0, "fraction", "0.00 %"), (0, "", "0"), (NAN, "x", "NaN"),
        (-INF, "s", "−∞"), (0.6134, "fraction", "61.34 %"), (14.04, "x", "14.04x"), (1023, "bytes", "1,023 bytes"),
        (1024, "bytes", "1.00 KiB"), (12.34 * 2**20, "bytes", "12.3 MiB"), (170 * 2**20, "bytes", "170 MiB"),
        (1023.99 * 2**20, "bytes", "1,024 MiB"), (-5 * 2**30, "bytes", "-5.00 GiB"), (2**60, "bytes", "1,048,576 TiB"),
        (0.0005, "s", "0.5 ms"), (0.5, "s", "500 ms"), (9.94, "s", "9.9 s"), (59.96, "s", "1 min 0 s"),
        (125, "s", "2 min 5 s"), (7260, "s", "2 h 1 min"), (0.92064, "", "0.9206"), (3.0, "steps", "3 steps"),
    ],
)  # fmt: skip
def test_numbers_are_written_for_people(value, unit, text):
    assert _charts.number_text(value, unit) == text


@given(st.text(max_size=60), st.integers(5, 40))
def test_a_cut_name_keeps_both_ends(name, length):
    cut = _charts.middle_cut(name, length)
    assert len(cut) <= length
    head, mark, tail = cut.partition("…")
    assert cut == name or (mark and name.startswith(head) and name.endswith(tail))
