from apscheduler.schedulers.blocking import BlockingScheduler
from slots import tick

scheduler = BlockingScheduler()
# Tick more often than once a slot: the next tick makes up for what a restart missed. The default drops a run 1 s late.
scheduler.add_job(tick, "cron", second="*/1", misfire_grace_time=None, coalesce=True, max_instances=1)
scheduler.start()
