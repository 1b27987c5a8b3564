"""A wrong clock for one process: libfaketime if it is installed, else a few lines of C if there is a compiler.

Does not hold for programs that do not ask libc for the time (Go, static ones): then it says so.
"""

import contextlib
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path

_SHIFT = "QUEUESMITH_PROVE_CLOCK"
_SOURCE = r"""
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdlib.h>
#include <sys/time.h>
#include <time.h>
static long shift(void) { const char *told = getenv("QUEUESMITH_PROVE_CLOCK"); return told ? atol(told) : 0; }
int clock_gettime(clockid_t id, struct timespec *at) {
    static int (*real)(clockid_t, struct timespec *);
    if (!real) real = (int (*)(clockid_t, struct timespec *))dlsym(RTLD_NEXT, "clock_gettime");
    int failed = real(id, at);
    if (!failed && (id == CLOCK_REALTIME || id == CLOCK_REALTIME_COARSE)) at->tv_sec += shift();
    return failed;
}
int gettimeofday(struct timeval *at, void *zone) {
    struct timespec now;
    (void)zone;
    clock_gettime(CLOCK_REALTIME, &now);
    at->tv_sec = now.tv_sec;
    at->tv_usec = now.tv_nsec / 1000;
    return 0;
}
time_t time(time_t *at) {
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    if (at) *at = now.tv_sec;
    return now.tv_sec;
}
"""


def ahead(seconds: int, folder: Path) -> tuple[dict[str, str], str]:
    """The environment that makes a process's clock wrong, or why there is none."""
    for path in Path("/usr/lib").glob("*/faketime/libfaketime.so.1"):
        return {"LD_PRELOAD": str(path), "FAKETIME": f"+{seconds}s", "FAKETIME_DONT_FAKE_MONOTONIC": "1"}, ""
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None or not Path("/proc/self/maps").exists():
        return {}, "not applied: install libfaketime (Debian: libfaketime) or a C compiler, on Linux"
    library = folder / "clock.so"
    (folder / "clock.c").write_text(_SOURCE)
    made = subprocess.run(
        [compiler, "-shared", "-fPIC", "-o", library, folder / "clock.c", "-ldl"],
        capture_output=True,
        text=True,
        check=False,
    )
    if made.returncode:
        return {}, f"not applied: {compiler} said {made.stderr.strip()[-200:]}"
    return {"LD_PRELOAD": str(library), _SHIFT: str(seconds)}, ""


def wrong(pid: int, env: Mapping[str, str]) -> str:
    """Why this process's clock is right after all; empty: it is wrong."""
    with contextlib.suppress(OSError):
        if env["LD_PRELOAD"] in Path(f"/proc/{pid}/maps").read_text():
            return ""
    return "not applied: the worker does not ask libc for the time"
