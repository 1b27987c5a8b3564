"""Real processes that drive orders and die, or freeze, at a named moment.

    saga_victims.py DIRECTORY    performs every plan-N.json that appears there, and writes plan-N.log beside
                                 it: {"saga_id", "pid"} per process, {"frozen": pid}, {"saga_id", "ended"}

A plan has store, payment, mode ("saga" or "naive"), fence and lease (false: without them), deadline
of a step, margin of the lease, timeout of a payment call, patience, limits: {step: {"attempts": …}}, and
victims: [{"saga_id": one, or null for every due saga; "moment", "step", "signal": "KILL", "STOP" or null}].
Each victim is a fork of this process, made after the imports: a process of its own that costs milliseconds.

A customer named `fails-at-STEP…` makes that step fail for good AFTER its effect.
"""

import asyncio
import json
import logging
import multiprocessing
import os
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import psycopg  # noqa: F401  imported before the forks, so that they need not
import sqlalchemy.dialects.postgresql.psycopg
import sqlalchemy.dialects.sqlite.aiosqlite  # noqa: F401
from sqlalchemy import Integer, Text, select

from studyhall.orders import saga as steps
from studyhall.orders.db import orders
from studyhall.orders.payments import Payments
from studyhall.patterns.core.errors import Permanent
from studyhall.patterns.core.job import RetryPolicy
from studyhall.patterns.core.open_store import close, open_store
from studyhall.patterns.core.store import begin, read
from studyhall.patterns.saga import Saga, SagaRunner, runner
from studyhall.patterns.saga import store as saga_store

QUICK = RetryPolicy(base=0.02, cap=0.1)
Moment = Callable[[str, str, str], None]


def dying(victim):
    def probe(moment, saga_id, step):
        if victim.get("signal") and (moment, step) == (victim["moment"], victim["step"]):
            number = signal.SIGKILL if victim["signal"] == "KILL" else signal.SIGSTOP
            victim["signal"] = None
            os.kill(os.getpid(), number)

    return probe


def failing(step, deadline, attempts=6, undo_attempts=6, **limits):
    def wrap(do):
        async def then_fail(ctx, *tx):
            result = await do(ctx, *tx)
            if ctx.data["customer"].startswith(f"fails-at-{ctx.step}"):
                raise Permanent(f"{ctx.step} failed for good after its effect")
            return result

        return then_fail

    do = wrap(step.do) if step.do else None
    retry, undo_retry = (replace(QUICK, attempts=most) for most in (attempts, undo_attempts))
    return replace(step, do=do, deadline=deadline, retry=retry, undo_retry=undo_retry, **limits)


def tight_saga(payments, deadline, limits):
    real = steps.buy_pack(payments)
    return Saga(real.name, [failing(step, deadline, **limits.get(step.name, {})) for step in real.steps])


async def drive(plan, victim):
    engine = open_store(plan["store"])
    async with Payments(plan["payment"], timeout=plan["timeout"]) as payments:
        if plan["mode"] == "naive":
            await naive(engine, payments, victim)
        else:
            runner = SagaRunner(
                engine,
                tight_saga(payments, plan["deadline"], plan.get("limits", {})),
                lease_margin=plan["margin"],
                probe=dying(victim),
            )
            await _until_ended(engine, runner, victim["saga_id"], plan["patience"])
    await close(engine)


async def _until_ended(engine, runner, saga_id, patience):
    deadline = time.monotonic() + patience
    while time.monotonic() < deadline:
        await (runner.resume_due() if saga_id is None else runner.run(saga_id))
        left = select(saga_store.sagas.c.id).where(saga_store.sagas.c.due_at.is_not(None)).limit(1)
        if saga_id is not None:
            left = left.where(saga_store.sagas.c.id == saga_id)
        async with read(engine) as tx:
            if (await tx.execute(left)).first() is None:
                return
        await asyncio.sleep(0.02)


