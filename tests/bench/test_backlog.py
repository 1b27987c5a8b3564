"""Adding and fetching are timed while exactly this many jobs wait."""

import pytest

from bench.sections import backlog


def test_each_size_has_a_row_with_its_ratio_to_the_smallest(redis_url):
    rows = backlog.run(redis_url, sizes=(100, 300), samples=20)
    assert list(rows) == [f"{way}, {size} waiting" for way in ("bare", "producer") for size in (100, 300)]
    for way in ("bare", "producer"):
        first, second = rows[f"{way}, 100 waiting"], rows[f"{way}, 300 waiting"]
        assert first["add_ratio"] == first["fetch_ratio"] == 1
        assert first.keys() == backlog.COLUMNS.keys()
        for name in ("add", "fetch"):
            assert second[f"{name}_ratio"] == pytest.approx(second[f"{name}_us"] / first[f"{name}_us"], abs=0.01)


async def test_a_backlog_that_changes_its_size_gives_no_figures():
    async def nothing(_):
        return None

    with pytest.raises(RuntimeError, match="instead of 100"):
        await backlog._grow([100], 2, nothing, nothing, nothing, lambda: 7)
