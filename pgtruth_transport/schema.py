"""The tables, as SQLAlchemy metadata: what the migrations build and what a test compares them with.

Nothing in the hot path reads this module; statements live in ``sql/``. Times are ``timestamptz`` of the database
clock. Bodies, results and headers are ``bytea``: a NUL or a lone surrogate in user data can never wedge a row.
"""

from __future__ import annotations

from typing import Final

from sqlalchemy import (
    DDL,
    BigInteger,
    Boolean,
    CheckConstraint,
    Column,
    Float,
    ForeignKey,
    Identity,
    Index,
    Integer,
    LargeBinary,
    MetaData,
    PrimaryKeyConstraint,
    SmallInteger,
    Table,
    Text,
    event,
    text,
)
from sqlalchemy.dialects.postgresql import TIMESTAMP

DEFAULT_SCHEMA: Final = "pgtruth"
NOW = text("clock_timestamp()")


def _when(name: str, *, null: bool = True, default: bool = False) -> Column[object]:
    return Column(name, TIMESTAMP(timezone=True), nullable=null, server_default=NOW if default else None)


def build(schema: str = DEFAULT_SCHEMA) -> MetaData:
    """The metadata of every table, in ``schema``."""
    meta = MetaData(schema=schema)
    _jobs(meta)
    _chords(meta)
    _transport(meta)
    _house(meta)
    _effects(meta)
    _beat(meta)
    return meta


def _jobs(meta: MetaData) -> None:
    jobs = Table(
        "jobs",
        meta,
        Column("id", Text, primary_key=True),
        Column("status", Text, nullable=False),
        Column("task", Text, nullable=False),
        Column("queue", Text, nullable=False),
        Column("priority", SmallInteger, nullable=False, server_default=text("0")),
        # When it may be claimed; 'infinity' = open: the id exists, its message has not been published yet.
        _when("run_at", null=False, default=True),
        _when("expires_at"),
        _when("created_at", null=False, default=True),
        _when("updated_at", null=False, default=True),
        _when("claimed_at"),
        _when("lease_expires_at"),
        Column("owned_by", Text),
        Column("lease_version", BigInteger, nullable=False, server_default=text("0")),
        Column("retry_count", Integer, nullable=False, server_default=text("0")),
        Column("max_retries", Integer),  # of the task, learnt at the claim; null = the retry_limit setting
        # Acknowledged early (task_acks_late off): if its holder dies it fails, it never runs twice.
        Column("at_most_once", Boolean, nullable=False, server_default=text("false")),
        _when("unknown_since"),  # since when workers have met it without knowing its task
        Column("celery_state", Text),  # what AsyncResult says where status alone does not; null = PENDING
        Column("result", LargeBinary),  # the encoded return value; only where status is done
        Column("meta", LargeBinary),  # the rest of Celery's result meta, encoded: children, exception, progress
        Column("error", Text),  # the latest failure, for people
        Column("headers", LargeBinary),  # JSON
        Column("properties", LargeBinary),  # JSON, with content_type and content_encoding
        Column("body", LargeBinary),
        Column("root_id", Text),
        Column("parent_id", Text),
        Column("group_id", Text),
        CheckConstraint(
            "status IN ('queued', 'processing', 'done', 'failed', 'enqueue_failed')", name="jobs_status_check"
        ),
        CheckConstraint(
            "(status = 'processing') = (owned_by IS NOT NULL AND lease_expires_at IS NOT NULL)",
            name="jobs_owner_check",
        ),
        CheckConstraint("priority BETWEEN 0 AND 9", name="jobs_priority_check"),
        Index(
            "jobs_claim",
            "queue",
            text("priority DESC"),
            "run_at",
            "id",
            postgresql_where=text("status = 'queued'"),
        ),
        Index("jobs_processing", "id", postgresql_where=text("status = 'processing'")),
        Index("jobs_enqueue_failed", "id", postgresql_where=text("status = 'enqueue_failed'")),
        Index("jobs_expiring", "expires_at", postgresql_where=text("status = 'queued' AND expires_at IS NOT NULL")),
        Index(
            "jobs_unknown",
            "unknown_since",
            postgresql_where=text("status = 'queued' AND unknown_since IS NOT NULL"),
        ),
        Index("jobs_ended", "status", "updated_at", postgresql_where=text("status IN ('done', 'failed')")),
    )
    # room on each page for the next version of a row: a renewal stays HOT (SQLAlchemy 2.0 has no argument for it)
    event.listen(jobs, "after_create", DDL("ALTER TABLE %(fullname)s SET (fillfactor = 80)"))  # type: ignore[no-untyped-call]
    Table(
        "attempts",
        meta,
        Column("job_id", Text, nullable=False),
        Column("lease_version", BigInteger, nullable=False),
        Column("owned_by", Text, nullable=False),
        _when("claimed_at", null=False),
        _when("ended_at", null=False, default=True),
        Column("outcome", Text, nullable=False),
        Column("error", Text),
        PrimaryKeyConstraint("job_id", "lease_version", name="attempts_pkey"),
    )


