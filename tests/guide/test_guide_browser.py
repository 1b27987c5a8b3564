"""The pattern guide in a real browser: pages are clean, diagrams are drawn, calculators agree with Python."""

import importlib.util
import math
import random
from collections.abc import Callable
from typing import Any

import pytest

from guide.timelines import timelines
from harness.axe import axe_source, violations
from harness.browser import Watched
from harness.figures import full
from harness.processes import ROOT
from queuesmith import catalogue
from studyhall.patterns.core.job import RetryPolicy
from studyhall.patterns.retry import AI, DOCUMENTS, full_jitter

pytestmark = [pytest.mark.needs_browser, pytest.mark.slow]

CATALOGUE = list(catalogue.patterns().values())
SAMPLE = [
    "",
    "patterns/saga/",
    "benchmark/",
    "semantics/",
    "states/",
    "calculators/",
    "runbook/",
    "operations/",
    "choosing/",
    "skills/background-jobs/",
]
# What people type, and the page that answers.
WANTED = {
    "exactly once": "semantics",
    "bullmq python alternative": "benchmark",
    "job stalled more than allowable limit": "errors",
    "missing lock for job": "errors",
    "database is locked": "errors",
    "QueueUnavailable": "errors",
}
DRAWN = "!document.querySelector('figure.qs-diagram:not([data-drawn])')"
Open = Callable[..., Any]


@pytest.fixture
def read(guide, browser):
    """`read("patterns/retry/")`: a page in a fresh profile, which must stay clean to the end."""
    opened = []

    def start(address="", **options):
        context = browser.new_context(base_url=guide.url, **options)
        context.set_default_timeout(30_000)
        page = context.new_page()
        opened.append((context, Watched(page, guide.url)))
        page.goto(address)
        return page

    yield start
    for context, watched in opened:
        context.close()
        watched.clean()


def test_pages_load_without_errors_or_foreign_requests_and_their_diagrams_are_drawn(guide, read):
    addresses = guide.addresses() if full() else SAMPLE
    page = read("")
    drawn = 0
    for address in addresses:
        page.goto(f"{guide.url}{address}")
        assert page.locator("h1").count() == 1, address
        page.wait_for_function(DRAWN)
        drawn += page.locator("figure.qs-diagram .qs-drawing svg").count()
        assert (
            page.locator("figure.qs-diagram .qs-drawing:visible").count() == page.locator("figure.qs-diagram").count()
        ), address
    assert drawn >= 6


def test_every_failure_of_the_catalogue_can_be_drawn_and_gone_through_step_by_step(read):
    """All texts in one page: a syntax error in any of them is an error of the test, not a blank picture."""
    page = read("patterns/retry/")
    page.wait_for_function(DRAWN)
    texts = {path.stem: path.read_text() for path in sorted((ROOT / "guide" / "diagrams").glob("*.mmd"))}
    assert {pattern.id for pattern in CATALOGUE} <= set(texts)
    failed = page.evaluate(
        """async (texts) => {
            const failed = [], figure = document.querySelector("figure.qs-diagram");
            for (const [name, text] of Object.entries({...texts, broken: "sequenceDiagram\\n nonsense ->> "})) {
                try { await mermaid.parse(text); } catch (error) { failed.push(name); continue; }
                figure.querySelector(".qs-text").textContent = text;
                figure.querySelector(".qs-drawing").innerHTML = (await mermaid.render(`all-${name}`, text)).svg;
                figure.dispatchEvent(new Event("qs-drawn", {bubbles: true}));
                if (!figure.querySelector(".qs-controls")) failed.push(name);
            }
            return failed;
        }""",
        texts,
    )
    assert failed == ["states", "broken"], "the first has no order, the second is not valid"


def test_a_failure_is_gone_through_by_keyboard(read):
    page = read("patterns/dead-letter/")
    figure = page.locator("figure.qs-diagram[data-drawn]")
    slider, later = figure.get_by_role("slider"), figure.locator("[data-later]")
    assert later.count() == 0, "all of it is shown to a reader who touches nothing"
    slider.focus()
    page.keyboard.press("Home")
    hidden, steps = [later.count()], int(str(slider.get_attribute("max")))
    assert figure.locator("output").inner_text() == slider.get_attribute("aria-valuetext")
    for _ in range(steps):
        page.keyboard.press("ArrowRight")
        hidden.append(later.count())
    assert hidden == sorted(set(hidden), reverse=True), "each step adds something"
    assert hidden[-1] == 0
    assert figure.locator("output").inner_text().startswith(f"{steps + 1} of {steps + 1}: ")


