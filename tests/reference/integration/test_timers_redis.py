"""Three instances: an interval in each runs everything three times, a schedule in Redis once."""

from collections import Counter
from pathlib import Path

import pytest

from harness.waiting import until

PROGRAM = Path(__file__).parent / "programs" / "timer_instance.py"
INSTANCES = 3


@pytest.mark.slow
async def test_an_interval_in_three_instances_runs_three_times_and_a_schedule_once(
    spawn, redis_server, redis_url, tmp_path, figures
):
    ticks = 4

    async def runs(kind, *args):
        """How often each tick ran, while all instances were up; the first and the last tick are cut off."""
        instances = [spawn(PROGRAM, kind, redis_url, *args) for _ in range(INSTANCES)]
        for each in instances:
            await each.line("ready", 60)
        with redis_server.client() as client:
            client.delete("reminders")

            def seen():
                return [str(tick) for tick in client.lrange("reminders", 0, -1)]

            await until(lambda: len(set(seen())) >= ticks + 2, 60, f"{ticks + 2} ticks")
            ran = seen()
        for each in instances:
            each.close()
        order = list(dict.fromkeys(ran))
        return Counter(tick for tick in ran if tick in order[1:-1])

    naive = await runs("interval")
    ours = await runs("schedule", f"sqlite:///{tmp_path / 'timers.db'}")
    per_tick = sum(naive.values()) / len(naive)
    assert per_tick > 2, f"every instance does it: {naive}"
    assert set(ours.values()) == {1}, ours
    figures(
        "timers",
        name="three instances",
        instances=INSTANCES,
        naive_runs_per_tick=round(per_tick, 1),
        ticks=len(ours),
        runs=sum(ours.values()),
    )
