"""Sentences and terms of a text, without a model: rules that a reader can follow and that give the same
result every time.

A term is a run of one to three words that comes back and holds no stop word. It counts for what it is on its
own, not inside a longer term: "plate boundary" does not drag "boundary" along.
"""

import asyncio
import hashlib
import math
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence

MAX_SENTENCE = 600
MAX_WORD = 25  # characters; three of them fit into the name of a concept
SLICE = 100  # sentences between two looks at the event loop: about 10 ms of work
WORD = re.compile(r"[^\W\d_]+(?:[-'’][^\W\d_]+)*")
SENTENCE_END = re.compile(r"(?<=[.!?])[\"”’)\]]*\s+(?=[\"“‘(\[]?[A-Z0-9À-Þ])")
ABBREVIATION = re.compile(r"\b(?:[A-Za-z]|e\.g|i\.e|vs|cf|approx|Dr|Mr|Mrs|Ms|Prof|Fig|St|ca)\.$")
NO_NOUN = ("ed", "ing", "ly", "ous", "ful", "less", "able", "ible", "ive", "ish")
# English words that are not concepts. Other languages still work, with more noise among the concepts.
STOP_WORDS = """
a about above absorb across after again ago all almost along also although always among an and another any are around
as at away back be because become been before being below bend beneath between billion both but by came can carry
certain change clear close cold come common cool could day deep dense did different do does down each early end enough
even ever every fall far few first five flow follow for form found four from full get give go good great grow had half
happen hard has have he her here high higher his hold hot how however hundred if in inside into is it its itself just
keep kind know large last late lead leave left less let lie like little live long longer look low lower made main make
many matter may mean meet might million more most move much must name near need never new next no nor not nothing now
number of off often old on once one only onto open or other our out over own part pass people per place point produce
pull push put rather reach reason rest result rich rise rising run same say second see set several shape she short
should show side since single sink size slow small so soft some sometimes spread stand start stay step still stop
strong such take tell than that the their them then there these they thick thin thing this those though thousand three
through thus time to today together too toward turn two type under until up upon use usually very warm was way we well
were what when where whether which while who whole whose why wide will with within without word work would year yet
you your
"""
STOP = frozenset(STOP_WORDS.split())


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


def digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def stem(word: str) -> str:
    """Singular, lower case: enough to see that "plates" and "Plate" are one thing."""
    word = word.casefold().replace("’", "'").removesuffix("'s")
    if len(word) > 4 and word.endswith("ies"):
        return word[:-3] + "y"
    if len(word) > 4 and word.endswith(("sses", "shes", "ches", "xes", "zes")):
        return word[:-2]
    if len(word) > 3 and word.endswith("s") and not word.endswith(("ss", "us", "is")):
        return word[:-1]
    return word


class Vocabulary:
    """Finds names in sentences, singular or plural."""

    def __init__(self, names: Iterable[str]) -> None:
        self._names = {tuple(stem(word) for word in WORD.findall(name)): name for name in names}
        self._longest = max(map(len, self._names), default=0)
        self.names = list(self._names.values())  # no two that differ in number or case alone

    def spans(self, sentence: str) -> list[tuple[str, int, int]]:
        """Where names are in a sentence, longest first at each place, none inside another."""
        words = list(WORD.finditer(sentence))
        stems = [stem(word.group()) for word in words]
        result: list[tuple[str, int, int]] = []
        index = 0
        while index < len(words):
            for end in range(min(index + self._longest, len(words)), index, -1):
                if name := self._names.get(tuple(stems[index:end])):
                    result.append((name, words[index].start(), words[end - 1].end()))
                    index = end
                    break
            else:
                index += 1
        return result


async def terms(items: Sequence[str], *, at_most: int) -> dict[str, int]:
    """The best terms as the text writes them most often, with their scores."""
    written = defaultdict[tuple[str, ...], Counter[str]](Counter)
    for number, sentence in enumerate(items):
        for run in _runs(sentence):
            for words in _parts(run):
                written[tuple(map(stem, words))][" ".join(words)] += 1
        if number % SLICE == 0:
            await asyncio.sleep(0)
    counts = {stems: forms.total() for stems, forms in written.items() if forms.total() >= 2}
    inside = Counter[tuple[str, ...]]()
    for stems, count in counts.items():
        for part in _parts(stems):
            if part != stems:
                inside[part] = max(inside[part], count)
    scores = {stems: len(stems) * (count - inside[stems]) for stems, count in counts.items() if count > inside[stems]}
    best = sorted(scores, key=lambda stems: (-scores[stems], stems))[:at_most]
    return {min(written[stems], key=lambda form: (-written[stems][form], form)): scores[stems] for stems in best}


def _runs(sentence: str) -> Iterator[tuple[str, ...]]:
    """Words that follow each other without a stop word or a comma between them."""
    run: list[str] = []
    end = 0
    for match in WORD.finditer(sentence):
        word = match.group()
        # The capital of a sentence's first word says nothing; "Pangaea" elsewhere says it is a name.
        plain = word.lower() if match.start() == 0 and word.istitle() else word
        usable = 3 <= len(word) <= MAX_WORD and not word.endswith(NO_NOUN) and not {word.lower(), stem(word)} & STOP
        if run and (not usable or sentence[end : match.start()] != " "):
            yield tuple(run)
            run = []
        if usable:
            run.append(plain)
        end = match.end()
    if run:
        yield tuple(run)


def _parts(run: tuple[str, ...]) -> Iterator[tuple[str, ...]]:
    return (run[start : start + length] for length in (1, 2, 3) for start in range(len(run) - length + 1))
