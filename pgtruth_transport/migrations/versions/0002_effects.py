"""The effect ledger (ADR-007): effects, their history, the fences; and the trigger that allows the legal moves only."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects.postgresql import TIMESTAMP

from pgtruth_transport.migrations import schema_name

revision = "0002_effects"
down_revision = "0001_core"
branch_labels = None
depends_on = None

NOW = sa.text("clock_timestamp()")


def upgrade() -> None:
    schema = schema_name()
    _effects(schema)
    _history(schema)
    _guard(schema)


def downgrade() -> None:
    schema = schema_name()
    for table in ("effect_fences", "effect_history", "effects"):
        op.drop_table(table, schema=schema)
    op.execute(f'DROP FUNCTION "{schema}".effects_log()')
    op.execute(f'DROP FUNCTION "{schema}".effects_guard()')


def _when(name: str, *, null: bool = True) -> sa.Column[object]:
    return sa.Column(name, TIMESTAMP(timezone=True), server_default=None if null else NOW, nullable=null)


def _effects(schema: str) -> None:
    op.create_table(
        "effects",
        sa.Column("key", sa.Text(), nullable=False),
        sa.Column("kind", sa.Text(), nullable=False),
        sa.Column("fingerprint", sa.Text(), nullable=False),
        sa.Column("payload", sa.LargeBinary(), nullable=False),
        sa.Column("state", sa.Text(), nullable=False),
        sa.Column("calls", sa.Integer(), server_default=sa.text("1"), nullable=False),
        sa.Column("token", sa.Text(), nullable=False),
        sa.Column("job_id", sa.Text(), nullable=True),
        sa.Column("lease_version", sa.BigInteger(), nullable=True),
        sa.Column("owned_by", sa.Text(), nullable=False),
        _when("lease_expires_at"),
        sa.Column("result", sa.LargeBinary(), nullable=True),
        sa.Column("late_result", sa.LargeBinary(), nullable=True),
        sa.Column("error", sa.Text(), nullable=True),
        sa.Column("resource", sa.Text(), nullable=True),
        sa.Column("fence", sa.BigInteger(), nullable=True),
        sa.Column("checks", sa.Integer(), server_default=sa.text("0"), nullable=False),
        _when("next_check_at"),
        sa.Column("moved_by", sa.Text(), nullable=False),
        sa.Column("moved_why", sa.Text(), nullable=False),
        _when("started_at", null=False),
        _when("updated_at", null=False),
        _when("unknown_since"),
        sa.CheckConstraint("state IN ('started', 'applied', 'no_effect', 'unknown')", name="effects_state_check"),
        sa.CheckConstraint("(state = 'unknown') = (unknown_since IS NOT NULL)", name="effects_unknown_check"),
        sa.CheckConstraint("state = 'applied' OR result IS NULL", name="effects_result_check"),
        sa.CheckConstraint("(job_id IS NULL) = (lease_version IS NULL)", name="effects_holder_check"),
        sa.CheckConstraint("(resource IS NULL) = (fence IS NULL)", name="effects_fence_check"),
        sa.PrimaryKeyConstraint("key"),
        schema=schema,
    )
    for name, column, where in (
        ("effects_started", "key", "state = 'started'"),
        ("effects_unknown", "next_check_at", "state = 'unknown'"),
        ("effects_resource", "resource", "resource IS NOT NULL AND state IN ('started', 'unknown')"),
    ):
        op.create_index(name, "effects", [column], unique=False, schema=schema, postgresql_where=sa.text(where))


def _history(schema: str) -> None:
    op.create_table(
        "effect_history",
        sa.Column("id", sa.BigInteger(), sa.Identity(always=True), nullable=False),
        sa.Column("key", sa.Text(), nullable=False),
        sa.Column("calls", sa.Integer(), nullable=False),
        sa.Column("from_state", sa.Text(), nullable=True),
        sa.Column("to_state", sa.Text(), nullable=False),
        _when("at", null=False),
        sa.Column("who", sa.Text(), nullable=False),
        sa.Column("why", sa.Text(), nullable=False),
        sa.Column("fingerprint", sa.Text(), nullable=False),
        sa.Column("fence", sa.BigInteger(), nullable=True),
        sa.PrimaryKeyConstraint("id"),
        sa.ForeignKeyConstraint(["key"], [f"{schema}.effects.key"], name="effect_history_effect", ondelete="CASCADE"),
        schema=schema,
    )
    op.create_index("effect_history_key", "effect_history", ["key", "id"], unique=False, schema=schema)
    op.create_table(
        "effect_fences",
        sa.Column("resource", sa.Text(), nullable=False),
        sa.Column("last", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint("resource"),
        schema=schema,
    )


def _guard(schema: str) -> None:
    """What no statement can get around, typed by hand or not: the legal moves, and a row of history for each."""
    op.execute(f"""
        CREATE FUNCTION "{schema}".effects_guard() RETURNS trigger LANGUAGE plpgsql AS $$
        DECLARE
            fresh boolean;
        BEGIN
            IF TG_OP = 'INSERT' THEN
                IF NEW.state <> 'started' OR NEW.calls <> 1 THEN
                    RAISE EXCEPTION 'effect %: it begins as started, not as %', NEW.key, NEW.state
                        USING ERRCODE = 'check_violation', CONSTRAINT = 'effects_moves';
                END IF;
                RETURN NEW;
            END IF;
            IF (NEW.key, NEW.kind, NEW.fingerprint, NEW.payload) IS DISTINCT FROM
               (OLD.key, OLD.kind, OLD.fingerprint, OLD.payload) OR NEW.resource IS DISTINCT FROM OLD.resource THEN
                RAISE EXCEPTION 'effect %: key, kind, payload and resource never change', OLD.key
                    USING ERRCODE = 'check_violation', CONSTRAINT = 'effects_immutable';
            END IF;
            IF OLD.state <> NEW.state AND (OLD.state, NEW.state) NOT IN (
                ('started', 'applied'), ('started', 'no_effect'), ('started', 'unknown'),
                ('unknown', 'applied'), ('unknown', 'no_effect'), ('no_effect', 'started'), ('no_effect', 'unknown')
            ) THEN
                RAISE EXCEPTION 'effect %: % cannot become %', OLD.key, OLD.state, NEW.state
                    USING ERRCODE = 'check_violation', CONSTRAINT = 'effects_moves';
            END IF;
            IF OLD.state = 'applied' AND NEW.result IS DISTINCT FROM OLD.result THEN
                RAISE EXCEPTION 'effect %: the result of an applied effect never changes', OLD.key
                    USING ERRCODE = 'check_violation', CONSTRAINT = 'effects_immutable';
            END IF;
            fresh = OLD.state = 'no_effect' AND NEW.state = 'started';
            IF NEW.calls <> OLD.calls + fresh::int OR NEW.fence < OLD.fence OR (NEW.token <> OLD.token) <> fresh THEN
                RAISE EXCEPTION 'effect %: a new number, and a new token, belong to a fresh call only', OLD.key
                    USING ERRCODE = 'check_violation', CONSTRAINT = 'effects_numbers';
            END IF;
            RETURN NEW;
        END $$
    """)
    op.execute(f"""
        CREATE FUNCTION "{schema}".effects_log() RETURNS trigger LANGUAGE plpgsql AS $$
        BEGIN
            INSERT INTO "{schema}".effect_history (key, calls, from_state, to_state, who, why, fingerprint, fence)
            VALUES (NEW.key, NEW.calls, CASE WHEN TG_OP = 'UPDATE' THEN OLD.state END, NEW.state, NEW.moved_by,
                NEW.moved_why, NEW.fingerprint, NEW.fence);
            RETURN NULL;
        END $$
    """)
    op.execute(
        f'CREATE TRIGGER effects_guard BEFORE INSERT OR UPDATE ON "{schema}".effects '
        f'FOR EACH ROW EXECUTE FUNCTION "{schema}".effects_guard()'
    )
    op.execute(
        f'CREATE TRIGGER effects_log_begun AFTER INSERT ON "{schema}".effects '
        f'FOR EACH ROW EXECUTE FUNCTION "{schema}".effects_log()'
    )
    op.execute(
        f'CREATE TRIGGER effects_log_moved AFTER UPDATE ON "{schema}".effects '
        f'FOR EACH ROW WHEN (OLD.state <> NEW.state) EXECUTE FUNCTION "{schema}".effects_log()'
    )