def test_the_decision_tree_leads_to_a_pattern_by_keyboard(read):
    page = read("")
    page.locator(".qs-tree > details > summary").first.focus()
    page.keyboard.press("Enter")
    branch = page.locator(".qs-tree > details[open] > details > summary").first
    branch.focus()
    page.keyboard.press("Enter")
    leaf = page.locator(".qs-tree details[open] details[open] a").first
    assert leaf.is_visible()
    leaf.focus()
    page.keyboard.press("Enter")
    page.wait_for_url("**/patterns/idempotency/")


def test_the_search_finds_patterns_questions_and_error_messages(read):
    page = read("")
    dialog = 'body > div[style*="position: fixed"]'  # the theme draws its search there once it is ready
    page.locator(dialog).wait_for(state="attached")
    page.keyboard.press("Control+k")
    field = page.locator(f"{dialog} input").first
    for pattern in CATALOGUE if full() else CATALOGUE[::10]:
        field.fill(pattern.title)
        page.locator(f"{dialog} a[href*='/patterns/{pattern.id}/']").first.wait_for()
    for words, address in WANTED.items():
        field.fill(words)
        page.locator(f"{dialog} a[href*='/{address}/']").first.wait_for()
    field.fill("zzqqxx")
    page.locator(f"{dialog} a[href*='/patterns/']").first.wait_for(state="detached")


def test_phone_pages_do_not_scroll_sideways(guide, read):
    page = read("", viewport={"width": 360, "height": 740})
    for address in guide.addresses() if full() else SAMPLE[:6]:
        page.goto(f"{guide.url}{address}")
        page.wait_for_function(DRAWN)
        assert page.evaluate("document.documentElement.scrollWidth") <= 360, address


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_accessibility_check_finds_nothing(guide, read, scheme):
    source = axe_source()
    page = read("", color_scheme=scheme, reduced_motion="reduce")
    wrong = []
    quick = {
        "light": ["", "patterns/lease/", "source/reference/studyhall/patterns/retry.py.html"],
        "dark": ["patterns/idempotency/", "benchmark/", "calculators/"],
    }
    for address in {*quick["light"], *quick["dark"], *SAMPLE} if full() else quick[scheme]:
        page.goto(f"{guide.url}{address}")
        page.wait_for_function(DRAWN)
        page.evaluate("document.querySelectorAll('details').forEach((one) => { one.open = true; })")
        page.evaluate(source)
        wrong += [f"{address}: {violation}" for violation in violations(page)]
    assert wrong == []
    page.evaluate("document.querySelector('main').append(document.createElement('input'))")
    assert any("label" in violation for violation in violations(page)), "the check finds an unlabelled field"


@pytest.mark.parametrize("ident", timelines())
def test_the_kill_is_moved_by_keyboard_and_ours_survives_every_moment(read, ident):
    page = read(f"patterns/{ident}/")
    figure = page.locator("figure.qs-timeline[data-ready]")
    slider = figure.get_by_role("slider")
    slider.focus()
    page.keyboard.press("Home")
    verdicts = []
    for moment in timelines()[ident]["moments"]:
        assert figure.locator("output").inner_text() == moment["at"] == slider.get_attribute("aria-valuetext")
        for lane in ("usual", "ours"):
            shown = figure.locator(f"[data-lane={lane}] .qs-outcome")
            kind, word, text = moment[lane]
            assert shown.inner_text() == f"{word} {text}"
            assert shown.locator(f".qs-{kind}").count() == 1
            verdicts.append((lane, kind))
        page.keyboard.press("ArrowRight")
    assert ("usual", "bad") in verdicts, "shows what is lost"
    assert ("ours", "bad") not in verdicts
    assert figure.locator(".qs-stepped").count() == 0


def test_a_timeline_plays_only_where_motion_is_welcome(read):
    page = read("patterns/outbox/", reduced_motion="no-preference")
    figure = page.locator("figure.qs-timeline[data-ready]")
    figure.get_by_role("button", name="Play").click()
    last = timelines()["outbox"]["moments"][-1]["at"]
    page.wait_for_function("(at) => document.querySelector('.qs-timeline output').textContent === at", arg=last)
    figure.get_by_role("button", name="Play").wait_for()  # it stops at the end
    still = read("patterns/outbox/", reduced_motion="reduce").locator("figure.qs-timeline[data-ready]")
    assert still.get_by_role("slider").count() == 1
    assert still.get_by_role("button").count() == 0


def test_without_scripts_a_timeline_is_a_list_of_every_moment(read):
    page = read("patterns/saga/", java_script_enabled=False)
    shown = page.locator(".qs-timeline .qs-stepped > li")
    moments = timelines()["saga"]["moments"]
    assert shown.count() == len(moments)
    for place, moment in enumerate(moments):
        text = shown.nth(place).inner_text()
        assert all(words in text for words in (moment["at"], moment["usual"][2], moment["ours"][2]))


