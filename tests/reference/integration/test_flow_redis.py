"""Flows on a real queue: order, results, each policy of a failing child, conflicts, repeats, replay."""

import asyncio
from typing import Any

import pytest

from harness.pipelines import JobSetup
from studyhall.patterns import dead_letter
from studyhall.patterns.core.errors import Permanent
from studyhall.patterns.core.job import RetryPolicy
from studyhall.patterns.flow import FlowConflict, OnFailure, chain, fan_in, on_failure
from studyhall.patterns.producer import JobRequest
from studyhall.patterns.typed_jobs import JobTypes, Payload


class Step(Payload):
    name: str


class Flows:
    """Steps of any name on two queues; what ran, in order, and what each parent was given."""

    def __init__(self):
        self.ran: list[str] = []
        self.given: dict[str, tuple[Any, Any]] = {}
        self.broken: set[str] = set()
        self.jobs = JobTypes()
        for queue in ("left", "right"):
            self.jobs.register(
                name=queue, payload=Step, handler=self.run, queue=queue, retry=RetryPolicy(0.01, 0.01, 1)
            )

    async def run(self, ctx, payload: Step):
        self.given[payload.name] = (await ctx.children(), await ctx.failed_children())
        if payload.name in self.broken:
            raise Permanent(f"{payload.name} is broken")
        self.ran.append(payload.name)
        return {"by": payload.name}


def step(name, queue="left", **options):
    return JobRequest(queue, {"name": name}, key=name, **options)


async def test_a_chain_runs_in_order_across_queues_and_each_gets_the_result_before(redis_url, tmp_path):
    flows = Flows()
    async with JobSetup.open(redis_url, tmp_path, flows.jobs) as setup:
        steps = [step("a"), step("b", "right"), step("c")]
        await setup.producer.enqueue(chain(*steps))
        assert await setup.counts("left") == {"prioritized": 1, "waiting-children": 1}
        async with setup.working():
            await setup.ended(*steps)
        assert flows.ran == ["a", "b", "c"]
        assert flows.given["c"] == ({"bull:right:right.b": {"by": "b"}}, {})


async def test_a_parent_runs_once_after_all_its_children(redis_url, tmp_path):
    flows = Flows()
    children = [step(f"c{n}", "right") for n in range(20)]
    async with JobSetup.open(redis_url, tmp_path, flows.jobs) as setup, setup.working():
        await setup.producer.enqueue(fan_in(step("merge"), children))
        await setup.ended(step("merge"))
        assert flows.ran[-1] == "merge"
        assert sorted(flows.ran[:-1]) == sorted(f"c{n}" for n in range(20))
        assert len(flows.given["merge"][0]) == 20


async def test_wait_keeps_the_parent_until_the_child_is_replayed(redis_url, tmp_path):
    flows = Flows()
    flows.broken = {"b"}
    async with JobSetup.open(redis_url, tmp_path, flows.jobs) as setup, setup.working():
        steps = [step("a"), step("b"), step("c"), step("d", "right")]
        await setup.producer.enqueue(chain(*steps))
        assert await setup.ended(step("b")) == ["failed"]
        swept = await dead_letter.sweep(setup.jobs.queues, setup.producer.redis, setup.store)
        assert swept.archived == 1
        assert [await setup.state(each) for each in steps[2:]] == ["waiting-children", "waiting-children"]
        assert flows.ran == ["a"]
        flows.broken.clear()
        [letter] = await dead_letter.list_dead_letters(setup.store)
        await dead_letter.replay(setup.store, setup.producer.redis, letter.id)
        await setup.ended(steps[-1])
        assert flows.ran == ["a", "b", "c", "d"], "the flow went on where it stood, nothing ran twice"


async def test_fail_takes_the_parent_along_and_replaying_the_child_brings_both_back(redis_url, tmp_path):
    flows = Flows()
    flows.broken = {"child"}
    async with JobSetup.open(redis_url, tmp_path, flows.jobs) as setup, setup.working():
        [child] = on_failure("fail", step("child"))
        await setup.producer.enqueue(fan_in(step("parent", "right"), [child]))
        assert await setup.ended(step("child"), step("parent", "right")) == ["failed", "failed"]
        assert "child bull:left:left.child failed" in (await setup.job(step("parent", "right"))).failedReason
        await dead_letter.sweep(setup.jobs.queues, setup.producer.redis, setup.store)
        flows.broken.clear()
        done = await dead_letter.replay_many(setup.store, setup.producer.redis, per_second=1000)
        assert "left.child" in done.job_ids
        assert await setup.ended(step("child"), step("parent", "right")) == ["completed", "completed"]
        assert flows.ran == ["child", "parent"]


async def test_ignore_lets_the_parent_go_on_and_tells_it_what_is_missing(redis_url, tmp_path):
    flows = Flows()
    flows.broken = {"nice-to-have"}
    async with JobSetup.open(redis_url, tmp_path, flows.jobs) as setup, setup.working():
        optional = on_failure(OnFailure.IGNORE, step("nice-to-have"))
        await setup.producer.enqueue(fan_in(step("report", "right"), [step("needed"), *optional]))
        assert await setup.ended(step("report", "right")) == ["completed"]
        results, missing = flows.given["report"]
        assert results == {"bull:left:left.needed": {"by": "needed"}}
        assert "nice-to-have is broken" in missing["bull:left:left.nice-to-have"]


async def test_adding_a_flow_again_at_any_moment_changes_nothing(redis_url, tmp_path):
    flows = Flows()
    steps = [step("a"), step("b", "right"), step("c")]
    async with JobSetup.open(redis_url, tmp_path, flows.jobs) as setup:
        for _ in range(3):
            await setup.producer.enqueue(chain(*steps))
        async with setup.working("left"):
            await setup.ended(step("a"))
        await setup.producer.enqueue(chain(*steps))  # a is done, b waits for a worker
        async with setup.working("right"):
            await setup.ended(step("b", "right"))
        await setup.producer.enqueue(chain(*steps))  # c waits for a worker
        async with setup.working():
            await setup.ended(*steps)
            await setup.producer.enqueue(chain(*steps))  # all done
            await asyncio.sleep(0.3)
        assert flows.ran == ["a", "b", "c"]
        assert await setup.counts("left") == {"completed": 2}


async def test_a_child_of_another_living_flow_is_refused_before_anything_is_added(redis_url, tmp_path):
    """BullMQ adds the second parent without its child: it would wait forever, without an error."""
    flows = Flows()
    async with JobSetup.open(redis_url, tmp_path, flows.jobs) as setup:
        await setup.producer.enqueue(fan_in(step("first", "right"), [step("shared")]))
        before = await setup.counts("right")
        with pytest.raises(FlowConflict, match=r"left\.shared belongs to the flow of bull:right:right\.first"):
            await setup.producer.enqueue(fan_in(step("second", "right"), [step("shared"), step("own")]))
        assert await setup.counts("right") == before
        assert await setup.counts("left") == {"prioritized": 1}
