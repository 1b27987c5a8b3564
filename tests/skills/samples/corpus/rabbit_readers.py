import logging
import time

import aio_pika
import pika

log = logging.getLogger("rabbit")


def start(channel: pika.channel.Channel):
    channel.basic_consume(queue="orders", on_message_callback=on_message, auto_ack=True)  # fault: rabbit-auto-ack
    channel.basic_consume("refunds", on_refund)
    channel.start_consuming()


def on_message(channel, method, properties, body):
    for attempt in range(5):  # fault: inner-retry
        try:
            return ship(body)
        except ConnectionError:
            time.sleep(2**attempt)
    return None


def on_refund(channel, method, properties, body):
    refund(body)
    channel.basic_ack(method.delivery_tag)


async def listen(queue: aio_pika.abc.AbstractQueue):
    await queue.consume(print, no_ack=True)  # fault: rabbit-auto-ack
    async with queue.iterator() as messages:
        async for message in messages:
            async with message.process():
                await ship(message.body)


async def announce(session, exchange, order):
    session.add(order)
    await exchange.publish(aio_pika.Message(order.id), "orders")  # fault: publish-in-transaction
    await session.commit()


async def announce_right(session, exchange, order):
    session.add(order)
    await session.commit()
    await exchange.publish(aio_pika.Message(order.id), "orders")
