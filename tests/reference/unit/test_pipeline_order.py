"""A pipeline in an order that cannot work is refused when it is built, with the fix in the message."""

from types import SimpleNamespace
from typing import Any

import pytest
from pydantic import BaseModel

from studyhall.patterns.core.errors import FailPermanently
from studyhall.patterns.core.execution import MissingStep
from studyhall.patterns.core.job import Done
from studyhall.patterns.idempotency.once import once
from studyhall.patterns.observability import logged
from studyhall.patterns.pipeline import Pipeline, WrongOrder
from studyhall.patterns.rate_limit import limited
from studyhall.patterns.signed_payload import Signer, signed
from studyhall.patterns.typed_jobs import JobTypes, plain, typed


class Label(BaseModel):
    parcel: str


async def print_label(ctx, payload: Label):
    return payload.parcel


NOBODY: Any = None
READ = plain(Label, print_label)


@pytest.mark.parametrize(
    ("steps", "fix"),
    [
        ([], r"add typed\(jobs\) or plain\(Model, handler\)"),
        ([logged()], r"nothing reads the job"),
        ([once(NOBODY), READ], r"once\(\) needs the payload: put typed\(jobs\) or plain\(Model, handler\) before it"),
        ([limited(NOBODY), READ], r"limited\(\) needs the payload"),
        ([READ, signed(Signer(["0123456789abcdef"]))], r"signed\(\) has to stand before plain\(\)"),
        ([READ, logged()], r"logged\(\) has to stand before plain\(\)"),
        ([READ, typed(JobTypes())], r"plain\(\) and typed\(\) both give the payload: keep one"),
        (["not a step"], r"is not a step"),
    ],
)
def test_an_order_that_cannot_work_is_refused_with_the_fix(steps, fix):
    with pytest.raises(WrongOrder, match=fix):
        Pipeline(*steps)


def job(data, **more):
    usual = {
        "id": "7",
        "name": "print",
        "data": data,
        "opts": {},
        "timestamp": 0,
        "processedOn": 0,
        "attemptsMade": 0,
        "attemptsStarted": 1,
        "stalledCounter": 0,
        "queue": SimpleNamespace(name="labels"),
    }
    return SimpleNamespace(**{**usual, **more})


async def test_steps_wrap_the_handler_and_their_answers_pass_through():
    async def doubled(run, call_next):
        return 2 * await call_next(run)

    assert await Pipeline(READ, doubled)(job({"parcel": "ab"}), "token") == "abab"


async def test_a_database_effect_without_a_step_that_commits_it_is_refused():
    async def save(tx): ...

    async def effect(ctx, payload: Label):
        return Done(1, save)

    with pytest.raises(FailPermanently, match="add once"):
        await Pipeline(plain(Label, effect))(job({"parcel": "a"}), "token")


async def test_what_no_step_provides_says_which_step_does():
    async def reports(ctx, payload: Label):
        try:
            await ctx.progress("printing", 10)
        except MissingStep as missing:
            errors.append(str(missing))

    errors = []
    await Pipeline(plain(Label, reports))(job({"parcel": "a"}), "token")
    assert errors == ["add progress.reporting() to the pipeline to use ctx.progress"]
