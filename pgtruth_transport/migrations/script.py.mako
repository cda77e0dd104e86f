"""${message}."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

from pgtruth_transport.migrations import schema_name

revision = ${repr(up_revision)}
down_revision = ${repr(down_revision)}
branch_labels = None
depends_on = None


def upgrade() -> None:
    schema = schema_name()
    ${upgrades if upgrades else "raise NotImplementedError(schema)"}


def downgrade() -> None:
    schema = schema_name()
    ${downgrades if downgrades else "raise NotImplementedError(schema)"}
