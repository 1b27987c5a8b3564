"""Sentences and terms of a text, without a model: rules that a reader can follow and that give the same
result every time.

A term is a run of one to three words that behaves like a noun in this very text: it follows articles and
prepositions more often than pronouns and modal verbs. Terms are ranked by C-value, which asks how often a
phrase stands on its own rather than inside a longer one: "plate boundary" does not drag "boundary" along.
"""

from __future__ import annotations

import asyncio
import math
import re
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from .words import COMMON, DETERMINERS, PRONOUNS, VERBS

MAX_SENTENCE = 600
SLICE = 100  # sentences between two looks at the event loop: about 10 ms of work
WORD = re.compile(r"[^\W\d_]+(?:[-'’][^\W\d_]+)*")
SENTENCE_END = re.compile(r"(?<=[.!?])[\"”’)\]]*\s+(?=[\"“‘(\[]?[A-Z0-9À-Þ])")
ABBREVIATION = re.compile(r"\b(?:[A-Za-z]|e\.g|i\.e|vs|cf|approx|Dr|Mr|Mrs|Ms|Prof|Fig|St|ca)\.$")
NOUN_ENDINGS = ("tion", "sion", "ment", "ness", "ity", "ism", "sis", "ance", "ence", "ure", "age", "ery", "logy")
OTHER_ENDINGS = ("ly", "ous", "ful", "less", "able", "ible", "ive", "ish")


@dataclass(frozen=True, slots=True)
class Term:
    stems: tuple[str, ...]
    name: str  # as the text writes it most often
    score: float
    count: int


def split_sentences(paragraph: str) -> list[str]:
    result: list[str] = []
    for piece in SENTENCE_END.split(" ".join(paragraph.split())):
        if result and ABBREVIATION.search(result[-1]):
            result[-1] += " " + piece
        else:
            result.append(piece)
    return result


def sentences(text: str) -> list[str]:
    """Whole sentences; headings and captions are left out because nothing can be quoted from them."""
    result: list[str] = []
    for paragraph in text.split("\n"):
        for sentence in split_sentences(paragraph):
            for start in range(0, len(sentence), MAX_SENTENCE):
                piece = sentence[start : start + MAX_SENTENCE].strip()
                if piece.endswith((".", "!", "?", ";", ":", "”", '"', ")")) or len(WORD.findall(piece)) >= 8:
                    result.append(piece)
    return result


def chunks(items: Sequence[str], *, size: int, at_most: int) -> list[list[str]]:
    """Neighbouring sentences in blocks of about `size` characters, never more than `at_most` blocks."""
    total = sum(len(item) for item in items)
    size = max(size, math.ceil(total / at_most))
    blocks: list[list[str]] = []
    filled = size
    for item in items:
        if filled >= size and len(blocks) < at_most:
            blocks.append([])
            filled = 0
        blocks[-1].append(item)
        filled += len(item)
    return blocks


@dataclass(slots=True)
class Vocabulary:
    """The terms of one text. Build it with `await Vocabulary.of(sentences)`."""

    terms: list[Term]
    _by_stems: dict[tuple[str, ...], Term] = field(default_factory=dict)

    @classmethod
    async def of(cls, items: Sequence[str], *, at_most: int) -> Vocabulary:
        evidence = _Evidence()
        for start in range(0, len(items), SLICE):
            for sentence in items[start : start + SLICE]:
                evidence.note(sentence)
            await asyncio.sleep(0)
        counts, surfaces = Counter[tuple[str, ...]](), defaultdict[tuple[str, ...], Counter[str]](Counter)
        for start in range(0, len(items), SLICE):
            for sentence in items[start : start + SLICE]:
                for stems, surface in evidence.candidates(sentence):
                    counts[stems] += 1
                    surfaces[stems][surface] += 1
            await asyncio.sleep(0)
        terms = _ranked(counts, surfaces, evidence)[:at_most]
        return cls(terms, {term.stems: term for term in terms})

    def named(self, name: str) -> Term | None:
        return self._by_stems.get(tuple(stem(word) for word in WORD.findall(name)))

    def spans(self, sentence: str) -> list[tuple[Term, int, int]]:
        """Where terms are in a sentence, longest first at each place, none inside another."""
        words = list(WORD.finditer(sentence))
        stems = [stem(word.group()) for word in words]
        result: list[tuple[Term, int, int]] = []
        index = 0
        while index < len(words):
            for length in (3, 2, 1):
                term = self._by_stems.get(tuple(stems[index : index + length]))
                if term and len(term.stems) == length:
                    result.append((term, words[index].start(), words[index + length - 1].end()))
                    index += length
                    break
            else:
                index += 1
        return result


