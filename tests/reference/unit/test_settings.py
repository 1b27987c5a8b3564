"""The settings object: every mistake names its variable and says what to do."""

import stat
import subprocess
import sys

import pytest

from harness.processes import ROOT
from studyhall.settings import Settings, SettingsError, load


def test_the_defaults_need_nothing():
    settings = load({})
    assert settings.redis_url is None
    assert settings.store_url.startswith("sqlite:///")


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("STUDYHALL_CONCURENCY", "STUDYHALL_CONCURRENCY"),
        ("STUDYHALL_LOCK_SECOND", "STUDYHALL_LOCK_SECONDS"),
        ("STUDYHALL_REDIS_URL", "REDIS_URL"),
    ],
)
def test_an_unknown_variable_is_refused_with_the_one_that_was_meant(name, meant):
    with pytest.raises(SettingsError, match=f"unknown setting {name}") as refused:
        load({name: "x"})
    assert meant in str(refused.value)


def test_a_variable_like_nothing_we_know_gets_the_whole_list():
    with pytest.raises(SettingsError, match=r"known: .*STUDYHALL_CONCURRENCY"):
        load({"STUDYHALL_ZZZZZZ": "1"})


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("STUDYHALL_CONCURRENCY", "many"),
        ("STUDYHALL_CONCURRENCY", "0"),
        ("STUDYHALL_PROCESSES", "-1"),
        ("STUDYHALL_LOCK_SECONDS", "0.1"),
        ("STUDYHALL_LOG_LEVEL", "loud"),
        ("STUDYHALL_PROVIDER", "oracle"),
        ("STUDYHALL_METRICS_PORT", "70000"),
        ("STUDYHALL_ADMIN_TOKEN", "fifteen letters"),
    ],
)
def test_a_bad_value_names_its_variable_and_what_it_is_for(name, value):
    with pytest.raises(SettingsError, match=f"^{name}: .+ \\(.+\\)$"):
        load({name: value})


def test_secrets_are_neither_in_errors_nor_in_the_settings_text():
    secret = "sk-secret-value-of-some-length"
    settings = load(
        {"STUDYHALL_PROVIDER_KEY": secret, "STUDYHALL_SIGNING_KEYS": secret, "STUDYHALL_ADMIN_TOKEN": secret}
    )
    assert secret not in repr(settings)
    with pytest.raises(SettingsError) as refused:
        load({"STUDYHALL_CONCURRENCY": secret})
    assert secret not in str(refused.value)


def test_options_of_the_command_line_win_and_those_not_given_do_not():
    settings = load({"STUDYHALL_CONCURRENCY": "5"}, {"concurrency": 7, "processes": None})
    assert settings.concurrency == 7
    assert settings.processes == Settings().processes


def test_empty_variables_count_as_not_set():
    assert load({"REDIS_URL": "", "STUDYHALL_CONCURRENCY": ""}) == load({})


def test_every_setting_says_what_it_is():
    assert all(field.description for field in Settings.model_fields.values())


def test_signing_keys_are_split_and_cleaned():
    new, old = "new-key-new-key-new", "old-key-old-key-old"
    assert load({"STUDYHALL_SIGNING_KEYS": f" {new} , {old},"}).keys() == [new, old]


@pytest.mark.parametrize("keys", ["short", " , ", "long-enough-for-a-key,short"])
def test_a_short_signing_key_is_refused_without_printing_it(keys):
    with pytest.raises(SettingsError, match="STUDYHALL_SIGNING_KEYS: each key needs at least 16 bytes") as refused:
        load({"STUDYHALL_SIGNING_KEYS": keys}).keys()
    assert "short" not in str(refused.value)


def test_eight_processes_that_start_at_once_make_one_key(tmp_path):
    program = (
        "import sys, pathlib, time\n"
        "from studyhall.settings import Settings\n"
        "go = pathlib.Path(sys.argv[1]) / 'go'\n"
        "while not go.exists(): time.sleep(0.001)\n"
        "print(Settings(data_dir=pathlib.Path(sys.argv[1]) / 'data').keys()[0])\n"
    )
    started = [
        subprocess.Popen(
            [sys.executable, "-c", program, str(tmp_path)],
            stdout=subprocess.PIPE,
            text=True,
            env={"PYTHONPATH": str(ROOT / "reference"), "PATH": ""},
        )
        for _ in range(8)
    ]
    (tmp_path / "go").touch()
    keys = {process.communicate(timeout=60)[0].strip() for process in started}
    assert len(keys) == 1, "two keys would make each other's jobs forgeries"
    assert len(keys.pop()) >= 32
    made = tmp_path / "data" / "signing.key"
    assert stat.S_IMODE(made.stat().st_mode) == 0o600, "for its owner alone"
    assert [path.name for path in (tmp_path / "data").iterdir()] == ["signing.key"], "no left-overs"


def test_the_data_dir_is_for_its_user_alone_and_a_folder_of_others_is_left_as_it_is(tmp_path):
    """Also one that an earlier version made readable for all; its signing key identifies it."""
    made, old, foreign = (Settings(data_dir=tmp_path / name) for name in ("made", "old", "foreign"))
    for settings in (old, foreign):
        settings.data_dir.mkdir()
        settings.data_dir.chmod(0o755)  # whatever umask an earlier test has left
    (old.data_dir / "signing.key").touch()
    for settings in (made, old, foreign):
        settings.make_data_dir()
    modes = [stat.S_IMODE(each.data_dir.stat().st_mode) for each in (made, old, foreign)]
    assert modes == [0o700, 0o700, 0o755]
