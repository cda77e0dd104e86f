"""The schedule's memory: when each entry last ran, and the ticks that were sent."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects.postgresql import TIMESTAMP

from pgtruth_transport.migrations import schema_name

revision = "0003_beat"
down_revision = "0002_effects"
branch_labels = None
depends_on = None

NOW = sa.text("clock_timestamp()")


def upgrade() -> None:
    schema = schema_name()
    op.create_table(
        "beat_entries",
        sa.Column("name", sa.Text(), nullable=False),
        sa.Column("last_run_at", TIMESTAMP(timezone=True), server_default=NOW, nullable=False),
        sa.Column("runs", sa.BigInteger(), server_default=sa.text("0"), nullable=False),
        sa.PrimaryKeyConstraint("name", name="beat_entries_pkey"),
        schema=schema,
    )
    op.create_table(
        "beat_ticks",
        sa.Column("entry", sa.Text(), nullable=False),
        sa.Column("tick_at", TIMESTAMP(timezone=True), nullable=False),
        sa.Column("job_id", sa.Text(), nullable=False),
        sa.Column("sent_at", TIMESTAMP(timezone=True), server_default=NOW, nullable=False),
        sa.PrimaryKeyConstraint("entry", "tick_at", name="beat_ticks_pkey"),
        schema=schema,
    )
    op.create_index("beat_ticks_sent", "beat_ticks", ["sent_at"], unique=False, schema=schema)


def downgrade() -> None:
    schema = schema_name()
    for table in ("beat_ticks", "beat_entries"):
        op.drop_table(table, schema=schema)