async def naive(engine, payments, victim):
    """The saga as usually published: progress in memory, each effect on its own, undo called once."""
    moment, order_id = dying(victim), victim["saga_id"]
    async with read(engine) as tx:
        row = (await tx.execute(select(orders).where(orders.c.id == order_id))).mappings().one()
    data = {**row, "order_id": order_id}
    ctx = SimpleNamespace(saga_id=order_id, data=data, error="failed", results={}, step="")
    key = f"naive-{order_id}"

    async def inside(step):
        async with begin(engine) as tx:
            await step(ctx, tx)

    async def nothing():
        """The order is placed."""

    async def charge():
        made = await payments.charge(key, amount=row["amount_cents"], customer=row["customer"], method=row["method"])
        ctx.results["charge"] = made

    async def confirm():
        if row["customer"].startswith("fails-at-confirm"):
            raise Permanent("confirm failed")
        await inside(steps.confirm)

    plan = [
        ("place-order", nothing, lambda: inside(steps.cancel)),
        ("reserve-seats", lambda: inside(steps.reserve), lambda: inside(steps.release)),
        ("charge", charge, lambda: payments.refund(f"{key}-undo", charge_key=key)),
        ("confirm", confirm, None),
    ]
    done = []
    try:
        for name, do, undo in plan:
            moment("before intent", order_id, name)
            await do()
            moment("after effect", order_id, name)
            done.append(undo)
    except Exception:
        for undo in reversed(done):
            if undo is not None:
                await undo()


def _without_fence():
    """The same write, proving nothing."""

    def hold(given):
        row = saga_store.sagas.update().where(saga_store.sagas.c.id == given("_id"))
        row = row.where(*(given(name).is_not(None) for name in ("_fence", "_cancel")))
        return row.values({name: given(name) for name in saga_store._SAGA_TYPES})

    types = {"_id": Text(), "_fence": Integer(), "_cancel": Text()}
    return saga_store.batch(hold, **saga_store._SAGA_TYPES, **types)


async def _claim_without_lease(engine, *, owner, **_):
    """The usual poller: everything that has not ended, whoever else drives it."""
    async with read(engine) as tx:
        open_ = select(saga_store.sagas.c.id).where(saga_store.sagas.c.due_at.is_not(None))
        ids = (await tx.scalars(open_)).all()
    sagas = [replace(await saga_store.load(engine, saga_id), owner=owner) for saga_id in ids]
    return [saga_store.ClaimedSaga(saga, taken_over=False) for saga in sagas]


def _all_have_looked(plan):
    """Pollers of all due sagas begin together, and none drives before all have looked once: else the first would do
    them all before the last is forked, and nothing would be shown about several at once."""
    looking = multiprocessing.Barrier(max(1, [each["saga_id"] for each in plan["victims"]].count(None)))
    claim, looked = runner.claim, False

    async def claim_together(*args, saga_id=None, **options):
        nonlocal looked
        if looked or saga_id is not None:
            return await claim(*args, saga_id=saga_id, **options)
        looked = True
        looking.wait(30)
        sagas = await claim(*args, saga_id=saga_id, **options)
        looking.wait(30)
        return sagas

    runner.claim = claim_together


def perform(plan):
    logging.basicConfig(level=logging.WARNING, format="%(process)d %(levelname)s %(message)s")
    if not plan.get("fence", True):
        saga_store._HOLD = _without_fence()
    if not plan.get("lease", True):
        runner.claim = _claim_without_lease
    _all_have_looked(plan)
    pids = {}
    for victim in plan["victims"]:
        if (pid := os.fork()) == 0:
            try:
                asyncio.run(drive(plan, victim))
                os._exit(0)
            except BaseException:
                logging.exception("victim of %s", victim["saga_id"])
                os._exit(1)
        pids[pid] = victim["saga_id"]
        print(json.dumps({"saga_id": victim["saga_id"], "pid": pid}), flush=True)
    while pids:
        pid, status = os.waitpid(-1, os.WUNTRACED)
        if os.WIFSTOPPED(status):
            print(json.dumps({"saga_id": pids[pid], "frozen": pid}), flush=True)
            continue
        ended = f"signal {os.WTERMSIG(status)}" if os.WIFSIGNALED(status) else f"exit {os.WEXITSTATUS(status)}"
        print(json.dumps({"saga_id": pids.pop(pid), "ended": ended}), flush=True)
    print("all ended", flush=True)


def main():
    directory, seen = Path(sys.argv[1]), set()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # finished performances reap themselves
    print("ready", flush=True)
    while True:
        for path in sorted(set(directory.glob("plan-*.json")) - seen):
            seen.add(path)
            if os.fork() == 0:
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                log = os.open(path.with_suffix(".log"), os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
                os.dup2(log, 1)
                os.dup2(log, 2)
                perform(json.loads(path.read_text()))
                os._exit(0)
        time.sleep(0.01)


if __name__ == "__main__":
    main()