def stem(word: str) -> str:
    """Singular, lower case: enough to see that "plates" and "Plate" are one thing."""
    word = word.lower().replace("’", "'").removesuffix("'s")
    if len(word) > 4 and word.endswith("ies"):
        return word[:-3] + "y"
    if len(word) > 4 and word.endswith(("sses", "shes", "ches", "xes", "zes")):
        return word[:-2]
    if len(word) > 3 and word.endswith("s") and not word.endswith(("ss", "us", "is", "ous")):
        return word[:-1]
    return word


class _Evidence:
    """How this text uses each word: like a noun (after "the", "of") or like a verb (after "can", "to")."""

    def __init__(self) -> None:
        self.noun: Counter[str] = Counter()
        self.verb: Counter[str] = Counter()

    def note(self, sentence: str) -> None:
        words = [match.group() for match in WORD.finditer(sentence)]
        for before, word in pairwise(words):
            previous = before.lower()
            if previous in PRONOUNS and previous not in DETERMINERS:
                self.verb[_verb_stem(word)] += 1
            elif previous in DETERMINERS:
                self.noun[stem(word)] += 1

    def is_noun(self, word: str) -> bool:
        lower, singular = word.lower(), stem(word)
        if len(singular) < 3 or lower in COMMON or singular in COMMON or lower.endswith(OTHER_ENDINGS):
            return False
        base = _verb_stem(lower)
        as_noun, as_verb = self.noun[singular], max(self.verb[base], self.verb[lower])
        if base in VERBS or lower in VERBS or f"{base}e" in VERBS:
            # "the flow of heat" and "rivers flow": a word of both kinds needs the text to speak for the noun.
            return as_noun >= 2 and as_noun > as_verb and not lower.endswith(("ed", "ing"))
        if lower.endswith("ed") and len(lower) > 4:
            return False
        if lower.endswith("ing") and not lower.endswith(NOUN_ENDINGS):
            return as_noun >= 2 and as_noun > as_verb
        return as_noun >= as_verb

    def candidates(self, sentence: str) -> list[tuple[tuple[str, ...], str]]:
        result: list[tuple[tuple[str, ...], str]] = []
        for run in self._runs(sentence):
            for length in (1, 2, 3):
                for start in range(len(run) - length + 1):
                    words = run[start : start + length]
                    result.append((tuple(stem(word) for word in words), " ".join(words)))
        return result

    def _runs(self, sentence: str) -> list[list[str]]:
        runs: list[list[str]] = [[]]
        end = 0
        for index, match in enumerate(WORD.finditer(sentence)):
            word = match.group()
            if sentence[end : match.start()].strip(" ") or not self.is_noun(word):
                runs.append([])
            if self.is_noun(word):
                # The capital of a sentence's first word says nothing; "Pangaea" elsewhere says it is a name.
                plain = word[0].lower() + word[1:] if index == 0 and word[1:].islower() else word
                runs[-1].append(plain)
            end = match.end()
        return [run for run in runs if run]


def _verb_stem(word: str) -> str:
    word = word.lower()
    for ending in ("ing", "ies", "ed", "es", "s"):
        if word.endswith(ending) and len(word) - len(ending) >= 3:
            base = word[: -len(ending)]
            if ending == "ies":
                return base + "y"
            if ending in ("ing", "ed") and len(base) > 3 and base[-1] == base[-2] and base[-1] not in "lsz":
                base = base[:-1]  # stopped -> stop
            if ending in ("es", "ed", "ing") and base not in VERBS and f"{base}e" in VERBS:
                return f"{base}e"
            return base
    return word


def _ranked(
    counts: Counter[tuple[str, ...]], surfaces: dict[tuple[str, ...], Counter[str]], evidence: _Evidence
) -> list[Term]:
    kept = {stems: count for stems, count in counts.items() if count >= 2 and len(set(stems)) == len(stems)}
    inside: dict[tuple[str, ...], list[int]] = defaultdict(list)
    for stems, count in kept.items():
        for length in range(1, len(stems)):
            for start in range(len(stems) - length + 1):
                inside[stems[start : start + length]].append(count)
    terms: list[Term] = []
    for stems, count in kept.items():
        alone = count - (sum(inside[stems]) / len(inside[stems]) if inside[stems] else 0)
        noun = evidence.noun[stems[-1]] + (1 if stems[-1].endswith(NOUN_ENDINGS) else 0)
        score = math.log2(len(stems) + 1) * alone * (0.8 + 0.4 * min(1.0, noun / count))
        if alone > 0 and score > 0:
            terms.append(Term(stems, _display(surfaces[stems]), round(score, 6), count))
    return sorted(terms, key=lambda term: (-term.score, term.stems))


def _display(surfaces: Counter[str]) -> str:
    return min(surfaces.items(), key=lambda item: (-item[1], item[0]))[0]
