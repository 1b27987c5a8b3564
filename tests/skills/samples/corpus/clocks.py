import threading
import time

import schedule
from apscheduler.schedulers.asyncio import AsyncIOScheduler
from apscheduler.schedulers.background import BackgroundScheduler
from fastapi import FastAPI

app = FastAPI()
scheduler = AsyncIOScheduler()  # fault: scheduler-per-process
cleaner = BackgroundScheduler(timezone="UTC")  # fault: scheduler-per-process


@app.on_event("startup")
async def start():
    scheduler.add_job(nightly, "cron", hour=2)
    scheduler.start()


def poll():
    schedule.every(10).minutes.do(nightly)  # fault: scheduler-per-process
    while True:
        schedule.run_pending()
        time.sleep(10)


def heartbeat():
    while True:  # fault: interval-loop
        refresh()
        time.sleep(300)


def later():
    threading.Timer(3600, nightly).start()  # fault: scheduler-per-process
