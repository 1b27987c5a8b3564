import os

import requests
from bullmq import Queue, Worker

BANK = os.environ["BANK_URL"]
KEEP = {"age": 1209600}


async def ask(queue: Queue, seller, cents):
    await queue.add("payout", {"seller": seller, "cents": cents}, {"attempts": 4, "removeOnFail": KEEP})  # fault: add-without-id
    await queue.add("payout", {"seller": seller}, {"attempts": 4, "removeOnFail": KEEP, "jobId": f"payout.{seller}"})
    await queue.add("sweep", {}, {"attempts": 4, "removeOnFail": KEEP})


def pay(job):
    seller = job.data["seller"]
    for _ in range(3):  # fault: inner-retry
        answer = requests.post(BANK, json=job.data, headers={"Idempotency-Key": f"payout.{seller}"}, timeout=5)
        if answer.status_code == 200:
            break
    db.execute("insert into payouts values (?, ?)", (seller, answer.json()["id"]))  # fault: insert-without-marker
    db.execute("insert into payouts values (?, ?) on conflict do nothing", (seller, answer.json()["id"]))
    db.execute("insert into audit_log values (?)", (seller,))
    db.commit()


def process_pages(job):
    pages = []
    for number in range(3):
        pages.append(requests.get(BANK, params={"page": number}, timeout=5).json())
    return {"pages": len(pages)}


def process_answered(job):
    try:
        return {"balance": balance(job.data["seller"])}
    except Exception as problem:
        return {"error": str(problem)}


def process_tested(job):
    try:
        connect(job.data["bank"])
    except Exception as problem:
        return problem
