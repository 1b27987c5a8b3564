"""The one settings object. Everything comes from the environment; the defaults need no server and no key."""

from __future__ import annotations

import os
import re
{@% if kind != 'event-driven' %@}
import secrets
{@% endif %@}
from collections.abc import Mapping
from contextlib import suppress
from difflib import get_close_matches
from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

{@% if kind != 'event-driven' %@}
from .patterns.signed_payload import MIN_KEY_BYTES

{@% endif %@}
__all__ = ["Settings", "SettingsError", "environment", "load"]

PREFIX = "{@ package | upper @}_"
# Names that other tools use too; everything else is PREFIX + field.
COMMON = {
    "redis_url": "REDIS_URL",
    "database_url": "DATABASE_URL",
{@% if kind == 'event-driven' %@}
    "bus_url": "BUS_URL",
{@% endif %@}
}
# Kubernetes sets these for every service of the namespace, and a service may share our name.
INJECTED = re.compile(r"(^|_)(SERVICE_(HOST|PORT)|PORT_\d+_(TCP|UDP|SCTP))(_|$)")
# NAME=value, NAME="value", with `export` before or a comment after it
LINE = re.compile(r"""\s*(?:export\s+)?(\w+)\s*=\s*(?:"([^"]*)"|'([^']*)'|(.*?))\s*(?:(?<=\s)#.*)?$""")


class SettingsError(Exception):
    """A setting is wrong; the message names the variable."""


