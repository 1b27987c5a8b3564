"""Isolation: CPU-bound and risky work runs in child processes that can be killed.

Promise: the event loop stays free while a function computes; a timeout or a cancellation kills the process
that runs it; waiting for a free process counts against no deadline of the caller; a function that takes its
process down (segfault, `os._exit`, OOM killer, memory limit) fails only its own call, with `ProcessDied`.
Children are fresh interpreters, never forks of a process with threads and sockets; they are reused, replaced
when they die, and never outlive the parent, even a SIGKILLed one.

Does not hold as a security boundary: a child has the rights of its parent, and its answers are unpickled.
Outside Linux a child whose parent was SIGKILLed ends only when it gives up the GIL, and the memory
limit may not be enforced. Arguments and results are pickled on the event loop: pass a path, not 100 MB.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import pickle
import signal
import sys
from collections.abc import Callable
from typing import Any, TypeVar

from ..core.errors import DeadlineExceeded, Permanent, Transient
from ..deadline import uncharged
from . import child as isolated_child
from .child import HEADER, OUT_OF_MEMORY

__all__ = ["IsolatedError", "ProcessDied", "SubprocessPool"]

T = TypeVar("T")

_BOOT = "import sys, json; sys.path[:] = json.loads(sys.argv[1]); from {} import serve; serve(int(sys.argv[2]))"
_START_LIMIT = 60.0
_LAST_BREATH = 2.0


class ProcessDied(Transient):
    """The process running the function died. Only this call is affected; its child is replaced."""

    def __init__(self, message: str, *, exit_code: int | None = None) -> None:
        super().__init__(message)
        self.exit_code = exit_code  # negative: the signal


class IsolatedError(Transient):
    """The function raised something that cannot be sent between processes; its type and text are in here."""


class SubprocessPool:
    """Up to `size` calls at once, each in a process of its own; further calls wait their turn.

    A child is replaced after `recycle_after` calls, which bounds the leaks of native libraries.
    """

    def __init__(self, size: int, *, recycle_after: int = 1_000, max_result_bytes: int = 64 << 20) -> None:
        if size < 1:
            raise ValueError(f"a pool needs at least one process, got size={size}")
        self._slots = asyncio.Semaphore(size)
        self._idle: list[_Child] = []
        self._children: set[_Child] = set()
        self._recycle_after = recycle_after
        self._max_result = max_result_bytes
        self._closed = False

    async def run(
        self, fn: Callable[..., T], *args: Any, timeout: float | None = None, memory_limit: int | None = None
    ) -> T:
        """`fn(*args)` in a child. `timeout` in seconds from the start of the work, `memory_limit` in bytes.

        `fn` is a top-level function of a module that the child can import.
        """
        request = pickle.dumps((*_address(fn), args, memory_limit))
        # A call that waits behind slow ones must not pay for them with its own deadline.
        with uncharged():
            await self._slots.acquire()
        try:
            return _unpack(await self._call(fn, request, timeout, memory_limit), fn)
        finally:
            self._slots.release()

    async def _call(
        self, fn: Callable[..., T], request: bytes, timeout: float | None, memory_limit: int | None
    ) -> bytes:
        with uncharged():
            child = await self._take()
        try:
            async with asyncio.timeout(timeout):
                return await child.call(request, self._max_result)
        except TimeoutError:
            await child.kill()
            text = f"{_label(fn)} did not finish within {timeout:g} s; its process was killed"
            raise DeadlineExceeded(text, limit=timeout or 0.0) from None
        except _Gone:
            code = await child.ended()
            raise _died(_label(fn), code, closed=self._closed, limit=memory_limit) from None
        finally:
            child.kill_unless_idle()
            self._give_back(child)

    async def close(self) -> None:
        """Kill every child. Drain first: a call that is still running gets ProcessDied."""
        self._closed = True
        for child in self._children:
            child.kill_now()
        await asyncio.gather(*(child.process.wait() for child in self._children))

    async def __aenter__(self) -> SubprocessPool:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def _take(self) -> _Child:
        while self._idle:
            if (child := self._idle.pop()).alive:
                return child
            self._children.discard(child)
        if self._closed:
            raise RuntimeError("this pool is closed; open one per process and close it last")
        child = _Child()
        self._children.add(child)
        try:
            await child.start()
        except BaseException:
            self._children.discard(child)
            raise
        return child

    def _give_back(self, child: _Child) -> None:
        if child.idle and child.calls < self._recycle_after and not self._closed:
            self._idle.append(child)
        else:  # worn out, dead, or busy with an answer that nobody waits for
            reaping = asyncio.ensure_future(child.kill())
            reaping.add_done_callback(lambda _: self._children.discard(child))


class _Gone(Exception):
    """The child closed its end of the pipe."""


class _Child:
    """One interpreter that serves calls over its stdin and stdout, one at a time."""

    process: asyncio.subprocess.Process

    def __init__(self) -> None:
        self.calls = 0
        self.idle = False

    async def start(self) -> None:
        self.process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-c",
            _BOOT.format(isolated_child.__name__),
            json.dumps(sys.path),
            str(os.getpid()),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            start_new_session=True,  # Ctrl-C is for the parent; and the group is what we kill
        )
        try:
            async with asyncio.timeout(_START_LIMIT):
                await self._read(16)
        except (_Gone, TimeoutError):
            code = await self.kill()
            raise ProcessDied(f"a child did not start (exit {code}); see stderr", exit_code=code) from None
        except BaseException:
            self.kill_now()
            raise
        self.idle = True

    @property
    def alive(self) -> bool:
        return self.process.returncode is None

    async def call(self, request: bytes, max_result: int) -> bytes:
        self.idle = False
        self.calls += 1
        stdin = self.process.stdin
        assert stdin is not None
        try:
            stdin.write(HEADER.pack(len(request)) + request)
            await stdin.drain()
        except (BrokenPipeError, ConnectionResetError):
            raise _Gone from None
        answer = await self._read(max_result)
        self.idle = True
        return answer

    async def _read(self, limit: int) -> bytes:
        stdout = self.process.stdout
        assert stdout is not None
        try:
            (size,) = HEADER.unpack(await stdout.readexactly(HEADER.size))
            if size > limit:
                raise Permanent(f"the result has {size} bytes, more than {limit}: return a path to a file")
            return await stdout.readexactly(size)
        except (asyncio.IncompleteReadError, ConnectionResetError):
            raise _Gone from None

    def kill_unless_idle(self) -> None:
        if not self.idle:
            self.kill_now()

    def kill_now(self) -> None:
        if self.alive:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)

    async def kill(self) -> int:
        self.kill_now()
        assert self.process.stdout is not None
        while await self.process.stdout.read(1 << 16):
            pass  # an unread answer would keep the pipe open
        return await self.process.wait()

    async def ended(self) -> int:
        """Exit code of a child that closed its pipe; killing it at once would hide what it died of."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_LAST_BREATH):
                await self.process.wait()
        return await self.kill()


