"""Whether a person approved an attempt with force, which decides again when the approval is applied."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0008"
down_revision = "0007"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("attempts", sa.Column("forced", sa.Boolean(), nullable=False, server_default=sa.false()))
    # What was approved and is not applied yet: an inconclusive one could only be approved with force.
    op.execute(
        sa.text(
            "UPDATE attempts SET forced = :yes "
            "WHERE state = 'promoting' AND decision = 'promoted' AND verdict = 'inconclusive'"
        ).bindparams(sa.bindparam("yes", True, sa.Boolean()))
    )
