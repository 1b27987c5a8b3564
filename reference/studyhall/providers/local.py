"""The provider that needs no key, no network and no model.

Promise: real results from the text alone, the same for the same text, in steps short enough for progress,
checkpoints and cancellation. Concepts are the terms of the text, links are terms that share sentences,
questions are sentences with a gap, explanations are the sentences that name two concepts.

When it does not hold: it matches words, it does not understand them. "It" is never resolved to what it stands
for, and only English has a stop word list.
"""

import asyncio
import random
import re
from collections import Counter
from collections.abc import Sequence
from itertools import combinations, pairwise
from typing import Any

from .language import SLICE, Vocabulary, chunks, digest, sentences, terms
from .prompts import relevant
from .protocol import Advance, OnProgress, TooLittleText, time_left
from .results import Concept, ConceptGraph, Explanation, Link, Question, Quiz

MAX_TEXT = 400_000  # characters that are analysed; the graph's `coverage` tells when a document is longer
CHUNK = 600
MAX_CHUNKS = 40
LINKS = 3  # of a concept, where the text has them
GAP = "_____"
Pair = tuple[str, str]
Read = dict[str, list[tuple[str, int, int]]]  # sentence: what it names, and from where to where


class LocalProvider:
    """`pace` is a pause per chunk in seconds, for demos that want the duration of a real model."""

    name = "local"

    def __init__(self, *, pace: float = 0.0) -> None:
        self._pace = pace

    async def concept_graph(
        self, text: str, *, key: str, on_progress: OnProgress, deadline: float, resume: dict[str, Any] | None = None
    ) -> ConceptGraph:
        lines = sentences(text[:MAX_TEXT])
        scores = await terms(lines, at_most=min(30, max(6, len(lines) // 2)))
        vocabulary = Vocabulary(scores)
        blocks = chunks(lines, size=CHUNK, at_most=MAX_CHUNKS)
        of, start, shared = digest(text), 0, Counter[Pair]()
        if resume and resume.get("of") == of and "pairs" in resume:
            start = int(resume["next"])
            shared.update({(a, b): n for a, b, n in resume["pairs"] if a in scores and b in scores})
        await on_progress(Advance("analysing", start, len(blocks)))
        for index in range(start, len(blocks)):
            time_left(deadline)
            await asyncio.sleep(self._pace)
            for sentence in blocks[index]:
                shared.update(combinations(sorted({name for name, _, _ in vocabulary.spans(sentence)}), 2))
            pairs = [[a, b, n] for (a, b), n in sorted(shared.items())]
            state = {"of": of, "next": index + 1, "pairs": pairs}
            await on_progress(Advance("analysing", index + 1, len(blocks), state))
        await on_progress(Advance("building", 0, 1))
        links = _links(shared, found := await _read(vocabulary, lines))
        joined = {name for link in links for name in (link.source, link.target)}
        if len(joined) < 3:
            raise TooLittleText(str(TooLittleText.__doc__))
        # A sentence that begins with a concept is usually the one that says what it is.
        says: dict[str, tuple[int, str]] = {}
        for sentence, spans in found.items():
            for name, begin, _ in spans:
                if name not in says or begin < says[name][0]:
                    says[name] = begin, sentence
        best = max(scores.values())
        return ConceptGraph(
            concepts=tuple(
                Concept(name=name, weight=round(score / best, 4), sentence=says.get(name, (0, ""))[1])
                for name, score in scores.items()
                if name in joined
            ),
            links=links,
            coverage=min(1.0, MAX_TEXT / len(text)),
        )

    async def quiz(
        self, text: str, graph: ConceptGraph, *, key: str, on_progress: OnProgress, deadline: float, questions: int = 8
    ) -> Quiz:
        ranked = sorted(graph.concepts, key=lambda concept: -concept.weight)
        vocabulary = Vocabulary(concept.name for concept in ranked)
        found = await _read(vocabulary, sentences(text[:MAX_TEXT]))
        written: list[Question] = []
        for name in vocabulary.names:
            time_left(deadline)
            if question := _question(name, found, vocabulary.names):
                await asyncio.sleep(self._pace / 4)
                del found[question.source]
                written.append(question)
                await on_progress(Advance("writing", len(written), questions))
            if len(written) == questions:
                break
        if not written:
            raise TooLittleText(str(TooLittleText.__doc__))
        return Quiz(questions=tuple(written))

    async def explain(
        self, connections: Sequence[Link], text: str, *, key: str, on_progress: OnProgress, deadline: float
    ) -> list[Explanation]:
        vocabulary = Vocabulary(name for link in connections for name in (link.source, link.target))
        found = await _read(vocabulary, sentences(text[:MAX_TEXT]))
        explanations: list[Explanation] = []
        for done, link in enumerate(connections, start=1):
            time_left(deadline)
            await asyncio.sleep(self._pace / 4)
            explanations.append(_explanation(link, found))
            await on_progress(Advance("explaining", done, len(connections)))
        return explanations

    async def answer(self, question: str, text: str, *, key: str, deadline: float) -> str:
        await asyncio.sleep(min(self._pace, time_left(deadline)))
        quotes = relevant(question, sentences(text[:MAX_TEXT]), at_most=3)
        return " ".join(quotes) or "Your documents do not say anything about that."

    async def close(self) -> None:
        """Nothing is open."""


async def _read(vocabulary: Vocabulary, lines: Sequence[str]) -> Read:
    found: Read = {}
    for number, sentence in enumerate(lines):
        found[sentence] = vocabulary.spans(sentence)
        if number % SLICE == 0:
            await asyncio.sleep(0)
    return found


def _links(shared: Counter[Pair], found: Read) -> tuple[Link, ...]:
    """The pairs that share most sentences; the words between two names ("float on") label them."""
    labels: dict[Pair, str] = {}
    for sentence, spans in found.items():
        for (first, _, end), (second, begin, _) in pairwise(spans):
            if re.fullmatch(r" (?!and|or|the|that|which)[a-z]+(?: [a-z]+){0,4} ", sentence[end:begin]):
                labels.setdefault((first, second), sentence[end:begin])
    links: list[Link] = []
    degree = Counter[str]()
    for pair in sorted(shared, key=lambda pair: (-shared[pair], pair)):
        if min(degree[name] for name in pair) < LINKS:
            degree.update(pair)
            source, target = pair[::-1] if pair[::-1] in labels else pair
            weight = round(shared[pair] / max(shared.values()), 4)
            links.append(Link(source=source, target=target, label=labels.get((source, target), ""), weight=weight))
    return tuple(links)


def _question(name: str, found: Read, names: Sequence[str]) -> Question | None:
    for sentence, spans in found.items():
        here = [(begin, end) for other, begin, end in spans if other == name]
        present = {other for other, _, _ in spans}
        wrong = [other for other in names if other not in present and other.lower() not in sentence.lower()]
        # Another concept beside the gap makes it one to think about; a second gap would need a second answer.
        if len(here) != 1 or len(present) < 2 or len(wrong) < 3 or not 40 <= len(sentence) <= 260:
            continue
        ((begin, end),) = here
        if sentence[begin:end].lower() == name.lower():  # or its form would give the answer away
            dice = random.Random(sentence)  # a text as seed is hashed with SHA-512: the same in every process
            choices = [name, *dice.sample(wrong, 3)]
            dice.shuffle(choices)
            prompt = sentence[:begin] + GAP + sentence[end:]
            return Question(prompt=prompt, choices=tuple(choices), answer=name, source=sentence)
    return None


def _explanation(link: Link, found: Read) -> Explanation:
    quotes = _naming(found, link.source, link.target)[:2]
    text = f"“{link.source}” and “{link.target}” meet in the text: {' '.join(quotes)}"
    if not quotes:
        quotes = _naming(found, link.source)[:1] + _naming(found, link.target)[:1]
        text = f"The text does not say how “{link.source}” and “{link.target}” belong together. {' '.join(quotes)}"
    return Explanation(source=link.source, target=link.target, text=text, quotes=tuple(quotes))


def _naming(found: Read, *names: str) -> list[str]:
    return [sentence for sentence, spans in found.items() if {name for name, _, _ in spans}.issuperset(names)]
