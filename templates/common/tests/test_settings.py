from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from {@ package @}.patterns.core.open_store import close, open_store
from {@ package @}.settings import PREFIX, SettingsError, environment, load


def test_defaults_need_no_environment() -> None:
    assert load({}).store_url.startswith("sqlite:////")


def test_a_new_service_has_a_place_for_its_store_whoever_opens_it_first(tmp_path: Path) -> None:
    fresh = load({f"{PREFIX}DATA_DIR": str(tmp_path / "not" / "yet")})
    asyncio.run(close(open_store(fresh.store_url)))


def test_a_misspelt_setting_is_named_with_the_right_one() -> None:
    with pytest.raises(SettingsError, match=f"did you mean {PREFIX}PORT"):
        load({f"{PREFIX}PROT": "1"})


def test_a_wrong_value_names_its_variable() -> None:
    with pytest.raises(SettingsError, match=f"{PREFIX}PORT"):
        load({f"{PREFIX}PORT": "many"})


def test_variables_that_kubernetes_sets_are_not_ours() -> None:
    injected = {
        "PORT": "tcp://10.0.0.1:80",
        "PORT_80_TCP": "tcp://10.0.0.1:80",
        "PORT_80_TCP_ADDR": "10.0.0.1",
        "SERVICE_HOST": "10.0.0.1",
        "SERVICE_PORT": "80",
        "SERVICE_PORT_HTTP": "80",
        "API_SERVICE_HOST": "10.0.0.2",
        "API_PORT": "tcp://10.0.0.2:80",
    }
    assert load({PREFIX + name: value for name, value in injected.items()}) == load({})


@pytest.mark.parametrize(
    ("line", "value"),
    [
        ("HOST=example", "example"),
        ("HOST = example ", "example"),
        ('HOST="example"', "example"),
        ("HOST='example' # where we listen", "example"),
        ("HOST=example # where we listen", "example"),
        ("HOST=ex#ample", "ex#ample"),
        ('HOST="ex # ample"', "ex # ample"),
        ("HOST= # the default", "127.0.0.1"),
    ],
)
def test_a_file_is_read_as_a_shell_would(tmp_path: Path, line: str, value: str) -> None:
    (tmp_path / ".env").write_bytes(f"{PREFIX}{line}\nexport {PREFIX}PORT=1\n# ".encode() + b"\xff\n")
    loaded = load(environment(tmp_path / ".env"))
    assert (loaded.host, loaded.port) == (value, 1)


{@% if kind != 'event-driven' %@}
def test_the_key_that_signs_jobs_is_made_once_and_is_nobody_elses(tmp_path: Path) -> None:
    here = load({f"{PREFIX}DATA_DIR": str(tmp_path / "data")})
    (key,) = here.keys()
    assert len(key) == 64
    assert here.keys() == [key]
    (file,) = (tmp_path / "data").iterdir()
    assert file.stat().st_mode & 0o777 == 0o600
    configured = load({f"{PREFIX}SIGNING_KEYS": f"{'n' * 32}, {'o' * 32}"})
    assert configured.keys() == ["n" * 32, "o" * 32]
    with pytest.raises(SettingsError, match="16 bytes"):
        load({f"{PREFIX}SIGNING_KEYS": "short"}).keys()
    with pytest.raises(SettingsError, match="cannot write"):
        load({f"{PREFIX}DATA_DIR": str(file)}).keys()


{@% endif %@}
def test_the_environment_wins_over_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / ".env").write_text(f"# a comment\n{PREFIX}PORT=1\n{PREFIX}HOST=example\n")
    monkeypatch.setenv(f"{PREFIX}PORT", "2")
    loaded = load(environment(tmp_path / ".env"))
    assert (loaded.port, loaded.host) == (2, "example")


def test_the_example_file_names_settings_that_exist() -> None:
    example = (Path(__file__).parents[1] / ".env.example").read_text()
    lines = [line.removeprefix("# ") for line in example.splitlines() if "=" in line]
    load(dict(line.split("=", 1) for line in lines))
