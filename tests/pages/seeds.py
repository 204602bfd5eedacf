"""Runs as training would have left them, written through the real recorder: for the tests of pages and browser."""

import math

from comet_core.config import RunConfig
from comet_core.launcher import Identity
from comet_core.metrics import AUDIT_BINS, AuditMetrics, ControllerEvent, EvalMetrics, LayerMetrics, StepMetrics
from storage import runs
from storage.recorder import DatabaseRecorder

MIB = 2**20
HOST = Identity("elsewhere.invalid", 1, "1")


def ended_run(
    config: RunConfig, *, losses: list[float] | None = None, num_steps: int = 40, end: str = "finished"
) -> int:
    """One run with curves; `end` is its last status, or "running"."""
    run_id = runs.create_run(config)
    train(run_id, losses=losses, num_steps=num_steps, end=end)
    return run_id


def twins(config: RunConfig, num_steps: int = 40) -> tuple[int, int]:
    ids = runs.create_twins(config)
    for run_id in ids:
        train(run_id, num_steps=num_steps)
    return ids


def train(
    run_id: int, *, losses: list[float] | None = None, num_steps: int = 40, end: str = "finished", claimed: bool = False
) -> None:
    """What a worker does to a queued run, without the training."""
    if not claimed:
        assert runs.claim_next(1000) == run_id
    runs.mark_starting(run_id, HOST)
    facts = {"torch": "2.14.1", "num_threads": 2}
    runs.start(run_id, num_steps_total=num_steps, environment=facts, start_rss_bytes=400 * MIB)
    recorder = DatabaseRecorder(run_id)
    config = runs.config_of(run_id)
    ratio = 1.0 if config.policy == "baseline" else 14.0
    for step in range(1, (num_steps if end == "finished" else num_steps // 2) + 1):
        loss = losses[step - 1] if losses else 2.3 * math.exp(-step / num_steps) + 0.1 * math.sin(step)
        held = round(170 * MIB / (ratio + 0.02 * step if ratio > 1 else 1))
        recorder.record_step(
            StepMetrics(
                step=step, epoch=1, train_loss=loss, train_accuracy=0.1 + 0.5 * step / num_steps, num_samples=128,
                learning_rate=0.1, saved_bytes=170 * MIB, held_bytes=held, compression_ratio=170 * MIB / held,
                conv_input_saved_bytes=80 * MIB, conv_input_held_bytes=held // 2,
                conv_input_ratio=160 * MIB / held if ratio > 1 else 1.0, static_bytes=4 * MIB,
                **_parts(held, step), step_seconds=0.5, pack_seconds=0.05,
                unpack_seconds=0.04, wall_seconds=0.5 * step,
            )
        )  # fmt: skip
        if ratio > 1 and step in (1, 2, 4, 8, 16, 32):
            recorder.record_layers([_layer(step, place) for place in range(1, 8)])
            recorder.record_audits([_audit(step, place) for place in range(1, 7)])
            recorder.record_events(
                [ControllerEvent(step=step, kind="budget" if step < 8 else "clamped", layer="layer1.conv1",
                                 message=f"bound {0.1 / step:.3g}")]
            )  # fmt: skip
        if step % (num_steps // 4) == 0:
            recorder.record_eval(
                EvalMetrics(
                    step=step, epoch=1, test_loss=loss + 0.1, test_accuracy=0.6 * step / num_steps - 0.01 * (ratio > 1),
                    num_samples=1000, eval_seconds=1.0, wall_seconds=0.5 * step,
                )
            )  # fmt: skip
    recorder.close()
    match end:
        case "finished":
            runs.finish(run_id)
        case "failed":
            runs.fail(run_id, "train/frog/0007.png is no image: its header is damaged; replace or remove the file.")


def _parts(held: int, step: int) -> dict[str, int]:
    """400 MiB before training, with a network of 2 MiB in it; the largest peak is that of step 6."""
    known = {"parameter_bytes": 2 * MIB, "optimizer_bytes": 2 * MIB, "gradient_bytes": 0, "batch_bytes": MIB}
    known |= {"peak_held_bytes": held, "scratch_bytes": 8 * MIB}
    other = 607 * MIB + (step % 7) * MIB
    return {
        **known, "peak_saved_bytes": 170 * MIB, "other_bytes": other, "peak_rss_bytes": sum(known.values()) + other
    }  # fmt: skip


def _audit(step: int, place: int) -> AuditMetrics:
    counts = [round(1000 * math.exp(-((bin - AUDIT_BINS / 2 + 0.5) ** 2) / 32)) for bin in range(AUDIT_BINS)]
    return AuditMetrics(
        step=step, name=f"layer{place}.conv1", operator="conv2d", gradient="weight", num_elements=2304,
        gradient_rms=1e-3, measured_sigma=1.1e-4 * place, predicted_sigma=1e-4 * place, mean_error=0.4, slope=-0.03,
        correlation=-0.02, excess_kurtosis=0.1, error_histogram=",".join(map(str, counts)), extra_bytes=MIB // 2,
        audit_seconds=0.01,
    )  # fmt: skip


def _layer(step: int, place: int) -> LayerMetrics:
    return LayerMetrics(
        step=step, name=f"layer{place}.conv1", operator="conv2d", error_bound=0.1 * place / step, saved_bytes=8 * MIB,
        held_bytes=MIB // 2, compression_ratio=16.0, bits_per_value=2.0, predicted_sigma=1e-4 * place,
        target_sigma=2e-4 * place, gradient_noise=1e-3, nonzero_fraction=0.5, audit_factor=1.1,
    )  # fmt: skip
