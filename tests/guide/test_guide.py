"""The pattern guide as files: nothing is missing, no link is dead, every figure comes from a file."""

import ast
import json
import re
import tomllib
from urllib.parse import unquote, urlsplit
from xml.etree import ElementTree

import pytest

from guide import cards, timelines
from harness.guide import Document, build_guide
from harness.processes import ROOT
from queuesmith import catalogue

pytestmark = pytest.mark.slow  # the guide is built twice

CATALOGUE = list(catalogue.patterns().values())
NEEDED = {"qs-card": "guarantee card", "qs-diagram": "diagram", "qs-proof": "proof"}
PROOF_LINE = re.compile(r'class="qs-proof" href="([^"#]+)#L(\d+)"[^>]*>([^<]+)<')


def lacks(text, proofs):
    """What a pattern's page lacks."""
    page = Document(text)
    gone = [word for name, word in NEEDED.items() if not page.classes.get(name)]
    if page.classes.get("qs-proof", 0) != proofs:
        gone.append(f"{proofs} proofs")
    if not any("source/reference/studyhall/patterns/" in link for link in page.links):
        gone.append("link to its code")
    if "What goes wrong without it" not in text:
        gone.append("failure")
    return gone


def test_every_pattern_has_its_failure_drawn_its_card_its_code_and_its_proofs(guide):
    wanting = {
        pattern.id: gone
        for pattern in CATALOGUE
        if (gone := lacks(guide.text(f"patterns/{pattern.id}/"), len(pattern.proofs)))
    }
    assert wanting == {}


def test_every_promise_says_when_it_does_not_hold_in_the_words_of_its_module(guide):
    quoted = 0
    for pattern in CATALOGUE:
        module = ROOT / "reference" / "studyhall" / "patterns" / pattern.own[0]
        if "not hold" in (ast.get_docstring(ast.parse(module.read_text())) or "").lower():
            assert 'class="qs-limits"' in guide.text(f"patterns/{pattern.id}/"), pattern.id
            quoted += 1
    assert quoted > len(CATALOGUE) / 2


@pytest.mark.parametrize("name", NEEDED)
def test_a_page_without_card_diagram_or_proof_is_found(guide, name):
    pattern = CATALOGUE[0]
    text = guide.text(f"patterns/{pattern.id}/").replace(name, "gone")
    assert NEEDED[name] in lacks(text, len(pattern.proofs))


def broken_links(folder):
    """Every link and load that leads nowhere, source pages included."""
    documents = {}

    def document(path):
        if path not in documents:
            text = path.read_text()
            head, _, code = text.partition("<main ") if (folder / "source") in path.parents else (text, "", "")
            documents[path] = Document(head)  # a source page links to its own lines only
            documents[path].ids |= set(re.findall(r'<span class="line" id="(L\d+)"', code))
        return documents[path]

    for path in sorted(folder.rglob("*.html")):
        if path.name == "404.html":  # served at any depth, so its addresses are absolute
            continue
        page = document(path)
        for link in {*page.links, *page.loads}:
            parts = urlsplit(link)
            if parts.scheme in ("http", "https", "mailto", "data") and link not in page.loads:
                continue
            if parts.scheme or parts.netloc:
                yield f"{path.relative_to(folder)} -> {link}"
                continue
            target = (path.parent / unquote(parts.path)).resolve() if parts.path else path
            target = target / "index.html" if target.is_dir() else target
            if not target.is_file() or not target.is_relative_to(folder.resolve()):
                yield f"{path.relative_to(folder)} -> {link}"
            elif parts.fragment and target.suffix == ".html":
                fragment = unquote(parts.fragment)
                if not fragment.startswith("__") and fragment not in document(target).ids:
                    yield f"{path.relative_to(folder)} -> {link} (no such place)"


def test_every_link_leads_somewhere(guide):
    assert list(broken_links(guide.folder)) == []


