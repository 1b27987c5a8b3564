"""A process with busy and idle children in its pool, waiting to be killed. Prints the children's pids."""

import asyncio
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

import isolated_work

from studyhall.patterns.isolation import SubprocessPool


async def main(mark):
    pool = SubprocessPool(3)
    busy = asyncio.create_task(pool.run(isolated_work.spin_forever, mark))
    idle = await pool.run(isolated_work.pid)
    while not (Path(mark).exists() and Path(mark).read_text()):
        await asyncio.sleep(0.01)
    print("children", Path(mark).read_text(), idle, flush=True)
    await busy


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1]))
