"""What the peak of a step consists of. Steps that were recorded before have no such figures: they stay NULL."""

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"


def upgrade() -> None:
    for name in (
        "parameter_bytes", "optimizer_bytes", "gradient_bytes", "peak_saved_bytes", "peak_held_bytes", "scratch_bytes",
        "other_bytes", "device_used_bytes",
    ):  # fmt: skip
        op.add_column("step_metrics", sa.Column(name, sa.BigInteger(), nullable=True))