def test_a_link_to_nowhere_is_found(tmp_path):
    (tmp_path / "index.html").write_text('<a href="gone/">x</a> <a href="#nowhere">y</a> <script src="//cdn/x.js">')
    assert sorted(broken_links(tmp_path)) == [
        "index.html -> #nowhere (no such place)",
        "index.html -> //cdn/x.js",
        "index.html -> gone/",
    ]


def test_code_links_lead_to_the_test_that_they_name(guide):
    checked = 0
    for pattern in CATALOGUE:
        for link, line, words in PROOF_LINE.findall(guide.text(f"patterns/{pattern.id}/")):
            path = ROOT / link.partition("source/")[2].removesuffix(".html")
            named = path.read_text().splitlines()[int(line) - 1]
            assert f"def test_{words.replace(' ', '_')}(" in named, f"{pattern.id}: {link}#L{line}"
            checked += 1
    assert checked == sum(len(pattern.proofs) for pattern in CATALOGUE)


def test_quoted_lines_are_the_lines_that_are_linked(guide):
    """`[retry.py], lines [42–57]` above a quote: the quote begins with that line of the module."""
    above = re.compile(r'lines <a href="[^"]*source/([^"#]+)\.html#L(\d+)">(\d+)[^<]*</a>')
    checked = 0
    for pattern in CATALOGUE:
        text = guide.text(f"patterns/{pattern.id}/")
        for match in above.finditer(text):
            line = (ROOT / match[1]).read_text().splitlines()[int(match[2]) - 1].strip()
            block = re.search(r"<pre>(.*?)</pre>", text[match.end() :], re.DOTALL)
            assert block, pattern.id
            quoted = re.sub(r"<[^>]+>", "", block[1]).lstrip("\n").split("\n")[0].strip()
            plain = quoted.replace("&lt;", "<").replace("&gt;", ">").replace("&quot;", '"').replace("&#39;", "'")
            assert plain.replace("&amp;", "&") == line, f"{pattern.id}: {match[1]}#L{match[2]}"
            checked += 1
    quoted = sum(len(re.findall(r"^Lines \d", entry.page.read_text(), re.MULTILINE)) for entry in CATALOGUE)
    assert checked == quoted > 0


def test_styles_load_nothing_from_another_host(guide):
    """`broken_links` checks what pages load; test_guide_browser checks the browser's requests."""
    styles = list(guide.folder.rglob("*.css"))
    assert len(styles) > 2
    for style in styles:
        assert not re.search(r"(@import|url\()\s*['\"]?(https?:)?//", style.read_text()), style


def test_search_holds_every_pattern_and_antipattern(guide):
    items = json.loads((guide.folder / "search.json").read_text())["items"]
    titles = {item["location"]: item["title"] for item in items}
    for pattern in CATALOGUE:
        assert titles.get(f"patterns/{pattern.id}/") == pattern.title
    wrong = tomllib.loads((ROOT / "guide" / "antipatterns.toml").read_text())["antipattern"]
    assert {f"antipatterns/{row['id']}/" for row in wrong} <= set(titles)


def test_every_antipattern_shows_its_experiment_and_its_naive_twin(guide):
    for row in tomllib.loads((ROOT / "guide" / "antipatterns.toml").read_text())["antipattern"]:
        text = guide.text(f"antipatterns/{row['id']}/")
        page = Document(text)
        assert page.classes.get("qs-card") == 1, row["id"]
        assert any("/source/tests/" in link for link in page.links), row["id"]
        assert any(link.endswith(f"patterns/{row['pattern']}/") for link in page.links), row["id"]


