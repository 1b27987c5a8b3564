"""Run examples of a skill against the modules that the skill itself brings: `run_examples.py URL DIRECTORY NAME…`.

Each example is a file with regions that a page quotes, and `async def example(redis_url, store_url)`, which uses
them and asserts. The working directory holds the examples and `patterns/`, a copy of the skill's modules.
"""

from __future__ import annotations

import asyncio
import importlib
import os
import sys
import traceback

import redis


def main(redis_url: str, directory: str, *names: str) -> int:
    sys.path.insert(0, os.getcwd())
    os.environ["REDIS_URL"] = redis_url
    failed = 0
    for name in names:
        redis.Redis.from_url(redis_url).flushall()
        store_url = f"sqlite:///{directory}/{name}.db"
        try:
            module = importlib.import_module(name)
            asyncio.run(asyncio.wait_for(module.example(redis_url, store_url), 60))
        except BaseException:
            failed += 1
            print(f"failed: {name}", file=sys.stderr)
            traceback.print_exc()
        else:
            print(f"ok: {name}")
    return failed


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
