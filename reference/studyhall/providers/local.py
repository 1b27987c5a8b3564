"""The provider that needs no key, no network and no model.

Promise: real results from the text alone, the same for the same text, in steps short enough for progress,
checkpoints and cancellation. Concepts are the terms of the text, links are terms that share sentences,
questions are sentences with a gap, explanations are the sentences that connect two concepts.

When it does not hold: it matches words, it does not understand them. "It" is never resolved to what it stands
for, and only English has a stop word list.
"""

import asyncio
import hashlib
import math
import random
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from itertools import combinations, pairwise
from typing import Any

from .language import Vocabulary, chunks, sentences
from .prompts import relevant
from .protocol import Advance, OnProgress, TooLittleText, time_left
from .results import Concept, ConceptGraph, Explanation, Link, Question, Quiz

MAX_TEXT = 400_000  # characters that are analysed; the graph's `coverage` tells when a document is longer
CHUNK = 600
MAX_CHUNKS = 40
GAP = "_____"
Pair = tuple[str, str]


class LocalProvider:
    """`pace` is a pause per chunk in seconds, for demos that want the duration of a real model."""

    name = "local"

    def __init__(self, *, pace: float = 0.0) -> None:
        self._pace = pace

    async def concept_graph(
        self, text: str, *, key: str, on_progress: OnProgress, deadline: float, resume: dict[str, Any] | None = None
    ) -> ConceptGraph:
        lines = sentences(text[:MAX_TEXT])
        vocabulary = await Vocabulary.of(lines, at_most=_concepts_for(lines))
        names = {term.name for term in vocabulary.terms}
        if len(names) < 3:
            raise TooLittleText(str(TooLittleText.__doc__))
        blocks = chunks(lines, size=CHUNK, at_most=MAX_CHUNKS)
        digest = _digest(text)
        start, shared = _restored(resume, digest, names)
        await on_progress(Advance("analysing", start, len(blocks)))
        for index in range(start, len(blocks)):
            time_left(deadline)
            await asyncio.sleep(self._pace)
            # The last sentence of the block before: a pair may meet across the border of two blocks.
            lead = blocks[index - 1][-1:] if index else []
            shared.update(_meetings(vocabulary, lead, blocks[index]))
            state = {"of": digest, "next": index + 1, "pairs": [[a, b, n] for (a, b), n in sorted(shared.items())]}
            await on_progress(Advance("analysing", index + 1, len(blocks), state))
        await on_progress(Advance("building", 0, 1))
        return await _build(vocabulary, shared, lines, coverage=min(1.0, MAX_TEXT / max(len(text), 1)))

    async def quiz(
        self, text: str, graph: ConceptGraph, *, key: str, on_progress: OnProgress, deadline: float, questions: int = 8
    ) -> Quiz:
        lines = sentences(text[:MAX_TEXT])
        vocabulary = _only(await Vocabulary.of(lines, at_most=_concepts_for(lines)), graph)
        gaps = _gaps(vocabulary, lines)
        written: list[Question] = []
        used: set[str] = set()
        for concept in sorted(graph.concepts, key=lambda concept: (-concept.weight, concept.name)):
            time_left(deadline)
            question = _question(concept.name, gaps.get(concept.name, []), graph, used)
            if question is None:
                continue
            await asyncio.sleep(self._pace / 4)
            written.append(question)
            used.add(question.source)
            await on_progress(Advance("writing", len(written), questions))
            if len(written) == questions:
                break
        if not written:
            raise TooLittleText(str(TooLittleText.__doc__))
        return Quiz(questions=tuple(written))

    async def explain(
        self, connections: Sequence[Link], text: str, *, key: str, on_progress: OnProgress, deadline: float
    ) -> list[Explanation]:
        lines = sentences(text[:MAX_TEXT])
        vocabulary = await Vocabulary.of(lines, at_most=_concepts_for(lines))
        where = defaultdict[str, set[int]](set)
        for index, sentence in enumerate(lines):
            for term, _, _ in vocabulary.spans(sentence):
                where[term.name].add(index)
        explanations: list[Explanation] = []
        for done, link in enumerate(connections, start=1):
            time_left(deadline)
            await asyncio.sleep(self._pace / 4)
            explanations.append(_explanation(link, where, lines))
            await on_progress(Advance("explaining", done, len(connections)))
        return explanations

    async def answer(self, question: str, text: str, *, key: str, deadline: float) -> str:
        await asyncio.sleep(min(self._pace, time_left(deadline)))
        quotes = relevant(question, sentences(text[:MAX_TEXT]), at_most=3)
        return " ".join(quotes) or "Your documents do not say anything about that."

    async def close(self) -> None:
        """Nothing is open."""


