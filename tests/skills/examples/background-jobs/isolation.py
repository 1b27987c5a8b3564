# [use]
from patterns.core.errors import Permanent
from patterns.isolation import ProcessDied, SubprocessPool


def count_primes(limit: int) -> int:  # top-level, importable, plain function; arguments and result are pickled
    return sum(all(n % d for d in range(2, int(n**0.5) + 1)) for n in range(2, limit))


pool = SubprocessPool(size=2)  # one per process, closed after the workers have drained


async def crunch(ctx, payload) -> int:
    try:
        return await pool.run(count_primes, payload.limit, timeout=ctx.remaining(), memory_limit=512 << 20)
    except ProcessDied as error:  # segfault, OOM: only this call. Transient by default; a repeat offender is not
        if ctx.attempt >= 2:
            raise Permanent(f"kills its process every time: {error}") from error
        raise


# [/use]


async def example(redis_url: str, store_url: str) -> None:
    from types import SimpleNamespace

    ctx = SimpleNamespace(remaining=lambda: 20.0, attempt=1)
    assert await crunch(ctx, SimpleNamespace(limit=100)) == 25
    await pool.close()
