"""A prove.toml that is wrong is refused with the line and with what to write."""

import re
import time
from pathlib import Path

import pytest

from queuesmith.prove import probes, run
from queuesmith.prove.faults import FAULTS
from queuesmith.prove.invariants import Row
from queuesmith.prove.spec import Command, Request, Wrong, fill, load, seconds
from queuesmith.prove.world import Batch, World, _keys

GOOD = """\
[service]
worker = "python worker.py"
submit = "python submit.py {key}"

[effect]
sql = "sqlite:///{dir}/app.db"
query = "select id, count(*) from done group by 1"
"""


def write(tmp_path, text):
    path = tmp_path / "prove.toml"
    path.write_text(text)
    return path


def test_the_shortest_file(tmp_path):
    spec = load(write(tmp_path, GOOD))
    assert spec.service.worker.run == Command(("python", "worker.py"))
    assert spec.service.name == tmp_path.name
    assert (spec.promises.duplicates, spec.promises.recovery, spec.redis, spec.postgres) == ("none", 30.0, True, False)


def test_the_file_of_the_readme_is_read_as_it_stands(tmp_path):
    spec = load(
        write(
            tmp_path,
            """\
[service]
worker = "python worker.py"
api = { run = "python api.py", ready = "http://127.0.0.1:{port}/healthz" }
submit = { url = "http://127.0.0.1:{port}/parcels", json = { parcel = "{key}", grams = 500 } }
env = { CARRIER_URL = "{provider.carrier}", DATABASE_URL = "{postgres}" }

[effect]
sql = "{postgres}"
query = "select parcel, count(*) from labels group by 1"

[provider.carrier."POST /labels"]
keyed_by = "header:Idempotency-Key"
effect = "json:parcel"
answers = "ok 92%, lost 3%, 500 3%, 429 2%"
latency = "50ms..2s"

[provider.carrier]
"GET /labels/{parcel}" = { lookup = "path:parcel" }
""",
        )
    )
    route = spec.providers[0].routes[0]
    assert isinstance(spec.service.submit, Request)
    assert spec.service.submit.method == "POST"
    assert (route.latency, dict(route.answers)["lost"]) == ((0.05, 2.0), 0.03)
    assert spec.postgres


def test_with_one_provider_its_log_is_the_effect(tmp_path):
    text = GOOD.partition("[effect]")[0] + '[provider.mail]\n"POST /send" = { effect = "json:to" }\n'
    assert load(write(tmp_path, text)).effect.kind == "provider"


def test_with_several_providers_the_effect_names_those_that_every_job_calls(tmp_path):
    providers = "".join(f'[provider.{name}]\n"POST /" = {{ effect = "json:to" }}\n' for name in ("mail", "sms"))
    text = GOOD.partition("[effect]")[0] + providers
    with pytest.raises(Wrong, match=r'Write \[effect\] with provider = \["mail", "sms"\]'):
        load(write(tmp_path, text))
    assert load(write(tmp_path, f'{text}[effect]\nprovider = ["mail", "sms"]\n')).effect.target == "mail sms"
    with pytest.raises(Wrong, match='line 10: `provider` names "fax"; with an effect there is: mail, sms'):
        load(write(tmp_path, f'{text}[effect]\nprovider = ["mail", "fax"]\n'))


@pytest.mark.parametrize(
    ("old", "new", "line", "says"),
    [
        ("submit =", "sumbit =", 3, "`sumbit` is not known in [service]; did you mean `submit`?"),
        ('worker = "python worker.py"\n', "", 1, "`worker` is missing in [service]. Write the command"),
        ('"python worker.py"', "7", 2, "`worker` is a number; write text in quotes or a list"),
        ("{key}", "{kye}", 3, "{kye} is not known. Known: {key}"),
        (" {key}", "", 3, "`submit` has no {key}"),
        ("query", "# query", 5, "`query` is missing in [effect]"),
        ("sqlite:///{dir}/app.db", "app.db", 6, "`sql` is an address"),
        ("[effect]", '[promises]\nrecovery = "fast"\n[effect]', 6, "'fast' is not a time. Write it like 500ms"),
        ("[effect]", '[promises]\nduplicates = "few"\n[effect]', 6, "write one of: 'none', 'same key', 'allowed'"),
        ("[effect]", '[promises]\nskip = ["rain"]\n[effect]', 6, '`skip` names "rain"; the faults are: none, kill'),
        ("[effect]", '[provider.a]\n"POSTS /x" = {}\n[effect]', 6, "is not a route"),
        ("[effect]", '[provider.a]\n"POST /x" = { effect = "parcel" }\n[effect]', 6, "json:NAME, header:NAME"),
        ("[effect]", '[provider.a]\n"POST /x" = { answers = "ok 90%" }\n[effect]', 6, "add up to 90%"),
        ("[effect]", '[provider.a]\n"POST /x" = { answers = "ok" }\n[effect]', 6, 'cannot read "ok"'),
        ("[effect]", '[provider.a]\n"POST /x" = { reply = ["{key}"] }\n[effect]', 6, "what `keyed_by` names"),
        ("[effect]", "[effects]", 5, "`effects` is not known in the file; did you mean `effect`?"),
        ("[effect]", "[seen]", None, "`effect` is missing in the file. Write [effect] with sql"),
        ("[effect]", "[effect", 5, "not TOML"),
    ],
)
def test_what_is_wrong_is_named_with_its_line(old, new, line, says, tmp_path):
    assert old in GOOD
    with pytest.raises(Wrong) as error:
        load(write(tmp_path, GOOD.replace(old, new, 1)))
    assert says in str(error.value)
    assert line is None or f"line {line}" in str(error.value)


