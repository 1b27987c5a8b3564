from aiokafka import AIOKafkaConsumer
from confluent_kafka import Consumer
from kafka import KafkaConsumer

orders = KafkaConsumer("orders", group_id="mail", bootstrap_servers="b:9092")  # fault: kafka-auto-commit
right = KafkaConsumer("orders", group_id="mail", enable_auto_commit=False)
tail = KafkaConsumer("orders", group_id=None)
events = AIOKafkaConsumer("events", group_id="search", enable_auto_commit=True)  # fault: kafka-auto-commit
held = AIOKafkaConsumer("events", group_id="search", enable_auto_commit=False)
config = {"bootstrap.servers": "b:9092", "group.id": "billing"}
billing = Consumer(config)  # fault: kafka-auto-commit
careful = Consumer({"group.id": "billing", "enable.auto.commit": False})
stored = Consumer({"group.id": "billing", "enable.auto.offset.store": False})


def consume():
    while True:
        message = careful.poll(1.0)
        if message is None:
            continue
        try:
            handle(message.value())
        except Exception as error:  # fault: swallowed-error
            print("failed", error)
        careful.commit(message)
