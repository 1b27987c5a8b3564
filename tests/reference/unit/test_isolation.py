"""Isolation: what comes back from a child process, and how the pool uses its children."""

import asyncio
import time
from pathlib import Path

import pytest
import pytest_asyncio

from studyhall.patterns.core.errors import Cancelled, Permanent, RateLimited, ResourceBusy, Snooze, Transient
from studyhall.patterns.deadline import DeadlineExceeded, run_within
from studyhall.patterns.isolation import IsolatedError, SubprocessPool

PROGRAMS = Path(__file__).parents[1] / "faults" / "programs"


@pytest.fixture
def work(monkeypatch):
    """Importable by its name, here and in the children, which get our sys.path."""
    monkeypatch.syspath_prepend(str(PROGRAMS))
    import isolated_work

    return isolated_work


@pytest_asyncio.fixture
async def pool():
    async with SubprocessPool(2) as pool:
        yield pool


async def test_results_come_back_and_children_are_reused(pool, work):
    assert await pool.run(work.add, 1, 2) == 3
    assert await pool.run(work.echo_later, {"a": [1, None, b"x"]}) == {"a": [1, None, b"x"]}
    assert len({await pool.run(work.pid) for _ in range(10)}) == 1
    pids = await asyncio.gather(*(pool.run(work.pid) for _ in range(20)))
    assert len(set(pids)) == 2, "never more than the pool's size"


async def test_a_worn_out_child_is_replaced(work):
    async with SubprocessPool(1, recycle_after=3) as pool:
        pids = [await pool.run(work.pid) for _ in range(7)]
    assert [pids.count(pid) for pid in dict.fromkeys(pids)] == [3, 3, 1]


@pytest.mark.parametrize(
    ("how", "kind", "attributes"),
    [
        ("transient", Transient, {}),
        ("permanent", Permanent, {}),
        ("rate-limited", RateLimited, {"retry_after": 7.5}),
        ("busy", ResourceBusy, {"retry_after": 2.5}),
        ("snooze", Snooze, {"delay": 60}),
        ("cancelled", Cancelled, {}),
        ("os", FileNotFoundError, {"errno": 2, "filename": "/no/such/file"}),
        ("value", ValueError, {}),
    ],
)
async def test_errors_keep_their_class_and_what_they_carry(pool, work, how, kind, attributes):
    with pytest.raises(kind) as caught:
        await pool.run(work.fail, how)
    assert type(caught.value) is kind
    assert {name: getattr(caught.value, name) for name in attributes} == attributes
    assert "isolated_work.py" in caught.value.__notes__[0], "the child's stack is kept"
    assert await pool.run(work.add, 1, 1) == 2, "an error does not cost the child"


async def test_an_error_that_cannot_travel_is_described_in_words(pool, work):
    with pytest.raises(IsolatedError, match="fail raised Awkward: awkward indeed"):
        await pool.run(work.fail, "awkward")


async def test_a_result_that_cannot_travel_is_permanent(pool, work):
    """Transient would repeat the work in vain."""
    with pytest.raises(Permanent, match="cannot be sent back"):
        await pool.run(work.unsendable)
    async with SubprocessPool(1, max_result_bytes=1 << 20) as small:
        with pytest.raises(Permanent, match="return a path"):
            await small.run(work.large, 2)
        assert len(await small.run(work.large, 0)) == 0
    assert len(await pool.run(work.large, 8)) == 8 << 20


async def test_printing_and_reading_do_not_touch_the_answers(pool, work):
    assert await pool.run(work.print_and_read) == ""


async def test_only_importable_functions_are_accepted(pool):
    def local(): ...

    for fn in (local, lambda: None):
        with pytest.raises(TypeError, match="top-level function of an importable module"):
            await pool.run(fn)


async def test_a_closed_pool_says_so(work):
    pool = SubprocessPool(1)
    await pool.run(work.add, 1, 1)
    await pool.close()
    with pytest.raises(RuntimeError, match="this pool is closed"):
        await pool.run(work.add, 1, 1)
    with pytest.raises(ValueError, match="at least one process"):
        SubprocessPool(0)


async def test_a_warm_call_costs_little(pool, work, figures):
    took = []
    for _ in range(201):
        start = time.perf_counter()
        await pool.run(work.add, 1, 1)
        took.append(time.perf_counter() - start)
    cold, *warm = took
    median = sorted(warm)[100]
    assert median < cold / 5, "a warm call costs as much as starting a process"
    figures("isolation", name="overhead", calls=len(warm), median_ms=round(median * 1000, 2))


async def test_waiting_for_a_free_process_is_not_charged_to_the_deadline(work):
    """Six calls of 0.3 s in turn, each with a limit of 2 s less than their sum: none is late by itself."""
    async with SubprocessPool(1) as pool:
        await pool.run(work.add, 1, 1)  # the child is there

        async def call():
            await pool.run(time.sleep, 0.3)

        async with asyncio.timeout(60):
            await asyncio.gather(*(run_within(1.2, call) for _ in range(6)))
        with pytest.raises(DeadlineExceeded):
            await run_within(0.5, pool.run, time.sleep, 30)