def _chords(meta: MetaData) -> None:
    Table(
        "chords",
        meta,
        Column("id", Text, primary_key=True),  # the group id of the header
        Column("size", Integer),  # null until the publisher has said it
        Column("extra", Integer, nullable=False, server_default=text("0")),  # added by add_to_chord
        Column("counted", Integer, nullable=False, server_default=text("0")),
        _when("created_at", null=False, default=True),
    )
    Table(
        "chord_parts",
        meta,
        Column("chord_id", Text, nullable=False),
        Column("part_id", Text, nullable=False),  # the member's job id: counted once, however often it returns
        Column("position", Float),
        Column("state", Text, nullable=False),
        Column("result", LargeBinary),
        PrimaryKeyConstraint("chord_id", "part_id", name="chord_parts_pkey"),
    )
    Table(
        "groups",
        meta,
        Column("id", Text, primary_key=True),
        Column("result", LargeBinary, nullable=False),
        _when("created_at", null=False, default=True),
    )
    Table(
        "waiters",  # who waits for which result: only these ends are announced
        meta,
        Column("job_id", Text, nullable=False),
        Column("waiter", Text, nullable=False),
        _when("expires_at", null=False),
        PrimaryKeyConstraint("job_id", "waiter", name="waiters_pkey"),
    )


def _transport(meta: MetaData) -> None:
    Table(
        "exchanges",
        meta,
        Column("name", Text, primary_key=True),
        Column("type", Text, nullable=False),
        Column("durable", Boolean, nullable=False),
        Column("auto_delete", Boolean, nullable=False),
    )
    Table(
        "queues",
        meta,
        Column("name", Text, primary_key=True),
        Column("durable", Boolean, nullable=False),
        Column("auto_delete", Boolean, nullable=False),
        Column("ttl", Float),  # seconds that it lives without a consumer; null = for ever
        _when("expires_at"),
    )
    Table(
        "bindings",
        meta,
        Column("exchange", Text, nullable=False),
        Column("routing_key", Text, nullable=False),
        Column("queue", Text, nullable=False),
        PrimaryKeyConstraint("exchange", "routing_key", "queue", name="bindings_pkey"),
        Index("bindings_queue", "queue"),
    )
    Table(
        "messages",  # everything that is not a task: remote control, events, plain kombu
        meta,
        Column("id", BigInteger, Identity(always=True), primary_key=True),
        Column("queue", Text, nullable=False),
        Column("priority", SmallInteger, nullable=False, server_default=text("0")),
        Column("headers", LargeBinary),
        Column("properties", LargeBinary),
        Column("body", LargeBinary),
        _when("expires_at"),
        Column("owned_by", Text),
        _when("lease_expires_at"),
        Column("redelivered", Boolean, nullable=False, server_default=text("false")),
        Index("messages_fetch", "queue", text("priority DESC"), "id"),
        Index("messages_expiring", "expires_at", postgresql_where=text("expires_at IS NOT NULL")),
        CheckConstraint("priority BETWEEN 0 AND 9", name="messages_priority_check"),
    )


def _house(meta: MetaData) -> None:
    Table(
        "duties",  # what must be done now and then by whoever comes first
        meta,
        Column("name", Text, primary_key=True),
        _when("ran_at", null=False, default=True),
        Column("ran_by", Text),
        Column("timeline", Text),  # the server's timeline when it ran: it changes at a promotion
        _when("timeline_since"),
    )
    Table(
        "counters",  # what leaves no row behind: stale writes refused, wake-ups that found nothing
        meta,
        Column("name", Text, primary_key=True),
        Column("value", BigInteger, nullable=False, server_default=text("0")),
    )


