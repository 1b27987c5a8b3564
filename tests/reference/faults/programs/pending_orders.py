"""An order and the job that prepares it; each preparation leaves one row, with nothing to hide a second."""

from sqlalchemy import Column, Integer, String, Table

from studyhall.patterns.core.store import metadata
from studyhall.patterns.pipeline import Done
from studyhall.patterns.producer import JobRequest
from studyhall.patterns.typed_jobs import JobTypes, Payload

QUEUE = "preparations"

orders = Table("pending_orders", metadata, Column("id", String(50), primary_key=True))
prepared = Table("prepared_orders", metadata, Column("id", Integer, primary_key=True), Column("order_id", String(50)))


class PrepareOrder(Payload):
    order_id: str


async def prepare_order(_ctx, payload: PrepareOrder):
    async def save(tx):
        await tx.execute(prepared.insert().values(order_id=payload.order_id))

    return Done(None, save)


def job_types():
    jobs = JobTypes()
    jobs.register(name="prepare-order", payload=PrepareOrder, handler=prepare_order, queue=QUEUE)
    return jobs


def prepare(order_id, **options):
    return JobRequest("prepare-order", {"order_id": order_id}, key=order_id, **options)
