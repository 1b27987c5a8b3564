"""Crashes around flows: of the producer while it adds them, of workers between two steps."""

import asyncio
import random
import sys
from collections import Counter, defaultdict
from pathlib import Path

import pytest
from sqlalchemy import func, select

from harness.pipelines import full_producer
from harness.waiting import until
from studyhall.patterns.core.open_store import close, create_all, open_store
from studyhall.patterns.core.store import read

PROGRAM = Path(__file__).parent / "programs" / "flow_processes.py"
sys.path.insert(0, str(PROGRAM.parent))

import flow_processes as program  # noqa: E402

pytestmark = pytest.mark.fault


async def test_a_killed_producer_leaves_whole_flows_where_single_adds_leave_halves(
    redis_url, spawn, scale, seed, figures
):
    rng = random.Random(seed)
    producer = full_producer(program.job_types(), redis_url)

    async def halves(queue):
        """How many chains there are, and how many lack a step."""
        steps = Counter()
        async for key in producer.redis.scan_iter(f"bull:{queue}:*.*", count=1000):
            if key.count(":") == 2:
                steps[key.rpartition(".")[2].removeprefix("chain-")] += 1
        return len(steps), sum(number != len(program.STEPS) for number in steps.values())

    try:
        kills = naive_half = 0
        # Some kills fall between two chains: more, until one is hit.
        while kills < scale(4, 15) or (not naive_half and kills < 40):
            victim = spawn(PROGRAM, "produce", f"--redis={redis_url}", f"--start={kills * 1_000_000}")
            await victim.line('"ready"')
            await asyncio.sleep(0.2 + rng.random() * 0.1)
            victim.kill()
            kills += 1
            _, naive_half = await halves(program.NAIVE)
        flows, half = await halves(program.QUEUE)
    finally:
        await producer.close()
    assert flows > 0
    assert naive_half, "no kill hit the adds: this run proves nothing"
    assert half == 0
    figures("flow", name="killed-producer", kills=kills, flows=flows, half_flows=half, naive_half_chains=naive_half)


@pytest.mark.slow
async def test_killed_workers_lose_no_step_of_a_flow_where_hand_made_chains_end_in_the_middle(
    redis_url, tmp_path, spawn, scale, seed, figures
):
    chains, kills = scale(40, 250), scale(3, 15)
    rng = random.Random(seed)
    store_url = f"sqlite:///{tmp_path / 'steps.db'}"
    store = open_store(store_url)
    await create_all(store)
    producer = full_producer(program.job_types(), redis_url, timeout=20)

    async def steps_done():
        async with read(store) as connection:
            return int(await connection.scalar(select(func.count()).select_from(program.done)) or 0)

    async def run(total, add):
        """Add the chains, kill a worker at random moments, wait until nothing is left to run."""
        began = await steps_done()
        for number in range(total):
            await add(number)
        worker, hits = None, 0
        for kill in range(kills + 1):
            worker = spawn(PROGRAM, "work", f"--redis={redis_url}", f"--store={store_url}")
            await worker.line('"ready"')
            if kill < kills:
                mark = began + total * 4 * (kill + 1) // (kills + 4)
                await until(lambda mark=mark: _at_least(steps_done, mark, idle), 30, f"{mark} steps", every=0.01)
                await asyncio.sleep(rng.random() * 0.03)
                hits += sum([await producer.redis.llen(f"bull:{q}:active") for q in (program.QUEUE, program.NAIVE)])
                worker.kill()
        assert worker is not None
        await until(idle, 60, "nothing is left", every=0.1)
        worker.close()
        async with read(store) as connection:
            rows = await connection.execute(
                select(program.done.c.chain, program.done.c.step).order_by(program.done.c.id)
            )
            done = defaultdict(list)
            for chain, step in rows:
                done[chain].append(step)
        return done, hits

    async def idle():
        for name in (program.QUEUE, program.NAIVE):
            counts = await producer.queue(name).getJobCounts()
            if any(counts[state] for state in ("waiting", "prioritized", "delayed", "active", "waiting-children")):
                return False
        return True

    async def by_hand(number):
        first = program.STEPS[0]
        await producer.queue(program.NAIVE).add(first, {"chain": number}, {"jobId": f"{first}.{number}", "attempts": 3})

    try:
        naive, naive_hits = await run(chains, by_hand)
        naive_cut = [number for number in range(chains) if len(naive[number]) < len(program.STEPS)]
        flows, hits = await run(chains, lambda number: producer.enqueue(program.flow_of(number + 1_000_000)))
        ours = {number: steps for number, steps in flows.items() if number >= 1_000_000}
    finally:
        await producer.close()
        await close(store)
    assert naive_cut, f"{naive_hits} running steps were killed and no chain broke: this run proves nothing"
    assert hits > 0
    assert len(ours) == chains
    assert all(steps == list(program.STEPS) for steps in ours.values()), "every step once, in order"
    figures(
        "flow",
        name="killed-workers",
        chains=chains,
        kills=kills,
        steps_killed=hits,
        chains_cut=sum(len(set(steps)) < len(program.STEPS) for steps in ours.values()),
        steps_duplicated=sum(len(steps) - len(set(steps)) for steps in ours.values()),
        naive_chains_cut=len(naive_cut),
    )


async def _at_least(count, mark, idle):
    return await count() >= mark or await idle()
