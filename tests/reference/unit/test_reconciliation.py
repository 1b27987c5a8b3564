"""What reconcile reports and does not touch."""

import time

from studyhall.patterns.reconciliation import Expected, reconcile


async def wanted(*keys, age=100.0):
    for key in keys:
        yield Expected(key, time.time() - age)


class World:
    """Where the keys should be, and who repaired what."""

    def __init__(self, *there):
        self.there = set(there)
        self.repaired: list[str] = []
        self.looks = 0

    async def present(self, keys):
        self.looks += 1
        return self.there & set(keys)

    async def repair(self, key):
        if key.startswith("broken"):
            raise RuntimeError("no stock record")
        self.repaired.append(key)
        self.there.add(key)


async def test_what_is_still_on_its_way_is_left_alone():
    world = World()
    report = await reconcile(wanted("a", age=1), world.present, world.repair, grace=10)
    assert (report.young, report.checked, world.repaired) == (1, 0, [])


async def test_what_appears_at_the_second_look_is_not_repaired():
    world = World()

    async def late(keys):
        there = await world.present(keys)
        world.there.add("a")  # it was moving from one state to the next
        return there

    report = await reconcile(wanted("a", "b"), late, world.repair, grace=0, second_look=0)
    assert (report.late, report.repaired) == (["a"], ["b"])


async def test_a_repair_that_fails_is_reported_and_the_others_go_on():
    world = World()
    report = await reconcile(wanted("a", "broken-1", "b"), world.present, world.repair, grace=0)
    assert report.repaired == ["a", "b"]
    assert report.failed == {"broken-1": "RuntimeError: no stock record"}


async def test_the_limit_bounds_what_a_wrong_answer_can_do():
    world = World()
    keys = [str(n) for n in range(50)]
    report = await reconcile(wanted(*keys), world.present, world.repair, grace=0, limit=5, batch=20)
    assert (len(report.repaired), report.left) == (5, 45)
    assert "left=45" in report.summary


async def test_keys_are_looked_up_in_batches():
    keys = [str(n) for n in range(100)]
    world = World(*keys)
    await reconcile(wanted(*keys), world.present, world.repair, grace=0, batch=40)
    assert world.looks == 3