def _address(fn: Callable[..., Any]) -> tuple[str, str]:
    module, name = getattr(fn, "__module__", ""), getattr(fn, "__qualname__", "")
    resolved = getattr(sys.modules.get(module), name, None) if module != "__main__" else None
    if resolved is not fn:
        raise TypeError(f"{_label(fn)} must be a top-level function of an importable module to run in a child")
    return module, name


def _label(fn: Callable[..., Any]) -> str:
    return str(getattr(fn, "__qualname__", fn))


def _died(label: str, code: int, *, closed: bool, limit: int | None) -> ProcessDied:
    how = f"exit code {code}"
    if closed:
        how = "the pool was closed meanwhile"
    elif code == OUT_OF_MEMORY:
        how = f"over its memory limit of {limit >> 20} MB" if limit else "out of memory"
    elif code < 0:
        how = signal.Signals(-code).name
    return ProcessDied(f"the process running {label} died: {how}", exit_code=code)


def _unpack(answer: bytes, fn: Callable[..., T]) -> T:
    kind, content, where = pickle.loads(answer)  # noqa: S301  our own child, see "Does not hold"
    if kind == "result":
        value: T = pickle.loads(content)  # noqa: S301
        return value
    error: BaseException
    try:
        error = pickle.loads(content)  # noqa: S301
    except Exception:
        error = IsolatedError(f"{_label(fn)} raised {kind}")
    error.add_note(f"In the child process:\n{where}")
    raise error
