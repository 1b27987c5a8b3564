from __future__ import annotations

from pathlib import Path

import pytest

from {@ package @}.settings import PREFIX, SettingsError, environment, load


def test_defaults_need_no_environment() -> None:
    assert load({}).store_url.startswith("sqlite:////")


def test_a_misspelt_setting_is_named_with_the_right_one() -> None:
    with pytest.raises(SettingsError, match=f"did you mean {PREFIX}PORT"):
        load({f"{PREFIX}PROT": "1"})


def test_a_wrong_value_names_its_variable() -> None:
    with pytest.raises(SettingsError, match=f"{PREFIX}PORT"):
        load({f"{PREFIX}PORT": "many"})


def test_the_environment_wins_over_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / ".env").write_text(f"# a comment\n{PREFIX}PORT=1\n{PREFIX}HOST=example\n")
    monkeypatch.setenv(f"{PREFIX}PORT", "2")
    found = load(environment(tmp_path / ".env"))
    assert (found.port, found.host) == (2, "example")


def test_the_example_file_names_settings_that_exist() -> None:
    example = (Path(__file__).parents[1] / ".env.example").read_text()
    lines = [line.removeprefix("# ") for line in example.splitlines() if "=" in line]
    load(dict(line.split("=", 1) for line in lines))
