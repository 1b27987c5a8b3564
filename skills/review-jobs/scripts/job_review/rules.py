"""What is looked for: one row per rule."""

from dataclasses import dataclass

SEVERITIES = ("critical", "high", "medium", "low")
# (rule, line)
Hit = tuple[str, int]


@dataclass(frozen=True)
class Rule:
    id: str
    severity: str
    why: str
    fix: str
    proof: str
    page: str


def _rules(*rows: tuple[str, str, str, str, str, str]) -> dict[str, Rule]:
    return {row[0]: Rule(*row) for row in rows}


RULES = _rules(
    # (id, severity, why it hurts, what to do, what proves the fix, page of the pattern)
    ("set-nx-idempotency", "critical", "SET NX before the work: one error or kill -9 and the retry is skipped as done",
     "write the marker in the transaction of the effect", "SIGKILL between marker and effect, deliver again: effect = 1",
     "background-jobs/idempotency"),
    ("lock-without-token", "high", "DEL without comparing a token deletes the lock of the next holder; a job longer than the TTL overlaps",
     "lease with token, renewal and fence, or a slot id for cron", "SIGSTOP the holder past its TTL, resume: its write is refused",
     "background-jobs/lease"),
    ("job-id-as-key", "high", "job ids are counters per queue: another queue's job 7 gets this one's result",
     "use a business key", "two queues, same id, different payloads: two effects", "background-jobs/idempotency"),
    ("repeat-option", "critical", "`repeat` in job options is ignored by BullMQ 6 and by Python: the job never recurs",
     "upsertJobScheduler, with the slot in the key of the effect", "three instances, kill the leader: one effect per slot",
     "background-jobs/schedule"),
    ("interval-loop", "high", "a timer runs in every instance and dies unnoticed with its process",
     "a job scheduler; or one evaluator with a conditional write", "three instances: one run per tick", "background-jobs/schedule"),
    ("task-not-held", "high", "the event loop keeps weak references: a task nobody holds may vanish, and its error with it",
     "hold it (TaskGroup, a set), or queue the work", "gc.collect() while it waits: it still ends", "async-flow/in-process-tasks"),
    ("missing-attempts", "high", "without `attempts` a job fails for good on its first error",
     "attempts and backoff per job type", "fail once, succeed on the second run", "background-jobs/retry"),
    ("add-without-id", "medium", "no job id and no deduplication: a form sent twice, or an add that timed out and was repeated, is two jobs",
     "jobId from the business key (name.key)", "add twice: one job", "async-flow/job-ids"),
    ("insert-without-marker", "high", "a plain INSERT in a handler: a retry, a stall or a redelivery writes the row again",
     "the marker of the inbox in the same transaction, or a unique key and ON CONFLICT", "SIGKILL between commit and acknowledgement: one row",
     "background-jobs/idempotency"),
    ("missing-retention", "medium", "BullMQ keeps every finished job forever: Redis fills up",
     "removeOnComplete by count and age, removeOnFail by age", "run 10,000 jobs: DBSIZE stays bounded", "background-jobs/retention"),
    ("remove-on-fail-count", "high", "failed jobs removed at once or kept by a small count: a burst evicts failures nobody has seen",
     "removeOnFail: {age: 14 days} and a dead-letter sweep", "1,000 failures: 1,000 dead letters", "background-jobs/dead-letter"),
    ("group-key", "high", "limiter.groupKey does not exist in open-source BullMQ: one tenant starves the others",
     "a token bucket per tenant as a guard", "a light tenant's wait beside a heavy one stays within twice its own",
     "background-jobs/rate-limit"),
    ("colon-job-id", "medium", "ids with one ':' or only digits throw in Node; Python overwrites digits by a number of its own, and `1:logs` is a key of job 1",
     "prefix and portable alphabet: name.key", "add twice from Node and Python: one job", "async-flow/job-ids"),
    ("listener-dead-letter", "critical", "a `failed` listener loses the job when the process dies in between; async ones never run in Python",
     "sweep the failed set into a table", "SIGKILL between failure and copy: the dead letter is there", "background-jobs/dead-letter"),
    ("attempts-made-filter", "high", "`attemptsMade >= attempts` misses unrecoverable and stalled-out jobs",
     "sweep the failed set, whatever the cause", "one job per cause: all are dead letters", "background-jobs/dead-letter"),
    ("no-shutdown", "high", "no SIGTERM handling: running jobs wait for their locks to run out and count as stalled",
     "stop taking, finish within a grace, release the rest, exit 0", "20 SIGTERMs mid-job: no stalled event", "background-jobs/shutdown"),
    ("no-deadline", "medium", "no time limit around the work: hung jobs hold every slot, with their locks renewed",
     "a deadline that cancels or kills the work", "two hung jobs in two slots: the other 20 run", "background-jobs/deadline"),
    ("stall-default", "medium", "maxStalledCount 1: two crashes fail a job with attempts left",
     "lift it, and count crashes where the job is judged", "1,000 jobs, 20 SIGKILLs: none failed", "background-jobs/stall-budget"),
    ("redis-default-timeout", "high", "a plain connection hangs producers for minutes when Redis is down; redis-py 8's 5 s socket timeout makes idle workers deaf",
     "own clients: fail-fast for producers, socket_timeout 30 for blocking reads", "stop Redis: add fails in < 2 s; idle 60 s: a job starts at once",
     "background-jobs/bullmq-worker"),
    ("publish-in-transaction", "critical", "queue or broker called inside a database transaction: ghosts on rollback, jobs that run before the commit",
     "outbox row in the transaction, relay after it", "roll back after the call: nothing was published", "event-driven/outbox"),
    ("payload-logged", "high", "the payload in a log: addresses, tokens and card numbers leak",
     "one redacted line with ids and outcome", "grep the output for a planted token", "background-jobs/observability"),
    ("inner-retry", "medium", "a retry loop inside a job that has attempts multiplies the calls",
     "raise; the queue decides", "a dead provider sees `attempts` calls, not their square", "background-jobs/retry"),
    ("gather-fan-out", "high", "several queues in one gather/Promise.all: one rejects, the retry duplicates the others",
     "one outbox row per queue in the transaction", "one queue down, three tries: one job in each", "event-driven/fan-out"),
    ("stream-no-ack", "critical", "entries of the group are never acknowledged: all of them come again after a restart, memory grows",
     "XACK after the effect", "restart: nothing is delivered twice", "event-driven/event-bus"),
    ("stream-no-claim", "high", "nobody takes over the pending entries of a dead consumer",
     "XAUTOCLAIM with a delivery count and quarantine", "SIGKILL a consumer: its entries are handled", "event-driven/event-bus"),
    ("stream-group-at-end", "high", "a group created at `$` never sees what was published before",
     "create it at 0", "publish, then subscribe: delivered", "event-driven/event-bus"),
    ("stream-maxlen", "medium", "MAXLEN drops entries a slow group has not read",
     "trim by the slowest group", "stop a consumer, publish past the limit: nothing lost", "event-driven/event-bus"),
    ("blocking-in-async", "high", "a blocking call stops the event loop: locks expire, every job of the process stalls",
     "async client, thread or subprocess", "a 10 ms ticker never gaps more than a quarter of the lock", "background-jobs/isolation"),
    ("wait-without-ttl", "medium", "waitUntilFinished without a ttl hangs forever when the event is missed",
     "ttl, state check first, poll as a fallback", "attach late: still resolved", "async-flow/wait-for-result"),
    ("acks-early", "high", "Celery acknowledges before the work by default: a crash loses it",
     "task_acks_late and task_reject_on_worker_lost, with idempotent tasks", "SIGKILL mid-task: it runs again", "background-jobs/choosing"),
    ("repeat-deprecated", "low", "BullMQ 5 honours `repeat`, BullMQ 6 ignores it: the job stops recurring with the upgrade",
     "upsertJobScheduler, before the upgrade", "three instances, kill the leader: one effect per slot", "background-jobs/schedule"),
    ("stock-worker", "medium", "the stock Python Worker strands jobs in close(), goes deaf when idle on redis-py 8, ends on a CancelledError",
     "the worker of the page, or its options and drain one by one", "SIGTERM under load: no job stays active; idle 60 s: a job starts at once",
     "background-jobs/bullmq-worker"),
    ("kafka-auto-commit", "high", "offsets are committed by a timer or on read, even of messages still in work: a crash loses them",
     "auto-commit off, commit after the effect", "SIGKILL mid-message: it is delivered again", "event-driven/event-bus"),
    ("rabbit-auto-ack", "critical", "the broker forgets a message the moment it is sent: a crash loses it and all that was prefetched",
     "acknowledge after the effect, with a prefetch", "SIGKILL mid-message: it is delivered again", "event-driven/event-bus"),
    ("scheduler-per-process", "high", "an in-process scheduler fires in every replica, and not at all while the process restarts",
     "a scheduler in the queue, or a row per slot in the transaction of the effect", "three instances: one effect per slot", "background-jobs/schedule"),
    ("asynq-defaults", "medium", "without MaxRetry and Timeout a task is retried 25 times over weeks and may run 30 minutes",
     "asynq.MaxRetry and asynq.Timeout per kind of task", "a hung call: the task ends in time; a dead provider: it is archived the same day",
     "background-jobs/stacks/asynq"),
    ("swallowed-error", "high", "the error is logged and the job ends as done: no retry, no dead letter, nobody knows",
     "raise; catch only the classes that mean success", "the provider answers 500: the job is retried, then a dead letter", "background-jobs/retry"),
    ("replace-effect-row", "high", "REPLACE overwrites the row of an effect: a late duplicate resets its state and its key",
     "INSERT … ON CONFLICT DO NOTHING, and look at what is there", "deliver again after the row moved on: it is unchanged", "background-jobs/idempotency"),
    ("key-per-try", "critical", "a new idempotency key for each try: the provider takes a retry for a new request",
     "derive it from the business key and the step", "the answer is lost once: one charge", "background-jobs/outside-call"),
    ("http-no-timeout", "medium", "no timeout: a hung server holds the slot of the job for as long as it likes",
     "connect and read timeouts, shorter than the deadline of the job", "a server that never answers: the job ends in time", "background-jobs/deadline"),
    ("fetch-no-signal", "low", "fetch without a signal waits five minutes for headers",
     "signal: AbortSignal.timeout(ms)", "a server that never answers: the job ends in time", "background-jobs/deadline"),
    ("retried-4xx", "medium", "a 4xx is retried like an outage: it cannot succeed, and hides behind its attempts",
     "end at once on 4xx but 408, 409, 425 and 429", "the provider answers 422: one call, one dead letter", "background-jobs/retry"),
    ("inverted-priority", "high", "in BullMQ 1 is the highest priority and a job without one runs before all: the urgent ones wait longest",
     "urgent 1, normal 10, bulk 100, and a priority on every job", "1,000 bulk jobs waiting: the urgent one is next", "background-jobs/priority"),
    ("readd-on-stop", "high", "jobs added again on SIGTERM exist twice: the running one comes back as stalled",
     "finish within a grace, release the rest", "20 SIGTERMs mid-job: one effect each", "background-jobs/shutdown"),
    ("row-in-payload", "medium", "a whole row in the payload: stale when the job runs, personal data in Redis, breaks with the next column",
     "the id, and what the job needs at its time", "change the row before the job runs: the change counts", "background-jobs/typed-jobs"),
    ("partial-health", "medium", "prioritized and delayed jobs are not in `waiting`: the check is green while they pile up",
     "oldest age over all states", "1,000 prioritized jobs and no worker: unhealthy", "background-jobs/health"),
    ("secret-logged", "high", "a secret or an e-mail address in a log call",
     "log ids; redact at the logger", "grep the output for a planted token", "background-jobs/observability"),
)  # fmt: skip
