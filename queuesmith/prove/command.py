"""`queuesmith prove`: exit code 0 when nothing is broken, 1 when an invariant is, 2 when the set-up is wrong."""

import argparse
import difflib
import json
import random
import shlex
import signal
import sys
from dataclasses import replace
from pathlib import Path

from queuesmith.catalogue import ROOT
from queuesmith.start import program

from .card import as_html, as_json, as_junit, as_text
from .faults import FAULTS
from .init import uses_redis, write_first
from .invariants import INVARIANTS
from .run import Options, prove
from .spec import Spec, Wrong, load, seconds


def run(options: argparse.Namespace) -> int:
    # A cancelled build sends SIGTERM: then too, everything is stopped and removed.
    before = signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    try:
        return _run(options)
    except Wrong as error:
        if options.json:
            print(json.dumps({"error": str(error)}))
        else:
            print(f"queuesmith prove: {error}", file=sys.stderr)
        return 2
    finally:
        signal.signal(signal.SIGTERM, before)


def _run(options: argparse.Namespace) -> int:
    if options.list:
        return _list(options)
    if options.file == "init":
        return write_first(Path(options.folder or "."), force=options.force)
    file = Path(options.file)
    if file.is_dir():
        file /= "prove.toml"
    spec, chosen = _equipped(load(file)), _chosen(options)
    terminal = sys.stderr.isatty()
    card = prove(spec, chosen, _progress if terminal else _line)
    card.command = f"{program()} prove{'' if options.file == 'prove.toml' else f' {shlex.quote(options.file)}'}"
    if terminal:
        print("\r\033[K", end="", file=sys.stderr)
    print(as_json(card) if options.json else as_text(card))
    if options.junit:
        options.junit.write_text(as_junit(card), encoding="utf-8")
    if options.html:
        options.html.write_text(as_html(card), encoding="utf-8")
    if set(chosen.only) == {"none"}:
        print("queuesmith prove: --only none tries the set-up alone, and no fault", file=sys.stderr)
        return 1 if card.broken else 0
    if not card.proved:
        print("queuesmith prove: no fault hit anything: this run proves nothing", file=sys.stderr)
        return 1 if card.broken else 2
    unproved = [row.fault for row in card.rows if row.verdict in ("hit nothing", "unclear")]
    return 1 if card.broken or (options.strict and unproved) else 0


def _equipped(spec: Spec) -> Spec:
    """Without Redis, if its package is missing and the service does not seem to use it."""
    try:
        if spec.redis:
            import redis  # noqa: F401
        return spec
    except ModuleNotFoundError:
        root = shlex.quote(str(ROOT))
        need = (
            "Redis needs the package redis. Do: python -m venv .prove && .prove/bin/pip install redis && .prove/bin/"
            f"python {root}/bin/queuesmith prove, or: make -C {root} install"
        )
        if uses_redis(spec):
            raise Wrong(need) from None
        print(f"no Redis is started: {need}", file=sys.stderr)
        # not the machine's own server
        env = {"REDIS_URL": "redis://127.0.0.1:1", **spec.service.env}
        return replace(spec, redis=False, service=replace(spec.service, env=env))


def _chosen(options: argparse.Namespace) -> Options:
    only = tuple(name for part in options.only for name in part.split(","))
    for name in only:
        if name not in FAULTS:
            near = difflib.get_close_matches(name, FAULTS, 1)
            raise Wrong(f"--only {name}: {f'did you mean {near[0]}?' if near else 'see queuesmith prove --list'}")
    try:
        soak = seconds(options.soak) if options.soak else 0.0
    except ValueError as error:
        raise Wrong(f"--soak: {error}") from None
    for path in filter(None, (options.junit, options.html)):
        if not path.parent.is_dir():  # now, not after five minutes
            raise Wrong(f"{path}: there is no folder {path.parent}")
    seed = random.SystemRandom().randrange(10_000) if options.seed is None else options.seed
    return Options(options.quick, soak, seed, only, options.keep, options.lanes)


def _list(options: argparse.Namespace) -> int:
    if options.json:
        print(
            json.dumps(
                {"faults": {name: fault.does for name, fault in FAULTS.items()}, "invariants": INVARIANTS}, indent=2
            )
        )
        return 0
    print("faults (* also with --quick)")
    for name, fault in FAULTS.items():
        print(f"  {name:<16}{'*' if fault.quick else ' '} {fault.does}")
    print("\ninvariants")
    for name, text in INVARIANTS.items():
        print(f"  {name:<18}{text}")
    return 0


def _progress(text: str, done: int, of: int) -> None:
    bar = "#" * (20 * done // max(of, 1))
    print(f"\r\033[K[{bar:<20}] {text[:90]}", end="", file=sys.stderr, flush=True)


def _line(text: str, done: int, of: int) -> None:
    # in one write: several faults report at once
    sys.stderr.write(f"[{done}/{of}] {text}\n")
    sys.stderr.flush()