@pytest.mark.parametrize("width", [390, 1280])
def test_wide_tables_scroll_inside_the_page(read, width):
    page = read("benchmark/", viewport={"width": width, "height": 800})
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    page.wait_for_function("document.querySelector('.md-typeset__scrollwrap')")
    tables = page.evaluate(
        """() => new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(() => done(
            [...document.querySelectorAll("article table")].map((table) => {
                const box = table.closest(".md-typeset__scrollwrap");
                const wide = box.scrollWidth > box.clientWidth;
                return [wide, getComputedStyle(box).overflowX, !wide || box.tabIndex === 0];
            })))))"""
    )
    assert len(tables) > 8
    assert all(overflow == "auto" and reachable for _, overflow, reachable in tables)
    assert width > 390 or sum(wide for wide, *_ in tables) > 8


@pytest.fixture
def calculators(read):
    page = read("calculators/")
    page.wait_for_function("document.querySelectorAll('form[data-ready]').length === 3")
    return page


@pytest.mark.parametrize("policy", [AI, DOCUMENTS, RetryPolicy(base=0.3, cap=7.7, attempts=9)])
def test_backoff_equals_full_jitter_draw_by_draw(calculators, policy, seed):
    draws = [random.Random(seed + n).random() for n in range(policy.attempts - 1)]
    rows = calculators.evaluate(
        "([base, cap, attempts, draws]) => Queuesmith.backoff(base, cap, attempts, () => draws.shift())",
        [policy.base, policy.cap, policy.attempts, draws],
    )

    class Always(random.Random):
        def random(self):
            return 1.0

    assert len(rows) == policy.attempts - 1
    for n, row in enumerate(rows):
        assert row["drawn"] == full_jitter(policy, n, random.Random(seed + n))
        assert row["ceiling"] == full_jitter(policy, n, Always())
        assert row["mean"] == row["ceiling"] / 2
    assert calculators.evaluate("Queuesmith.ceiling(1, 30, 5000)") == full_jitter(
        RetryPolicy(base=1, cap=30), 5000, Always()
    )


def storm_of_the_tests():
    path = ROOT / "tests" / "reference" / "unit" / "test_retry.py"
    spec = importlib.util.spec_from_file_location("the_tests_of_retry", path)
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module._storm


@pytest.mark.parametrize(("clients", "attempts", "capacity"), [(1000, 5, 20), (137, 3, 0), (50, 4, 60), (400, 8, 7)])
def test_the_storm_equals_the_experiment_of_the_tests(calculators, clients, attempts, capacity, seed):
    policy, storm = RetryPolicy(base=1, cap=30, attempts=attempts), storm_of_the_tests()
    rng, drawn = random.Random(seed), []

    def jittered(failures):
        drawn.append(full_jitter(policy, failures, rng))
        return drawn[-1]

    ours = storm(jittered, clients, attempts, capacity)
    plain = storm(lambda n: min(policy.cap, policy.base * 2**n), clients, attempts, capacity)
    got = calculators.evaluate(
        """([clients, attempts, capacity, drawn]) => [
            Queuesmith.storm(clients, attempts, capacity, () => drawn.shift()),
            Queuesmith.storm(clients, attempts, capacity, (n) => Queuesmith.ceiling(1, 30, n)),
        ].map((run) => ({peak_retries_per_100ms: run.peak, succeeded: run.succeeded}))""",
        [clients, attempts, capacity, drawn],
    )
    assert got == [ours, plain]


@pytest.mark.parametrize(
    ("rate", "seconds", "slots", "load", "processes"), [(20, 3, 20, 0.7, 5), (7, 10, 10, 0.7, 10), (0, 3, 20, 0.5, 1)]
)
def test_workers_follow_littles_law(calculators, rate, seconds, slots, load, processes):
    got = calculators.evaluate("(given) => Queuesmith.littlesLaw(...given)", [rate, seconds, slots, load])
    assert got["inWork"] == rate * seconds
    assert got["processes"] == processes == max(1, math.ceil(round(rate * seconds / (slots * load), 9)))
    assert got["load"] == rate * seconds / (processes * slots) <= load + 1e-9


def test_the_forms_show_what_is_computed_and_refuse_nonsense(calculators):
    form = calculators.locator("form[data-calculator=backoff]")
    form.locator("input[name=cap]").fill("4")
    form.locator("input[name=attempts]").fill("5")
    ceilings = form.locator("tbody tr td:nth-child(2)").all_inner_texts()
    assert ceilings == ["1", "2", "4", "4"]
    assert form.locator("svg rect.qs-plain").count() >= 4
    form.locator("input[name=cap]").fill("-1")
    assert "must be a number" in form.locator("output").inner_text()
    assert form.locator("svg").count() == 0