@pytest.fixture(scope="module")
def bare(tmp_path_factory):
    """Built with one figure of our own, and with neither npm nor a mermaid from earlier."""
    folder = tmp_path_factory.mktemp("bare")
    (folder / "figures").mkdir()
    proof = catalogue.find("retry").proofs[0]
    run = "2031-02-03 full 424242"
    entry = {"run": run, "proof": proof.partition("::")[2], "figures": {"draws": 98765, "distinct_naive": 77}}
    (folder / "figures" / "retry.json").write_text(json.dumps({"at the cap": entry, "runs": {run: "python 3.x"}}))
    bench = {
        "date": "2031-02-04",
        "mode": "full",
        "rounds": 3,
        "machine": {"cpus": 2, "processor": "one", "system": "Linux", "load_at_start": 0.0},
        "versions": {"python": "3.x"},
        "peers": {"queuesmith": {"title": "Ours", "version": "1", "settings": "all of them on"}},
        "missing": [],
        "sections": {
            "throughput": {"rows": {"queuesmith": {"noop": [54321, 54300, 54399]}}, "rounds": 3, "failed": {}}
        },
    }
    (folder / "bench.json").write_text(json.dumps(bench))
    env = {
        "GUIDE_FIGURES": str(folder / "figures"),
        "GUIDE_BENCH": str(folder / "bench.json"),
        "GUIDE_MERMAID": str(folder / "none"),
        "PATH": "/nonexistent",
    }
    return build_guide(folder / "guide", **env)


def test_the_card_shows_the_figures_of_the_file_with_date_and_seed(bare):
    text = bare.text("patterns/retry/")
    assert 'data-measured="full"' in text
    for shown in ("98,765", "77", "2031-02-03", "424242"):
        assert shown in text


def test_a_card_is_sentences_and_its_raw_figures_are_one_click_away(guide):
    text = re.sub(r"</?(code|strong)>", "", guide.text("patterns/idempotency/"))
    prose, _, raw = text.partition('<details class="qs-raw"')
    assert "240 deliveries, 48 kills at four moments: nothing lost, nothing duplicated." in prose
    assert "The usual SET NX lost 42" in prose
    assert "naive set nx lost" not in prose
    assert "naive set nx lost" in raw


def test_every_experiment_has_a_sentence_that_its_figures_fill():
    """A figure that nobody has put into words would be shown as a list of keys and values."""
    wanting = [
        f"{path.stem}/{name}"
        for path in sorted(cards.COMMITTED.glob("*.json"))
        for name, entry in cards.measured(path.stem, (cards.COMMITTED,)).items()
        # some naive twins run on SQLite only, and that run is shown
        if not cards.filled(path.stem, cards.experiment(name)[0], entry["figures"]) and "postgres" not in name
    ]
    assert wanting == []


@pytest.mark.parametrize(
    ("given", "read"),
    [
        ("0 lost, 10 duplicated", "nothing lost, 10 duplicated"),
        ("0 of 600 writes lost", "none of 600 writes lost"),
        ("0 ghosts after 0.5 s and 1,000 jobs", "no ghosts after 0.5 s and 1,000 jobs"),
        ("killed 1 times, run 2 times, 1 jobs, 1 ms, 21 jobs", "killed once, run twice, 1 job, 1 ms, 21 jobs"),
    ],
)
def test_a_figure_in_a_sentence_reads_as_english(given, read, monkeypatch):
    monkeypatch.setattr(cards, "templates", lambda: {"x": {"y": given}})
    assert cards.sentence("x", "y", {}) == read


def test_skill_pages_and_the_guide_tell_the_same_sentences(guide):
    plain = re.sub(r"<[^>]+>", "", guide.text("patterns/outbox/"))
    page = catalogue.find("outbox").page.read_text()
    measured = re.search(r"\*\*Measured\.\*\* (.*)", page)
    assert measured
    for sentence in measured[1].replace("`", "").split(". "):
        assert sentence.rstrip(".") in plain.replace("&gt;", ">")


def test_home_is_a_quickstart_a_chooser_and_a_chart_of_the_peers(guide):
    text = guide.text("")
    plain = re.sub(r"<[^>]+>", "", re.sub(r"<(script|style).*?</\1>", "", text, flags=re.DOTALL))
    assert "kill -9 $!" in plain
    assert "token" not in plain.lower()
    assert "make guide" not in text
    charts = re.findall(r"<desc id=[^>]*>([^<]*)</desc>", text)
    assert len(charts) == 2
    for peer in json.loads((ROOT / "bench" / "results.json").read_text())["peers"].values():
        assert all(f"{peer['title']}: " in chart for chart in charts), peer["title"]
    assert "Queuesmith, full pipeline: nothing" in charts[0]


