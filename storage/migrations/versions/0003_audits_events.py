"""Audits and the controller's events, three more figures of a layer, and the layers' order, which older rows lack."""

import sqlalchemy as sa
from alembic import op

revision = "0003"
down_revision = "0002"


def upgrade() -> None:
    op.add_column("layer_metrics", sa.Column("place", sa.BigInteger(), nullable=True))
    for name in ("audit_factor", "mean_output_gradient", "paper_coefficient"):
        op.add_column("layer_metrics", sa.Column(name, sa.Double(), nullable=True))
    op.create_table(
        "audit_metrics",
        sa.Column("run_id", sa.Integer(), autoincrement=False, nullable=False),
        sa.Column("step", sa.BigInteger(), autoincrement=False, nullable=False),
        sa.Column("name", sa.Text(), nullable=False),
        sa.Column("operator", sa.Text(), nullable=False),
        sa.Column("gradient", sa.Text(), nullable=False),
        sa.Column("num_elements", sa.BigInteger(), nullable=False),
        sa.Column("gradient_rms", sa.Double(), nullable=True),
        sa.Column("measured_sigma", sa.Double(), nullable=True),
        sa.Column("predicted_sigma", sa.Double(), nullable=True),
        sa.Column("mean_error", sa.Double(), nullable=True),
        sa.Column("slope", sa.Double(), nullable=True),
        sa.Column("correlation", sa.Double(), nullable=True),
        sa.Column("excess_kurtosis", sa.Double(), nullable=True),
        sa.Column("passed_error", sa.Double(), nullable=True),
        sa.Column("error_histogram", sa.Text(), nullable=True),
        sa.Column("extra_bytes", sa.BigInteger(), nullable=False),
        sa.Column("audit_seconds", sa.Double(), nullable=True),
        sa.Column("nonfinite", sa.Text(), nullable=True),
        sa.ForeignKeyConstraint(["run_id"], ["runs.id"], name="fk_audit_metrics_run_id", ondelete="CASCADE"),
        sa.PrimaryKeyConstraint("run_id", "step", "name", name="pk_audit_metrics"),
        sqlite_with_rowid=False,
    )
    op.create_table(
        "controller_events",
        sa.Column("run_id", sa.Integer(), autoincrement=False, nullable=False),
        sa.Column("step", sa.BigInteger(), autoincrement=False, nullable=False),
        sa.Column("place", sa.BigInteger(), autoincrement=False, nullable=False),
        sa.Column("kind", sa.Text(), nullable=False),
        sa.Column("layer", sa.Text(), nullable=True),
        sa.Column("message", sa.Text(), nullable=False),
        sa.Column("nonfinite", sa.Text(), nullable=True),
        sa.ForeignKeyConstraint(["run_id"], ["runs.id"], name="fk_controller_events_run_id", ondelete="CASCADE"),
        sa.PrimaryKeyConstraint("run_id", "step", "place", name="pk_controller_events"),
        sqlite_with_rowid=False,
    )
