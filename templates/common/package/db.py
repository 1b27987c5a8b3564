"""The tables of this service. Jobs carry references and small values; results live here."""

from __future__ import annotations

from sqlalchemy import {@ (['Column', 'Float', 'Integer', 'String', 'Table'] + (['Boolean'] if 'bool' in columns | map(attribute='type') else [])) | sort | join(', ') @}

from .patterns.core.store import metadata

__all__ = ["{@ job_name @}_results"]

{@ job_name @}_results = Table(
    "{@ job_name @}_results",
    metadata,
    Column("position", Integer, primary_key=True),
    Column("key", String(500), nullable=False, index=True),  # not unique: a second effect would be seen
{@% for column in columns %@}
    Column("{@ column.name @}", {@ {'str': 'String(500)', 'int': 'Integer', 'float': 'Float', 'bool': 'Boolean'}[column.type] @}, nullable=False),
{@% endfor %@}
    Column("done_at", Float, nullable=False),
)
