"""The card: for people, for programs, for a build server, for a browser."""

import html
import json
import textwrap
from collections import Counter
from dataclasses import asdict
from pathlib import Path
from xml.etree import ElementTree

from queuesmith import catalogue

from .faults import FAULTS
from .invariants import INVARIANTS, OWN, READ, TIME_UP, Row
from .run import KILLS, NOT_QUICK, Card

_MARKS = {"held": "held", "broken": "BROKEN", "hit nothing": "HIT NOTHING", "unclear": "UNCLEAR", "not run": "not run"}


def as_text(card: Card, width: int = 118) -> str:
    lines = [_title(card), ""]
    measure = max(40, width - 15 - 50)
    form = f"  {{:<15}}{{:<48}}  {{:<{measure - 12}}}  {{}}"
    lines.append(form.format("fault", "what was done", "measured", "verdict").rstrip())
    for row in card.rows:
        if row.verdict == "not run":
            continue
        cells = [textwrap.wrap(row.does, 48) or [""], textwrap.wrap(row.measured, measure - 12) or [""]]
        for number in range(max(map(len, cells))):
            does, measured = (cell[number] if number < len(cell) else "" for cell in cells)
            name, verdict = (row.fault, _MARKS[row.verdict]) if not number else ("", "")
            lines.append(form.format(name, does, measured, verdict).rstrip())
        for broken in row.broken:
            lines += textwrap.wrap(
                f"{broken.invariant.upper()} (promised: {INVARIANTS[broken.invariant]}): {broken.measured}",
                width,
                initial_indent="      ",
                subsequent_indent="        ",
            )
            read = f"Read: {', '.join(Path(page).stem for page in _pages(card, broken.invariant))}."
            lines += textwrap.wrap(
                f"{broken.story + '. ' if broken.story else ''}{read}",
                width,
                initial_indent="        ",
                subsequent_indent="        ",
                break_on_hyphens=False,
            )
    if not_run := [row for row in card.rows if row.verdict == "not run"]:
        lines += ["", "  not run:", *(f"    {row.fault:<15}{row.measured}" for row in not_run)]
    if pages := reading(card):
        lines += ["", "  what to read:"]
        lines += [
            f"    {'' if number else invariant:<18}{page}"
            for invariant, links in pages.items()
            for number, page in enumerate(links)
        ]
    lines += ["", _summary(card)]
    return "\n".join(lines)


def as_json(card: Card) -> str:
    content = asdict(card) | {"verdict": "broken" if card.broken else "held", "read": reading(card)}
    content["rest"] = card.rest
    return json.dumps(content, indent=2)


def as_junit(card: Card) -> str:
    counts = Counter(row.verdict for row in card.rows)
    suite = ElementTree.Element(
        "testsuite",
        name=f"queuesmith prove {card.name}",
        tests=str(len(card.rows)),
        failures=str(counts["broken"]),
        skipped=str(counts["not run"] + counts["hit nothing"] + counts["unclear"]),
        time=f"{card.seconds:.1f}",
    )
    for row in card.rows:
        case = ElementTree.SubElement(
            suite, "testcase", classname=f"prove.{card.name}", name=f"{row.fault}: {row.does}"
        )
        if row.verdict == "broken":
            summary = "; ".join(f"{broken.invariant}: {broken.measured}" for broken in row.broken)
            failure = ElementTree.SubElement(case, "failure", message=summary)
            failure.text = "\n".join(
                f"{broken.story}\nread: {' '.join(_pages(card, broken.invariant))}" for broken in row.broken
            )
        elif row.verdict != "held":
            ElementTree.SubElement(case, "skipped", message=f"{row.verdict}: {row.measured}")
    return ElementTree.tostring(suite, encoding="unicode", xml_declaration=True) + "\n"