def _concepts_for(lines: Sequence[str]) -> int:
    words = sum(sentence.count(" ") + 1 for sentence in lines)
    return min(30, max(6, words // 40))


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _restored(resume: dict[str, Any] | None, digest: str, names: set[str]) -> tuple[int, Counter[Pair]]:
    """Position and counts of an earlier run, if they are about this very text."""
    if not resume or resume.get("of") != digest:
        return 0, Counter()
    pairs = Counter[Pair]({(a, b): n for a, b, n in resume["pairs"] if a in names and b in names})
    return int(resume["next"]), pairs


def _meetings(vocabulary: Vocabulary, lead: Sequence[str], block: Sequence[str]) -> Counter[Pair]:
    """Quarters of a meeting: four for two terms in one sentence, one for two in neighbouring sentences."""
    shared: Counter[Pair] = Counter()
    present = [sorted({term.name for term, _, _ in vocabulary.spans(line)}) for line in (*lead, *block)]
    for names in present[len(lead) :]:
        shared.update(dict.fromkeys(combinations(names, 2), 4))
    for before, after in pairwise(present):
        for first in before:
            for second in after:
                if first not in after and second not in before:
                    shared[min(first, second), max(first, second)] += 1
    return shared


async def _build(
    vocabulary: Vocabulary, shared: Counter[Pair], lines: Sequence[str], *, coverage: float
) -> ConceptGraph:
    """A maximum spanning forest keeps everything connected that can be; the strongest other pairs join it."""
    counts = {term.name: term.count for term in vocabulary.terms}
    strength = {
        pair: meetings / (4 * math.sqrt(counts[pair[0]] * counts[pair[1]])) for pair, meetings in shared.items()
    }
    ranked = sorted(strength, key=lambda pair: (-shared[pair] * strength[pair], pair))
    group = {name: name for name in counts}

    def root(name: str) -> str:
        while group[name] != name:
            name = group[name]
        return name

    chosen: list[Pair] = []
    for first, second in ranked:
        if root(first) != root(second):
            group[root(first)] = root(second)
            chosen.append((first, second))
    extra = [pair for pair in ranked if shared[pair] >= 8 and pair not in set(chosen)]
    chosen += extra[: max(0, 2 * len(counts) - len(chosen))]
    if not chosen:
        raise TooLittleText(str(TooLittleText.__doc__))
    labels, definitions = await _read_again(vocabulary, lines)
    strongest = max(strength[pair] for pair in chosen)
    joined = {name for pair in chosen for name in pair}
    best = max(term.score for term in vocabulary.terms)
    return ConceptGraph(
        concepts=tuple(
            Concept(name=term.name, weight=round(term.score / best, 4), sentence=definitions.get(term.name, ""))
            for term in vocabulary.terms
            if term.name in joined
        ),
        links=tuple(
            _link(pair, labels.get(pair), weight=round(strength[pair] / strongest, 4)) for pair in sorted(chosen)
        ),
        coverage=coverage,
    )


def _link(pair: Pair, label: tuple[bool, str] | None, *, weight: float) -> Link:
    if label is None:
        return Link(source=pair[0], target=pair[1], label="", weight=weight)
    forward, words = label
    source, target = pair if forward else (pair[1], pair[0])
    return Link(source=source, target=target, label=words, weight=weight)


async def _read_again(
    vocabulary: Vocabulary, lines: Sequence[str]
) -> tuple[dict[Pair, tuple[bool, str]], dict[str, str]]:
    """Words between two terms ("float on"), and for each term the sentence that says what it is."""
    labels: dict[Pair, tuple[bool, str]] = {}
    definitions: dict[str, tuple[int, str]] = {}
    for index, sentence in enumerate(lines):
        spans = vocabulary.spans(sentence)
        for (first, _, end), (second, begin, _) in pairwise(spans):
            between = sentence[end:begin].strip()
            if first.name != second.name and re.fullmatch(r"[a-z]+(?: [a-z]+){0,4}", between):
                pair = (min(first.name, second.name), max(first.name, second.name))
                if between.split()[0] not in ("and", "or", "the", "that", "which"):
                    labels.setdefault(pair, (first.name == pair[0], between))
        for position, (term, begin, end) in enumerate(spans):
            tells = re.match(r" (?:is|are|means|consists?|describes?)\b", sentence[end:]) is not None
            rank = (2 if tells and begin < 12 else 1 if position == 0 else 0) + (0 if len(sentence) > 240 else 1)
            if rank > definitions.get(term.name, (-1, ""))[0]:
                definitions[term.name] = (rank, sentence)
        if index % 100 == 99:
            await asyncio.sleep(0)
    return labels, {name: sentence for name, (_, sentence) in definitions.items()}


def _only(vocabulary: Vocabulary, graph: ConceptGraph) -> Vocabulary:
    """The terms of the graph; a graph of another provider may name concepts this text does not spell out."""
    names = {concept.name for concept in graph.concepts}
    terms = [term for term in vocabulary.terms if term.name in names]
    return Vocabulary(terms, {term.stems: term for term in terms})


def _gaps(vocabulary: Vocabulary, lines: Sequence[str]) -> dict[str, list[tuple[str, str, frozenset[str]]]]:
    """For each concept the sentences that make a fair question: (sentence, words to hide, concepts in it)."""
    gaps = defaultdict[str, list[tuple[str, str, frozenset[str]]]](list)
    for sentence in lines:
        if not 40 <= len(sentence) <= 260 or re.match(r"(?:It|They|This|That|These|Those|He|She)\b", sentence):
            continue
        spans = vocabulary.spans(sentence)
        names = frozenset(term.name for term, _, _ in spans)
        for term, begin, end in spans:
            gaps[term.name].append((sentence, sentence[begin:end], names))
    return gaps


def _question(
    name: str, gaps: Sequence[tuple[str, str, frozenset[str]]], graph: ConceptGraph, used: Iterable[str]
) -> Question | None:
    # One gap before several, then more context: two other concepts around a gap make it one to think about.
    for sentence, hidden, present in sorted(
        gaps, key=lambda gap: (gap[0].lower().count(gap[1].lower()), -min(len(gap[2]), 3), gap[0])
    ):
        if sentence in used or len(present) < 2:
            continue
        dice = random.Random(sentence)  # a text as seed is hashed with SHA-512: the same in every process
        others = [concept.name for concept in graph.concepts if concept.name not in present]
        dice.shuffle(others)
        # Like the answer in number of words and in being plural: otherwise grammar gives it away.
        others.sort(key=lambda other: (_shape(other) != _shape(hidden), len(other.split()) != len(hidden.split())))
        wrong = [other for other in others if other.casefold() != hidden.casefold()][:3]
        if len(wrong) < 3:
            continue
        starts_sentence = hidden[1:].islower() and name[0].islower()
        answer = hidden[0].lower() + hidden[1:] if starts_sentence else hidden
        choices = [answer, *wrong]
        dice.shuffle(choices)
        prompt = re.sub(rf"\b{re.escape(hidden)}\b", GAP, sentence, flags=re.IGNORECASE)
        return Question(prompt=prompt, choices=tuple(choices), answer=answer, source=sentence)
    return None


def _shape(name: str) -> bool:
    return name.endswith("s") and not name.endswith(("ss", "us", "is"))


def _explanation(link: Link, where: dict[str, set[int]], lines: Sequence[str]) -> Explanation:
    source, target = where.get(link.source, set()), where.get(link.target, set())
    together = sorted(source & target)
    if together:
        quotes = [lines[index] for index in together[:2]]
        times = "one sentence" if len(together) == 1 else f"{len(together)} sentences"
        text = f"“{link.source}” and “{link.target}” meet in {times} of the text: {' '.join(quotes)}"
    elif near := [(a, b) for a in sorted(source) for b in sorted(target) if abs(a - b) == 1][:1]:
        quotes = [lines[index] for index in sorted(near[0])]
        text = f"The text goes from “{link.source}” to “{link.target}” in one step: {' '.join(quotes)}"
    else:
        quotes = [lines[min(places)] for places in (source, target) if places]
        text = (
            f"The text treats “{link.source}” and “{link.target}” apart. {' '.join(quotes)}"
            if quotes
            else f"The text does not say how “{link.source}” and “{link.target}” belong together."
        )
    return Explanation(source=link.source, target=link.target, text=text, quotes=tuple(quotes))
