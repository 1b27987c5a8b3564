"""Run the example of a page: `run_example.py URL DIRECTORY NAME`.

An example is a file with regions that a page quotes, and `async def example(redis_url, store_url)`, which uses them
and asserts. The working directory holds the examples and `patterns/`, as `queuesmith add` made it.
"""

from __future__ import annotations

import asyncio
import importlib
import os
import sys

import redis


def main(redis_url: str, directory: str, name: str) -> None:
    sys.path.insert(0, os.getcwd())
    os.environ["REDIS_URL"] = redis_url
    redis.Redis.from_url(redis_url).flushall()
    module = importlib.import_module(name)
    asyncio.run(asyncio.wait_for(module.example(redis_url, f"sqlite:///{directory}/{name}.db"), 60))


if __name__ == "__main__":
    main(*sys.argv[1:])
