"""Other styles: classes, aliases, calls over several lines."""
import json
import smtplib
from uuid import uuid4

import aiohttp
import requests as http
from bullmq import Queue as BullQueue, Worker as BullWorker
from confluent_kafka import Consumer as KafkaReader
from loguru import logger


class Shipments:
    def __init__(self, redis, db):
        self.queue = BullQueue("shipments", {"connection": redis})
        self.db = db

    async def place(self, shipment):
        async with self.db.transaction():
            await self.db.insert(shipment)
            await self.queue.add(  # fault: publish-in-transaction, add-without-id
                "ship",
                {"shipment": shipment.id},
                {"attempts": 3, "removeOnComplete": True, "removeOnFail": {"age": 86400}},
            )

    async def process(self, job, token):
        try:
            await self.ship(job)
        except Exception as exc:  # fault: swallowed-error
            logger.opt(exception=exc).error("shipment failed")
            return None

    async def ship(self, job):
        headers = {"Idempotency-Key": uuid4().hex}  # fault: key-per-try
        http.post("https://carrier.example", headers=headers)  # fault: blocking-in-async, http-no-timeout
        async with aiohttp.ClientSession() as session:
            await session.post("https://carrier.example", timeout=aiohttp.ClientTimeout(total=10))

    async def notify(self, job):
        server = smtplib.SMTP("mail.example")  # fault: blocking-in-async
        server.sendmail("a", job.data["to"], "shipped")
        logger.info("Notified {}", job.data["email"])  # fault: secret-logged

    async def start(self, redis):
        self.worker = BullWorker("shipments", self.process, {"connection": redis, "maxStalledCount": 100})  # fault: stock-worker, no-shutdown


def reader():
    return KafkaReader({"group.id": "warehouse", "bootstrap.servers": "b"})  # fault: kafka-auto-commit


def depth_of(queue):
    return queue.client.llen("bull:shipments:wait")  # fault: partial-health


PRIORITY_LOW = 1  # fault: inverted-priority
PRIORITY_HIGH = 10


def save(cursor, row):
    cursor.execute("REPLACE INTO `shipment_events` VALUES (%s)", [json.dumps(row)])  # fault: replace-effect-row
