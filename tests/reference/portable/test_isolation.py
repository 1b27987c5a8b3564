"""Work in a process of its own comes back, fails or dies without taking anybody along."""

import operator
import os

import pytest

from studyhall.patterns.core.errors import Transient
from studyhall.patterns.isolation import SubprocessPool


async def test_results_and_errors_come_back_and_a_dead_child_is_replaced():
    async with SubprocessPool(1) as pool:
        assert await pool.run(operator.add, 1, 2) == 3
        with pytest.raises(ZeroDivisionError):
            await pool.run(operator.floordiv, 1, 0)
        child = await pool.run(os.getpid)
        assert child != os.getpid()
        with pytest.raises(Transient):
            await pool.run(os._exit, 3)
        assert await pool.run(os.getpid) not in (child, os.getpid())