def test_a_file_that_is_not_there_says_how_to_get_one(tmp_path):
    with pytest.raises(Wrong, match="queuesmith prove init"):
        load(tmp_path / "prove.toml")


def test_placeholders_and_times():
    assert fill("{redis}/{key} {{own}}", {"redis": "r", "key": 5}) == "r/5 {own}"
    assert fill('{"json": 1}', {}) == '{"json": 1}'
    assert [seconds(text) for text in ("50ms", "2s", "1.5m", "1h")] == [0.05, 2, 90, 3600]
    with pytest.raises(ValueError, match="is not a time"):
        seconds("soon")


@pytest.mark.parametrize("skill", ["background-jobs", "event-driven"])
def test_the_file_on_the_page_loads(skill, tmp_path):
    page = Path(__file__).parents[2] / "skills" / skill / "references" / "prove-it.md"
    spec = load(write(tmp_path, page.read_text().partition("```toml\n")[2].partition("```")[0]))
    if skill == "background-jobs":
        assert spec.promises.recovery == 20
        assert spec.providers[0].routes[0].keyed_by == "header:Idempotency-Key"
    else:
        assert (spec.postgres, spec.rabbitmq, spec.nats) == (True, True, False)


def test_ids_of_the_services_own_are_found_in_what_it_says(tmp_path):
    """`id = "json:id"`: the table, the logs and the provider know the order by that id."""
    spec = load(write(tmp_path, GOOD.replace("[effect]", "[servers]\nredis = false\n[effect]")))
    world = World(spec, tmp_path / "world", 1)
    try:
        first, second = world.new_jobs(Batch("none"), 2)
        for own in ("5f1c0b7e9a3d4e2f8b6a1c0d9e8f7a6b", "0b8f4c3e-1d2a-4b5c-8e7f-6a5b4c3d2e1f", "1042", "ord-5f1c"):
            world.called(first.key, own)
            assert world.key_of(f"job send-report-{own} done" if own != "ord-5f1c" else own) == first.key
        assert world.keys_in(f"{second.key} and ord-5f1c") == {first.key, second.key}
        assert world.key_of("ord-9999") == ""
    finally:
        world.close()


def test_where_done_jobs_stay_is_known_in_every_world(tmp_path):
    """Learnt in the world without a fault, whose keys look different: places named by a key are of one kind."""
    spec = load(write(tmp_path, GOOD.replace("[effect]", "[servers]\nredis = false\n[effect]")))
    shapes = set()
    for name in ("none", "kill-at-effect", "twice"):
        world = World(spec, tmp_path / name, 1, name)
        try:
            for job in world.new_jobs(Batch("none"), 2):
                shapes.add(probes.shape(world, f"hash bull:mails:mail-{job.key}"))
        finally:
            world.close()
    assert shapes == {"hash bull:mails:mail-*"}


def test_a_slow_try_without_a_fault_does_not_use_up_the_time_of_the_faults(tmp_path, monkeypatch):
    """On a busy machine a quick run tried the set-up, and no fault at all."""

    def slow(self, fault):
        self.began -= 45
        return Row(fault.name, fault.does, "held", "")

    monkeypatch.setattr(run._Run, "_try", slow)
    turns = {}

    def row_of(self, fault, turn):
        why = self._left_out(fault) or self._too_late(fault)
        if not why:
            turns[turn] = fault.name
        return Row(fault.name, fault.does, "", why)

    monkeypatch.setattr(run._Run, "_one", row_of)
    given = run._Run(load(write(tmp_path, GOOD)), run.Options(quick=True), tmp_path, lambda *_: None)
    left_out = {row.fault: row.measured for row in given.faults()}
    assert left_out["kill-random"] == left_out["term"] == ""
    assert (turns[0], turns[1], given._of) == ("kill-at-commit", "twice", len(turns))
    given.began -= 40
    assert [given._too_late(FAULTS[name]) for name in ("kill-at-commit", "term")] == ["", run.TIME_UP]


def test_nothing_is_sent_by_a_closed_world(tmp_path):
    world = World(load(write(tmp_path, GOOD)), tmp_path / "world", 1)
    world.submit_later(world.new_jobs(Batch("none"), 12), Command(("sleep", "9")))
    world.close()
    began = time.monotonic()
    world._submitters.shutdown()
    assert time.monotonic() - began < 5


@pytest.mark.parametrize(
    ("keys", "form"),
    [
        ("date", r"2\d{3}-\d\d-\d\d"),
        ("%Y%m%d", r"2\d{7}"),
        ("uuid", r"[0-9a-f-]{36}"),
        ("number", r"\d{9}"),
        ("text", r"k[0-9a-f]{4}-\d{4}"),
    ],
)
def test_keys_have_the_form_that_the_service_takes_and_are_found_inside_longer_text(keys, form, tmp_path):
    spec = load(write(tmp_path, GOOD.replace("[service]", f'[service]\nkeys = "{keys}"')))
    pattern, make = _keys(spec.service.keys, "1 lost")
    made = [make(number) for number in range(1, 400)]
    assert len(set(made)) == 399
    assert all(re.fullmatch(form, key) and pattern.findall(f"label/{key}: x") == [key] for key in made)


def test_an_outage_lasts_as_long_as_the_file_says(tmp_path):
    usual, longer = load(write(tmp_path, GOOD)), load(write(tmp_path, GOOD + '\n[faults]\noutage = "60s"\n'))
    assert (usual.outage, longer.outage) == (6.0, 60.0)
    assert FAULTS["outage"].seconds(longer) - FAULTS["outage"].seconds(usual) == 54
    with pytest.raises(Wrong, match="did you mean `outage`"):
        load(write(tmp_path, GOOD + '\n[faults]\noutages = "60s"\n'))