def _effect_key(meta: MetaData) -> ForeignKey:
    return ForeignKey(f"{meta.schema}.effects.key", name="effect_history_effect", ondelete="CASCADE")


def _effects(meta: MetaData) -> None:
    Table(
        "effects",  # what tasks do to the outside world; the trigger effects_guard refuses every illegal move
        meta,
        Column("key", Text, primary_key=True),  # the logical effect: the same for every attempt
        Column("kind", Text, nullable=False),
        Column("fingerprint", Text, nullable=False),  # SHA-256 of payload, in hex
        Column("payload", LargeBinary, nullable=False),  # the declared fields, canonical JSON
        Column("state", Text, nullable=False),
        Column("calls", Integer, nullable=False, server_default=text("1")),  # the number of the latest call
        Column("token", Text, nullable=False),  # of the one who may record the answer to that call
        Column("job_id", Text),  # null: begun outside a task
        Column("lease_version", BigInteger),
        Column("owned_by", Text, nullable=False),
        _when("lease_expires_at"),  # only outside a task; inside one the job's lease counts
        Column("result", LargeBinary),  # what the call returned, JSON
        Column("late_result", LargeBinary),  # an answer that came when it was no longer the caller's to record
        Column("error", Text),
        Column("resource", Text),  # what ordered effects are in order about
        Column("fence", BigInteger),
        Column("checks", Integer, nullable=False, server_default=text("0")),  # how often the recipient was asked
        _when("next_check_at"),
        Column("moved_by", Text, nullable=False),  # who made the latest move, and why: copied to the history
        Column("moved_why", Text, nullable=False),
        _when("started_at", null=False, default=True),
        _when("updated_at", null=False, default=True),
        _when("unknown_since"),
        CheckConstraint("state IN ('started', 'applied', 'no_effect', 'unknown')", name="effects_state_check"),
        CheckConstraint("(state = 'unknown') = (unknown_since IS NOT NULL)", name="effects_unknown_check"),
        CheckConstraint("state = 'applied' OR result IS NULL", name="effects_result_check"),
        CheckConstraint("(job_id IS NULL) = (lease_version IS NULL)", name="effects_holder_check"),
        CheckConstraint("(resource IS NULL) = (fence IS NULL)", name="effects_fence_check"),
        Index("effects_started", "key", postgresql_where=text("state = 'started'")),
        Index("effects_unknown", "next_check_at", postgresql_where=text("state = 'unknown'")),
        Index(
            "effects_resource",
            "resource",
            postgresql_where=text("resource IS NOT NULL AND state IN ('started', 'unknown')"),
        ),
    )
    Table(
        "effect_history",  # one row per move, written by a trigger; and what moved nothing: conflicts, late answers
        meta,
        Column("id", BigInteger, Identity(always=True), primary_key=True),
        Column("key", Text, _effect_key(meta), nullable=False),
        Column("calls", Integer, nullable=False),
        Column("from_state", Text),  # null: the effect came into being
        Column("to_state", Text, nullable=False),
        _when("at", null=False, default=True),
        Column("who", Text, nullable=False),
        Column("why", Text, nullable=False),
        Column("fingerprint", Text, nullable=False),  # of a conflict: the one that was refused
        Column("fence", BigInteger),
        Index("effect_history_key", "key", "id"),
    )
    Table(
        "effect_fences",
        meta,
        Column("resource", Text, primary_key=True),
        Column("last", BigInteger, nullable=False),  # the highest number handed out
    )


def _beat(meta: MetaData) -> None:
    Table(
        "beat_entries",
        meta,
        Column("name", Text, nullable=False),
        _when("last_run_at", null=False, default=True),  # of an interval: its latest tick, so that it keeps its beat
        Column("runs", BigInteger, nullable=False, server_default=text("0")),
        PrimaryKeyConstraint("name", name="beat_entries_pkey"),
    )
    Table(
        "beat_ticks",  # what was sent, in the transaction that sent it: one job per entry and tick
        meta,
        Column("entry", Text, nullable=False),
        Column("tick_at", TIMESTAMP(timezone=True), nullable=False),
        Column("job_id", Text, nullable=False),
        _when("sent_at", null=False, default=True),
        PrimaryKeyConstraint("entry", "tick_at", name="beat_ticks_pkey"),
        Index("beat_ticks_sent", "sent_at"),
    )
