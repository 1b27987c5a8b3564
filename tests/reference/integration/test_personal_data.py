"""Canaries in rows, keys and payloads: no error path writes them into a log, Redis, the dead letters or an answer."""

import asyncio
import logging
from collections.abc import Awaitable, Callable

import pytest
from sqlalchemy import Column, Float, Integer, String, Table, bindparam, text
from sqlalchemy.ext.asyncio import AsyncConnection

from harness.pipelines import JobSetup
from queuesmith.console.problems import problem_of
from studyhall.patterns import dead_letter
from studyhall.patterns.core.errors import Permanent, Transient
from studyhall.patterns.core.job import RetryPolicy
from studyhall.patterns.core.store import begin, in_one_hop, is_postgres, metadata
from studyhall.patterns.idempotency import Inbox
from studyhall.patterns.observability import JsonLines
from studyhall.patterns.pipeline import Done
from studyhall.patterns.producer import JobRequest
from studyhall.patterns.typed_jobs import JobTypes, Payload

# A name, a street and an account number: nothing about their shape tells a redactor what they are.
CANARIES = ("Wilhelmina Canary", "17 Canary Row", "CANARY-0042-7")
people = Table(
    "canary_people",
    metadata,
    Column("name", String(40), primary_key=True),
    Column("street", String(40), nullable=False, unique=True),
    Column("account", String(40), nullable=False),
    Column("balance", Float, nullable=False),
    Column("number", Integer),
)
ROW = dict(zip(("name", "street", "account"), CANARIES, strict=True)) | {"balance": 1.0}


class Person(Payload):
    how: str
    name: str = CANARIES[0]
    street: str = CANARIES[1]
    account: str = CANARIES[2]


Fault = Callable[[AsyncConnection], Awaitable[object]]


async def taken(tx):
    await tx.execute(people.insert().values(ROW))
    await tx.execute(people.insert().values(ROW))


async def incomplete(tx):
    await tx.execute(people.insert().values({**ROW, "account": None}))


async def many(tx):
    await tx.execute(people.insert(), [{**ROW, "number": n} for n in range(3)])


async def no_number(tx):
    await tx.execute(people.insert().values({**ROW, "number": CANARIES[2]}))
    await tx.execute(text("SELECT abs(-9223372036854775808 + length(:who) * 0)"), {"who": CANARIES[0]})


async def no_float(tx):
    await tx.execute(people.insert().values({**ROW, "balance": CANARIES[2]}))


async def no_type(tx):
    await tx.execute(people.insert().values({**ROW, "balance": object()}))


async def too_long(tx):
    await tx.execute(people.insert().values({**ROW, "name": CANARIES[0] * 10}))
    raise Transient("SQLite takes any length")


async def missing_table(tx):
    query = text("SELECT * FROM nowhere WHERE name = :who").bindparams(bindparam("who", CANARIES[0]))
    await tx.execute(query)


async def cut_off(tx):
    """An outage in the middle of a transaction that holds the values."""
    await tx.execute(people.insert().values(ROW))
    if tx.dialect.name == "postgresql":
        await tx.execute(text("SELECT pg_terminate_backend(pg_backend_pid())"))
    await tx.execute(text("PRAGMA max_page_count=1"))
    await tx.execute(
        people.insert(), [{**ROW, "name": f"{CANARIES[0]} {n}", "street": f"{CANARIES[1]} {n}"} for n in range(999)]
    )


async def wrapped(tx):
    try:
        await taken(tx)
    except Exception as error:
        raise Permanent("the person could not be stored") from error


FAULTS: dict[str, Fault] = {
    cause.__name__: cause
    for cause in (taken, incomplete, many, no_number, no_float, no_type, too_long, missing_table, wrapped)
}


@pytest.fixture
def written(caplog):
    """Everything that was logged, by anybody, as our formatter writes it."""
    caplog.set_level(logging.DEBUG)
    caplog.handler.setFormatter(JsonLines())
    return lambda: caplog.text


def clean(*texts):
    for shown in texts:
        for canary in CANARIES:
            before, leak, after = (shown or "").partition(canary)
            assert not leak, f"{before[-200:]}{leak}{after[:100]}"


@pytest.mark.parametrize("how", FAULTS)
async def test_no_value_of_a_statement_reaches_log_redis_or_dead_letter(how, redis_url, store_url, tmp_path, written):
    async def store_person(_ctx, payload: Person):
        return Done(None, FAULTS[payload.how])

    jobs = JobTypes()
    retry = RetryPolicy(base=0.01, cap=0.01, attempts=2)
    jobs.register(name="person", payload=Person, handler=store_person, queue="setup", retry=retry)
    request = JobRequest("person", {"how": how}, key="k")
    async with JobSetup.open(redis_url, store_url, jobs) as setup:
        ref = await setup.producer.enqueue(request)
        async with setup.working():
            assert await setup.ended(request) == ["failed"]
        fields = await setup.producer.redis.hgetall(f"bull:setup:{ref.id}")
        clean(fields["failedReason"], fields["stacktrace"])
        assert "save" in fields["stacktrace"] or "Traceback" in fields["stacktrace"], "still a trace"
        await dead_letter.sweep(["setup"], setup.producer.redis, setup.store)
        [letter] = await dead_letter.list_dead_letters(setup.store)
        clean(letter.reason, letter.snapshot["fields"]["stacktrace"])
        clean(*map(str, setup.lines), written())


@pytest.mark.parametrize("how", [*FAULTS, "cut_off"])
async def test_no_value_of_a_statement_reaches_an_answer_or_an_error_text(how, store, written):
    fault = FAULTS.get(how, cut_off)
    with pytest.raises(Exception) as raised:  # noqa: PT011
        async with begin(store) as tx:
            await fault(tx)
    error = raised.value
    clean(bytes(problem_of(raised.value).body).decode())
    logging.getLogger("test").error("it failed", exc_info=raised.value)
    while error is not None:
        clean(str(error), repr(error))
        error = error.__cause__ or error.__context__
    clean(written())


async def test_no_value_in_the_errors_of_batched_statements(store):
    def twice(tx):
        mark = "%s" if is_postgres(store) else "?"
        row = ("c", CANARIES[0], CANARIES[1], "{}", 1.0)
        insert = f"INSERT INTO inbox (consumer, key, fingerprint, result, at) VALUES ({', '.join([mark] * 5)})"
        tx.exec_driver_sql(insert, [row, row])

    with pytest.raises(Exception, match=r"(?i)unique") as raised:
        await in_one_hop(store, twice, write=True)
    clean(str(raised.value), str(raised.value.__cause__))
    answers = await asyncio.gather(
        Inbox(store, "c").record(f"{CANARIES[0]}\0\ud800", CANARIES[1], {}), return_exceptions=True
    )
    clean(str(answers[0]))