def test_what_was_not_measured_is_named_never_filled_in(bare):
    assert 'data-measured="none"' in bare.text("patterns/saga/")
    assert "not measured yet" in bare.text("patterns/saga/")
    operations = bare.text("operations/")
    figures = re.findall(r'data-figure="([^"]+)"[^>]*>([^<]+)<', operations)
    assert len(figures) > 15
    assert {shown for _, shown in figures} == {"not measured yet"}


def test_the_benchmark_and_operations_pages_show_the_results_of_the_file(bare):
    page = bare.text("benchmark/")
    for shown in ("54,321", "all of them on", "2031-02-04", 'class="qs-chart"', "not measured"):
        assert shown in page
    figures = dict(re.findall(r'data-bench="([^"]+)"[^>]*>([^<]+)<', bare.text("operations/")))
    assert figures["throughput/queuesmith/noop"] == "54,321"
    assert set(figures.values()) == {"54,321", "not measured yet"}


def test_without_npm_the_diagrams_are_text_and_the_build_says_so(bare):
    assert "diagrams are shown as text" in bare.output
    assert not (bare.folder / "assets" / "mermaid.min.js").exists()
    assert 'data-qs-mermaid="no"' in bare.text("patterns/retry/")
    assert "sequenceDiagram" in bare.text("patterns/retry/")


def test_the_entry_of_a_pattern_is_not_shown_as_text(guide):
    for pattern in CATALOGUE:
        text = guide.text(f"patterns/{pattern.id}/")
        assert "proofs:" not in text, pattern.id
        assert f"modules: [{pattern.own[0]}" not in text, pattern.id


def test_pages_have_no_second_copy_of_a_skill_text():
    """A sentence of a skill page that is repeated in a hand-written page of the guide would drift."""
    skills = " ".join(" ".join(path.read_text().split()) for path in (ROOT / "skills").rglob("*.md"))
    for path in (ROOT / "guide" / "pages").rglob("*.md"):
        for sentence in re.split(r"(?<=[.:])\s", " ".join(path.read_text().split())):
            if len(sentence) > 80 and "{{" not in sentence:
                assert sentence not in skills, f"{path.name}: {sentence}"


@pytest.mark.parametrize(
    ("steps", "words"),
    [
        (
            ["take | taken", "charge | charge", "SET NX | marker", "ack | acknowledged"],
            "fine fine duplicated fine fine",
        ),
        (["take | taken", "SET NX | marker", "charge | charge", "ack | acknowledged"], "fine fine lost fine fine"),
        (["take | taken", "SET NX | marker", "ack | acknowledged", "charge | charge"], "fine fine lost lost fine"),
    ],
    ids=["effect first", "marker first", "acknowledged first"],
)
def test_a_verdict_of_a_timeline_follows_from_what_is_durable(steps, words):
    """It is not written beside the moment: the same rows judge any order of steps."""
    timeline = tomllib.loads((ROOT / "guide" / "timelines.toml").read_text())["idempotency"]
    moments = timelines.derived(timeline | {"usual": ["title", *steps]})["moments"]
    assert [moment["usual"][1] for moment in moments] == words.split()


def test_the_demo_of_the_readme_is_small_and_whole():
    text = (ROOT / "guide" / "assets" / "demo.svg").read_text()
    assert len(text.encode()) <= 12_000
    assert ElementTree.fromstring(text).attrib["aria-label"].endswith("Nothing was lost, nothing was done twice.")
    assert "href" not in text
    assert "url(" not in text
    assert "prefers-reduced-motion" in text
    readme = (ROOT / "README.md").read_text()
    assert readme.index("assets/demo.svg") < readme.index("make demo ") < readme.index("## Three ways in")


def test_what_is_not_proven_is_linked_from_the_readme_and_the_home_page():
    assert "(guide/pages/not-proven.md)" in (ROOT / "README.md").read_text()
    assert "(page:not-proven)" in (ROOT / "guide" / "pages" / "index.md").read_text()
