from apscheduler import Scheduler
from apscheduler.triggers.cron import CronTrigger
from slots import tick

with Scheduler() as scheduler:
    scheduler.add_schedule(tick, CronTrigger(second="*/1"))
    scheduler.run_until_stopped()
