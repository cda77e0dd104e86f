"""The core: jobs and their attempts, results, the transport's own tables, duties."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects.postgresql import TIMESTAMP

from pgtruth_transport.migrations import schema_name

revision = "0001_core"
down_revision = None
branch_labels = None
depends_on = None


def upgrade() -> None:
    schema = schema_name()
    _jobs(schema)
    _results(schema)
    _transport(schema)
    _house(schema)


def downgrade() -> None:
    schema = schema_name()
    for table in (
        "counters",
        "duties",
        "messages",
        "bindings",
        "queues",
        "exchanges",
        "waiters",
        "groups",
        "chord_parts",
        "chords",
        "attempts",
        "jobs",
    ):
        op.drop_table(table, schema=schema)


def _jobs(schema: str) -> None:
    op.create_table(
        "jobs",
        sa.Column("id", sa.Text(), nullable=False),
        sa.Column("status", sa.Text(), nullable=False),
        sa.Column("task", sa.Text(), nullable=False),
        sa.Column("queue", sa.Text(), nullable=False),
        sa.Column("priority", sa.SmallInteger(), server_default=sa.text("0"), nullable=False),
        sa.Column("run_at", TIMESTAMP(timezone=True), server_default=sa.text("clock_timestamp()"), nullable=False),
        sa.Column("expires_at", TIMESTAMP(timezone=True), nullable=True),
        sa.Column("created_at", TIMESTAMP(timezone=True), server_default=sa.text("clock_timestamp()"), nullable=False),
        sa.Column("updated_at", TIMESTAMP(timezone=True), server_default=sa.text("clock_timestamp()"), nullable=False),
        sa.Column("claimed_at", TIMESTAMP(timezone=True), nullable=True),
        sa.Column("lease_expires_at", TIMESTAMP(timezone=True), nullable=True),
        sa.Column("owned_by", sa.Text(), nullable=True),
        sa.Column("lease_version", sa.BigInteger(), server_default=sa.text("0"), nullable=False),
        sa.Column("retry_count", sa.Integer(), server_default=sa.text("0"), nullable=False),
        sa.Column("max_retries", sa.Integer(), nullable=True),
        sa.Column("at_most_once", sa.Boolean(), server_default=sa.text("false"), nullable=False),
        sa.Column("unknown_since", TIMESTAMP(timezone=True), nullable=True),
        sa.Column("celery_state", sa.Text(), nullable=True),
        sa.Column("result", sa.LargeBinary(), nullable=True),
        sa.Column("meta", sa.LargeBinary(), nullable=True),
        sa.Column("error", sa.Text(), nullable=True),
        sa.Column("headers", sa.LargeBinary(), nullable=True),
        sa.Column("properties", sa.LargeBinary(), nullable=True),
        sa.Column("body", sa.LargeBinary(), nullable=True),
        sa.Column("root_id", sa.Text(), nullable=True),
        sa.Column("parent_id", sa.Text(), nullable=True),
        sa.Column("group_id", sa.Text(), nullable=True),
        sa.CheckConstraint(
            "(status = 'processing') = (owned_by IS NOT NULL AND lease_expires_at IS NOT NULL)", name="jobs_owner_check"
        ),
        sa.CheckConstraint(
            "status IN ('queued', 'processing', 'done', 'failed', 'enqueue_failed')", name="jobs_status_check"
        ),
        sa.CheckConstraint("priority BETWEEN 0 AND 9", name="jobs_priority_check"),
        sa.PrimaryKeyConstraint("id"),
        schema=schema,
    )
    op.execute(f'ALTER TABLE "{schema}".jobs SET (fillfactor = 80)')
    op.create_index(
        "jobs_claim",
        "jobs",
        ["queue", sa.literal_column("priority DESC"), "run_at", "id"],
        unique=False,
        schema=schema,
        postgresql_where=sa.text("status = 'queued'"),
    )
    op.create_index(
        "jobs_ended",
        "jobs",
        ["status", "updated_at"],
        unique=False,
        schema=schema,
        postgresql_where=sa.text("status IN ('done', 'failed')"),
    )
    op.create_index(
        "jobs_enqueue_failed",
        "jobs",
        ["id"],
        unique=False,
        schema=schema,
        postgresql_where=sa.text("status = 'enqueue_failed'"),
    )
    op.create_index(
        "jobs_expiring",
        "jobs",
        ["expires_at"],
        unique=False,
        schema=schema,
        postgresql_where=sa.text("status = 'queued' AND expires_at IS NOT NULL"),
    )
    op.create_index(
        "jobs_processing",
        "jobs",
        ["id"],
        unique=False,
        schema=schema,
        postgresql_where=sa.text("status = 'processing'"),
    )
    op.create_index(
        "jobs_unknown",
        "jobs",
        ["unknown_since"],
        unique=False,
        schema=schema,
        postgresql_where=sa.text("status = 'queued' AND unknown_since IS NOT NULL"),
    )
    op.create_table(
        "attempts",
        sa.Column("job_id", sa.Text(), nullable=False),
        sa.Column("lease_version", sa.BigInteger(), nullable=False),
        sa.Column("owned_by", sa.Text(), nullable=False),
        sa.Column("claimed_at", TIMESTAMP(timezone=True), nullable=False),
        sa.Column("ended_at", TIMESTAMP(timezone=True), server_default=sa.text("clock_timestamp()"), nullable=False),
        sa.Column("outcome", sa.Text(), nullable=False),
        sa.Column("error", sa.Text(), nullable=True),
        sa.PrimaryKeyConstraint("job_id", "lease_version", name="attempts_pkey"),
        schema=schema,
    )


def _results(schema: str) -> None:
    op.create_table(
        "chords",
        sa.Column("id", sa.Text(), nullable=False),
        sa.Column("size", sa.Integer(), nullable=True),
        sa.Column("extra", sa.Integer(), server_default=sa.text("0"), nullable=False),
        sa.Column("counted", sa.Integer(), server_default=sa.text("0"), nullable=False),
        sa.Column("created_at", TIMESTAMP(timezone=True), server_default=sa.text("clock_timestamp()"), nullable=False),
        sa.PrimaryKeyConstraint("id"),
        schema=schema,
    )
    op.create_table(
        "chord_parts",
        sa.Column("chord_id", sa.Text(), nullable=False),
        sa.Column("part_id", sa.Text(), nullable=False),
        sa.Column("position", sa.Float(), nullable=True),
        sa.Column("state", sa.Text(), nullable=False),
        sa.Column("result", sa.LargeBinary(), nullable=True),
        sa.PrimaryKeyConstraint("chord_id", "part_id", name="chord_parts_pkey"),
        schema=schema,
    )
    op.create_table(
        "groups",
        sa.Column("id", sa.Text(), nullable=False),
        sa.Column("result", sa.LargeBinary(), nullable=False),
        sa.Column("created_at", TIMESTAMP(timezone=True), server_default=sa.text("clock_timestamp()"), nullable=False),
        sa.PrimaryKeyConstraint("id"),
        schema=schema,
    )
    op.create_table(
        "waiters",
        sa.Column("job_id", sa.Text(), nullable=False),
        sa.Column("waiter", sa.Text(), nullable=False),
        sa.Column("expires_at", TIMESTAMP(timezone=True), nullable=False),
        sa.PrimaryKeyConstraint("job_id", "waiter", name="waiters_pkey"),
        schema=schema,
    )


def _transport(schema: str) -> None:
    op.create_table(
        "exchanges",
        sa.Column("name", sa.Text(), nullable=False),
        sa.Column("type", sa.Text(), nullable=False),
        sa.Column("durable", sa.Boolean(), nullable=False),
        sa.Column("auto_delete", sa.Boolean(), nullable=False),
        sa.PrimaryKeyConstraint("name"),
        schema=schema,
    )
    op.create_table(
        "queues",
        sa.Column("name", sa.Text(), nullable=False),
        sa.Column("durable", sa.Boolean(), nullable=False),
        sa.Column("auto_delete", sa.Boolean(), nullable=False),
        sa.Column("ttl", sa.Float(), nullable=True),
        sa.Column("expires_at", TIMESTAMP(timezone=True), nullable=True),
        sa.PrimaryKeyConstraint("name"),
        schema=schema,
    )
    op.create_table(
        "bindings",
        sa.Column("exchange", sa.Text(), nullable=False),
        sa.Column("routing_key", sa.Text(), nullable=False),
        sa.Column("queue", sa.Text(), nullable=False),
        sa.PrimaryKeyConstraint("exchange", "routing_key", "queue", name="bindings_pkey"),
        schema=schema,
    )
    op.create_index("bindings_queue", "bindings", ["queue"], unique=False, schema=schema)
    op.create_table(
        "messages",
        sa.Column("id", sa.BigInteger(), sa.Identity(always=True), nullable=False),
        sa.Column("queue", sa.Text(), nullable=False),
        sa.Column("priority", sa.SmallInteger(), server_default=sa.text("0"), nullable=False),
        sa.Column("headers", sa.LargeBinary(), nullable=True),
        sa.Column("properties", sa.LargeBinary(), nullable=True),
        sa.Column("body", sa.LargeBinary(), nullable=True),
        sa.Column("expires_at", TIMESTAMP(timezone=True), nullable=True),
        sa.Column("owned_by", sa.Text(), nullable=True),
        sa.Column("lease_expires_at", TIMESTAMP(timezone=True), nullable=True),
        sa.Column("redelivered", sa.Boolean(), server_default=sa.text("false"), nullable=False),
        sa.CheckConstraint("priority BETWEEN 0 AND 9", name="messages_priority_check"),
        sa.PrimaryKeyConstraint("id"),
        schema=schema,
    )
    op.create_index(
        "messages_expiring",
        "messages",
        ["expires_at"],
        unique=False,
        schema=schema,
        postgresql_where=sa.text("expires_at IS NOT NULL"),
    )
    op.create_index(
        "messages_fetch", "messages", ["queue", sa.literal_column("priority DESC"), "id"], unique=False, schema=schema
    )


def _house(schema: str) -> None:
    op.create_table(
        "duties",
        sa.Column("name", sa.Text(), nullable=False),
        sa.Column("ran_at", TIMESTAMP(timezone=True), server_default=sa.text("clock_timestamp()"), nullable=False),
        sa.Column("ran_by", sa.Text(), nullable=True),
        sa.Column("timeline", sa.Text(), nullable=True),
        sa.Column("timeline_since", TIMESTAMP(timezone=True), nullable=True),
        sa.PrimaryKeyConstraint("name"),
        schema=schema,
    )
    op.create_table(
        "counters",
        sa.Column("name", sa.Text(), nullable=False),
        sa.Column("value", sa.BigInteger(), server_default=sa.text("0"), nullable=False),
        sa.PrimaryKeyConstraint("name"),
        schema=schema,
    )