def as_html(card: Card) -> str:
    rows = "\n".join(_html_row(card, row) for row in card.rows)
    return f"""<!doctype html>
<html lang="en"><meta charset="utf-8"><title>{html.escape(_title(card))}</title>
<style>
body {{ font: 15px/1.5 system-ui, sans-serif; max-width: 70rem; margin: 2rem auto; padding: 0 1rem; color: #1b1b1b }}
table {{ border-collapse: collapse; width: 100% }}
td, th {{ text-align: left; padding: .4rem .6rem; vertical-align: top;
 border-bottom: 1px solid #ddd }}
.held {{ color: #1a6b2f }} .broken {{ color: #a4161a; font-weight: 600 }}
.not-run {{ color: #666 }} small {{ display: block; color: #444 }}
</style>
<h1>{html.escape(_title(card))}</h1><p>{html.escape(_summary(card))}</p>
<table><tr><th>fault</th><th>what was done</th><th>measured</th><th>verdict</th></tr>
{rows}
</table>
</html>
"""


def reading(card: Card) -> dict[str, list[str]]:
    """Every broken invariant -> the pages of the patterns that fix it."""
    names = [broken.invariant for row in card.broken for broken in row.broken]
    return {name: _pages(card, name) for name in names}


def _pages(card: Card, invariant: str) -> list[str]:
    known = catalogue.patterns()
    names = [name for name in READ[invariant] if name in known and not (card.stack and name in OWN)]
    pages = [f"{known[name].skill}/references/{name}.md" for name in names]
    if card.stack:
        pages.insert(0, f"background-jobs/references/stacks/{card.stack}.md")
    return [f"{catalogue.repository()}/blob/main/skills/{page}" for page in pages]


def _html_row(card: Card, row: Row) -> str:
    details = ""
    for broken in row.broken:
        links = ", ".join(
            f'<a href="{html.escape(page)}">{html.escape(Path(page).stem)}</a>'
            for page in _pages(card, broken.invariant)
        )
        details += (
            f"<small><b>{html.escape(broken.invariant)}</b> (promised: {html.escape(INVARIANTS[broken.invariant])}): "
            f"{html.escape(broken.measured)}<br>{html.escape(broken.story)}<br>Read: {links}</small>"
        )
    verdict = html.escape(_MARKS[row.verdict])
    return (
        f"<tr><td>{html.escape(row.fault)}</td><td>{html.escape(row.does)}</td>"
        f'<td>{html.escape(row.measured)}{details}</td><td class="{row.verdict.replace(" ", "-")}">{verdict}</td></tr>'
    )


def _title(card: Card) -> str:
    workers = f"{card.workers} worker{'s' if card.workers > 1 else ''}"
    return f"queuesmith prove: {card.name}, {workers}, {card.server}, seed {card.seed}, {card.seconds:.0f} s"


def _summary(card: Card) -> str:
    counts = Counter(row.verdict for row in card.rows)
    struck = [row for row in card.rows if row.fault in FAULTS and row.fault != "none"]
    faults = sum(row.verdict in ("held", "broken") for row in struck)
    parts = [f"{counts['held']} held", f"{counts['broken']} broken"]
    parts += [f"{counts[name]} {name}" for name in ("hit nothing", "unclear") if counts[name]]
    not_run = {why: [row.fault for row in card.rows if row.measured == why] for why in (TIME_UP, NOT_QUICK)}
    wanted = sum(row.verdict != "not run" for row in struck) + len(not_run[TIME_UP])
    lines = [f"{', '.join(parts)}; {faults} of {wanted} faults hit."]
    lines += [f"Not run ({why}): {', '.join(names)}." for why, names in not_run.items() if names]
    if card.rest:
        lines.append(f"Run the rest: {card.command} --only {','.join(card.rest)}")
    if card.evidence:
        lines.append(f"Evidence: {card.evidence}")
    if not_run[NOT_QUICK] and not any(row.fault in KILLS and row.verdict in ("held", "broken") for row in struck):
        lines.append("No kill was tried to its end: run it again on a quieter machine, or without --quick")
    return "\n".join(lines)
