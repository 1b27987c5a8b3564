{@% set used = catalogue.core[kind] + (catalogue.patterns['schedule'].modules if kind != 'event-driven' and 'schedule' in patterns else []) %@}
{@% set types = {'str': 'sa.String(length=500)', 'int': 'sa.Integer()', 'float': 'sa.Float()', 'bool': 'sa.Boolean()'} %@}
"""The tables as they were when the service was made. Never edit it: a change is the next revision."""

import sqlalchemy as sa
from alembic import op

revision = '0001'
down_revision = None


def upgrade() -> None:
{@% for place in used | unique | sort if catalogue.modules[place] in catalogue.tables %@}
    {@ catalogue.tables[catalogue.modules[place]] | indent @}
{@% endfor %@}
{@% if kind == 'event-driven' %@}
    op.create_table('{@ plural @}',
    sa.Column('id', sa.String(length=200), nullable=False),
{@% for column in columns %@}
    sa.Column('{@ column.name @}', {@ types[column.type] @}, nullable=False),
{@% endfor %@}
    sa.Column('status', sa.String(length=20), nullable=False),
    sa.Column('reason', sa.Text(), nullable=True),
    sa.Column('created_at', sa.Float(), nullable=False),
    sa.PrimaryKeyConstraint('id')
    )
    op.create_table('notices',
    sa.Column('position', sa.Integer(), nullable=False),
    sa.Column('subject', sa.String(length=200), nullable=False),
    sa.Column('text', sa.Text(), nullable=False),
    sa.PrimaryKeyConstraint('position')
    )
    op.create_index(op.f('ix_notices_subject'), 'notices', ['subject'], unique=False)
{@% else %@}
    op.create_table('{@ job_name @}_results',
    sa.Column('position', sa.Integer(), nullable=False),
    sa.Column('key', sa.String(length=500), nullable=False),
{@% for column in columns %@}
    sa.Column('{@ column.name @}', {@ types[column.type] @}, nullable=False),
{@% endfor %@}
    sa.Column('done_at', sa.Float(), nullable=False),
    sa.PrimaryKeyConstraint('position')
    )
    op.create_index(op.f('ix_{@ job_name @}_results_key'), '{@ job_name @}_results', ['key'], unique=False)
{@% endif %@}


def downgrade() -> None:
    raise RuntimeError("nothing comes before the first revision: drop the database")