class Settings(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")

    data_dir: Path = Path(".data")  # embedded Redis and SQLite live here
    redis_url: str | None = None  # none: found on this machine or started, see patterns/engine/server.py
    database_url: str | None = None  # postgresql://... or sqlite:////path.db; none: SQLite in data_dir
    create_tables: bool = True  # no: migrations/ does, with `make migrate` before the processes start
{@% if kind == 'event-driven' %@}
    bus_url: str | None = None  # {@ {'redis': 'redis://...', 'rabbitmq': 'amqp://...', 'nats': 'nats://...', 'kafka': 'kafka://host:port'}[broker] @}; none: Redis Streams on our Redis
    bus_prefix: Annotated[str, Field(pattern=r"^[a-z][a-z0-9-]*$")] = "events"  # of every name on the bus
{@% if broker == 'kafka' %@}
    bus_create_topics: bool = True  # no: the brokers do, or they exist
{@% endif %@}
{@% else %@}
    signing_keys: str | None = Field(None, repr=False)  # newest first, comma-separated; none: made in data_dir
{@% endif %@}

    host: str = "127.0.0.1"
    port: Annotated[int, Field(ge=1, le=65535)] = 8000
    allowed_hosts: str = "localhost,127.0.0.1"  # names the API answers to, comma-separated; *: any
    admin_token: str | None = Field(None, repr=False, min_length=12)  # of /console; none: there is no console
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    log_format: Literal["json", "human"] = "json"
    # Receivers of alerts, comma-separated: https://, slack+https:// or smtp://, see patterns/health/senders.py
    alert_urls: str | None = Field(None, repr=False)
    watch_seconds: Annotated[float, Field(ge=0.1, le=600)] = 15.0  # how often health is checked
    kept_days: Annotated[float, Field(ge=1, le=3650)] = 30.0  # {@ 'ended sagas, published events' if kind == 'event-driven' else 'dead letters' @}
    clean_up_seconds: Annotated[float, Field(ge=1, le=86400)] = 3600.0  # how often what is older is deleted
{@% if 'observability/metrics.py' in modules and kind != 'event-driven' %@}
    metrics_host: str = "127.0.0.1"
    metrics_port: Annotated[int, Field(ge=0, le=65535)] = 0  # of a worker, 0: off
{@% endif %@}

{@% if kind == 'event-driven' %@}
    lease_seconds: Annotated[float, Field(ge=0.5, le=600)] = 5.0  # until a dead relay's work is taken over
    grace_seconds: Annotated[float, Field(ge=0, le=600)] = 20.0  # on SIGTERM, time for running work
    partner_seconds: Annotated[float, Field(ge=0, le=60)] = 0.0  # until the example's partner answers
{@% else %@}
    concurrency: Annotated[int, Field(ge=1, le=1000)] = 20  # jobs at once per process
    lock_seconds: Annotated[float, Field(ge=1, le=600)] = 7.5  # until a dead worker's jobs are taken over
    stalled_seconds: Annotated[float, Field(ge=0.2, le=600)] = 1.5  # how often those are searched
    grace_seconds: Annotated[float, Field(ge=0, le=600)] = 20.0  # on SIGTERM, time for running jobs
    sweep_seconds: Annotated[float, Field(ge=0.1, le=600)] = 2.0  # how often failed jobs are archived
    step_seconds: Annotated[float, Field(ge=0, le=60)] = 0.1  # how long a step of the example job takes
{@% endif %@}

    @property
    def store_url(self) -> str:
        if self.database_url:
            return self.database_url
        # SQLite makes the file and no folder; one that cannot be made is an error of the store.
        with suppress(OSError):
            self.data_dir.mkdir(parents=True, exist_ok=True)
        file = self.data_dir / "{@ package @}.db"
        return f"sqlite:///{file.resolve()}"

    @property
    def hosts(self) -> set[str]:
        return {name.strip().lower() for name in self.allowed_hosts.split(",") if name.strip()}
{@% if kind != 'event-driven' %@}

    def keys(self) -> list[str]:
        """What jobs are signed with; without configuration one is made and shared by all processes of data_dir."""
        if self.signing_keys:
            keys = [key.strip() for key in self.signing_keys.split(",") if key.strip()]
            if not keys or min(len(key.encode()) for key in keys) < MIN_KEY_BYTES:
                least = f"{MIN_KEY_BYTES} bytes or more for each key, openssl rand -hex 32"
                raise SettingsError(f"{PREFIX}SIGNING_KEYS: {least}")
            return keys
        path = self.data_dir / "signing.key"
        scratch = path.with_suffix(f".{os.getpid()}")
        try:
            self.data_dir.mkdir(parents=True, exist_ok=True)
            scratch.touch(mode=0o600)
            scratch.write_text(secrets.token_hex(32))
            # Of several processes that start at once, one makes the key; it is complete before it is visible.
            with suppress(FileExistsError):
                os.link(scratch, path)
        except OSError as error:
            raise SettingsError(f"{PREFIX}DATA_DIR: cannot write {path} ({error.strerror})") from None
        finally:
            with suppress(OSError):
                scratch.unlink()
        return [path.read_text().strip()]
{@% endif %@}


def load(env: Mapping[str, str]) -> Settings:
    known = {COMMON.get(field, PREFIX + field.upper()): field for field in Settings.model_fields}
    env = {name: value for name, value in env.items() if not _injected(name, value)}
    for name in env:
        if name.startswith(PREFIX) and name not in known:
            near = get_close_matches(name, known, n=1)
            raise SettingsError(f"unknown setting {name}" + (f", did you mean {near[0]}?" if near else ""))
    try:
        return Settings.model_validate({field: env[name] for name, field in known.items() if env.get(name)})
    except ValidationError as error:
        first = error.errors(include_input=False, include_url=False)[0]
        name = next(name for name, field in known.items() if field == first["loc"][0])
        raise SettingsError(f"{name}: {first['msg']}") from None


def _injected(name: str, value: str) -> bool:
    # Only after our prefix: with a package called my_service, MY_SERVICE_PORT is a setting.
    ours = name.removeprefix(PREFIX) if name.startswith(PREFIX) else ""
    return INJECTED.search(ours) is not None or (ours.endswith("PORT") and "://" in value)


def environment(file: Path = Path(".env")) -> dict[str, str]:
    """The environment, and the file for what it lacks."""
    lines = file.read_text(encoding="utf-8", errors="replace").splitlines() if file.is_file() else []
    matches = [match for line in lines if (match := LINE.match(line))]
    return {match[1]: match[2] or match[3] or match[4] or "" for match in matches} | dict(os.environ)
