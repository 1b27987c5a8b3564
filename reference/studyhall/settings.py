"""The one settings object. Everything comes from the environment; the defaults need no server, key or network."""

import os
import secrets
from collections.abc import Mapping
from difflib import get_close_matches
from pathlib import Path
from typing import Annotated, Literal
from zoneinfo import ZoneInfo

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from .patterns.signed_payload import MIN_KEY_BYTES

PREFIX = "STUDYHALL_"
# Names other tools already use; everything else is STUDYHALL_<FIELD>.
COMMON = {"redis_url": "REDIS_URL", "database_url": "DATABASE_URL"}


class SettingsError(Exception):
    """A setting is missing or wrong; the message names the variable and what it takes."""


class Settings(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")

    data_dir: Path = Field(Path(".studyhall"), description="embedded Redis, SQLite and uploaded files live here")
    redis_url: str | None = Field(None, description="redis://, rediss://, unix:// or redis+sentinel://; none: embedded")
    database_url: str | None = Field(None, description="postgresql://... or sqlite:///...; none: SQLite in data_dir")
    bus_url: str | None = Field(None, description="event bus: redis://, amqp://, nats:// or kafka://; none: our Redis")
    payment_url: str | None = Field(None, description="payment provider; none: the sandbox started by the demo")

    provider: Literal["local", "anthropic", "openai"] = Field("local", description="who does the AI work")
    provider_url: str | None = Field(None, description="base address of the provider's API")
    provider_key: str | None = Field(None, repr=False, description="API key of the provider")
    provider_model: str | None = Field(None, description="model name at the provider")
    provider_pace: Annotated[float, Field(ge=0, le=60)] = Field(0.0, description="local provider: seconds per chunk")

    signing_keys: str | None = Field(
        None, repr=False, description="comma separated, newest first; none: made in data_dir"
    )
    admin_token: Annotated[str, Field(min_length=16)] | None = Field(
        None, repr=False, description="turns the admin endpoints on; openssl rand -hex 32"
    )
    alert_urls: str | None = Field(
        None,
        repr=False,
        description="who is told of alerts, comma separated: https://…, slack+https://…, "
        "smtp://user:password@host/?from=…&to=…; none: the log",
    )
    trusted_proxies: str | None = Field(
        None, description="addresses of proxies whose X-Forwarded-For is believed, comma separated; none: nobody's"
    )
    event_streams: Annotated[int, Field(ge=1)] = Field(500, description="event streams open at once")
    event_streams_per_client: Annotated[int, Field(ge=1)] = Field(
        20, description="event streams open at once per client address"
    )
    allowed_hosts: str = Field(
        "localhost,127.0.0.1,[::1]", description="host names the API answers to, comma separated; *: any"
    )
    request_rate: Annotated[float, Field(gt=0)] = Field(
        50.0, description="writing requests per second and client address; twice as many at once"
    )
    chat_public_key: str | None = Field(
        None, description="Ed25519 key (hex) of the chat application; turns POST /interactions on"
    )
    chat_url: str = Field("https://discord.com/api/v10", description="where answers to chat commands are sent")
    chat_token_seconds: Annotated[float, Field(gt=0, le=900)] = Field(
        900.0, description="life of an interaction's token; the answer must be there by then"
    )
    chat_owner: str = Field("you", description="whose documents /ask answers from")
    log_level: Literal["debug", "info", "warning", "error"] = Field("info", description="least level that is logged")
    log_format: Literal["json", "human"] = Field("json", description="json for machines, human for terminals")

    processes: Annotated[int, Field(ge=1, le=256)] = Field(os.cpu_count() or 1, description="worker processes")
    concurrency: Annotated[int, Field(ge=1, le=1000)] = Field(20, description="jobs at once per process and queue")
    lock_seconds: Annotated[float, Field(ge=1, le=600)] = Field(
        7.5, description="with stalled_seconds: how long after its worker died a job is taken over"
    )
    stalled_seconds: Annotated[float, Field(ge=0.2, le=600)] = Field(
        1.5, description="how often dead workers' jobs are looked for"
    )
    grace_seconds: Annotated[float, Field(ge=0, le=600)] = Field(
        20.0, description="on SIGTERM, time for running jobs to finish"
    )
    sweep_seconds: Annotated[float, Field(ge=0.1, le=600)] = Field(
        2.0, description="how often failed jobs are archived"
    )
    max_document_bytes: Annotated[int, Field(ge=1)] = Field(50 * 1024 * 1024, description="largest upload")
    user_rate: Annotated[float, Field(gt=0)] | None = Field(
        None, description="AI jobs per second and user; none: 1 with a remote provider, no limit with the local one"
    )
    user_burst: Annotated[int, Field(ge=1)] = Field(10, description="AI jobs one user may start at once")
    ai_rate: Annotated[float, Field(gt=0)] | None = Field(
        None, description="AI jobs per second of all users; none: 5 with a remote provider, no limit with the local one"
    )
    ai_burst: Annotated[int, Field(ge=1)] = Field(20, description="AI jobs all users together may start at once")
    breaker_failures: Annotated[int, Field(ge=1)] = Field(
        5, description="failed calls within 30 s after which a remote provider is left alone"
    )
    breaker_seconds: Annotated[float, Field(gt=0)] = Field(20.0, description="for how long it is left alone")
    queue_depth: Annotated[int, Field(ge=0)] = Field(
        10_000, description="jobs a queue holds before uploads are refused, 0: no limit"
    )
    queue_age: Annotated[float, Field(ge=0)] = Field(
        900.0, description="seconds of waiting after which uploads are refused, 0: no limit"
    )
    trace_file: Path | None = Field(
        None, description="append OpenTelemetry spans here as JSON lines; needs opentelemetry-sdk; none: off"
    )
    time_zone: str = Field("UTC", description="of nightly work, for example Europe/Berlin")
    metrics_port: Annotated[int, Field(ge=0, le=65535)] = Field(0, description="Prometheus port of a worker, 0: off")

    @field_validator("alert_urls")
    @classmethod
    def _known_receivers(cls, urls: str | None) -> str | None:
        # Here and not at the first alert, months later. Imported late: most commands send none.
        from .maintenance import receivers

        receivers(urls)
        return urls

    @field_validator("time_zone")
    @classmethod
    def _known_zone(cls, name: str) -> str:
        try:
            ZoneInfo(name)
        except Exception:  # ValueError, OSError or ZoneInfoNotFoundError, by the kind of nonsense
            raise ValueError("unknown time zone") from None
        return name

    @property
    def store_url(self) -> str:
        return self.database_url or f"sqlite:///{(self.data_dir / 'studyhall.db').resolve()}"

    @property
    def blob_dir(self) -> Path:
        return self.data_dir / "blobs"

    def make_data_dir(self) -> None:
        """Uploads, database and keys are here: for our own user alone."""
        try:
            self.data_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
            # An earlier version made it readable for everybody. Other people's folders are left as they are.
            if (self.data_dir / "signing.key").exists() and self.data_dir.stat().st_uid == os.getuid():
                self.data_dir.chmod(0o700)
        except OSError as error:
            raise SettingsError(
                f"{variable('data_dir')}: cannot use {self.data_dir} ({error.strerror}); name a folder you may write to"
            ) from None

    def keys(self) -> list[str]:
        """Signing keys; without configuration one is made once and shared by all processes of the data dir."""
        if self.signing_keys:
            keys = [key.strip() for key in self.signing_keys.split(",") if key.strip()]
            if not keys or min(len(key.encode()) for key in keys) < MIN_KEY_BYTES:
                raise SettingsError(
                    f"{variable('signing_keys')}: each key needs at least {MIN_KEY_BYTES} bytes; openssl rand -hex 32"
                )
            return keys
        self.make_data_dir()
        path = self.data_dir / "signing.key"
        try:
            # O_EXCL: of several processes that start at once exactly one makes the key, whole, before it is visible.
            scratch = path.with_suffix(f".{os.getpid()}")
            scratch.touch(mode=0o600)
            scratch.write_text(secrets.token_hex(32))
            os.link(scratch, path)
        except FileExistsError:
            pass
        finally:
            scratch.unlink(missing_ok=True)
        return [path.read_text().strip()]


def variable(field: str) -> str:
    return COMMON.get(field, PREFIX + field.upper())


def load(env: Mapping[str, str] = os.environ, overrides: Mapping[str, object] | None = None) -> Settings:
    """Settings from the environment; `overrides` (command-line options) win, None means not given."""
    known = {variable(field): field for field in Settings.model_fields}
    for name in env:
        if name.startswith(PREFIX) and name not in known:
            short = {full.removeprefix(PREFIX): full for full in known}  # the prefix makes everything look alike
            near = get_close_matches(name.removeprefix(PREFIX), short, n=1)
            hint = f", did you mean {short[near[0]]}?" if near else f"; known: {', '.join(sorted(known))}"
            raise SettingsError(f"unknown setting {name}{hint}")
    values: dict[str, object] = {field: env[name] for name, field in known.items() if env.get(name)}
    values.update({field: value for field, value in (overrides or {}).items() if value is not None})
    try:
        return Settings.model_validate(values)
    except ValidationError as error:
        first = error.errors(include_input=False, include_url=False)[0]
        field = str(first["loc"][0])
        raise SettingsError(f"{variable(field)}: {first['msg']} ({Settings.model_fields[field].description})") from None
