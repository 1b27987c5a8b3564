"""What a provider returns. Frozen and validated, so a handler never stores a model's bad day."""

from typing import Annotated, Self

from pydantic import BaseModel, ConfigDict, Field, StringConstraints, model_validator

Name = Annotated[str, StringConstraints(strip_whitespace=True, min_length=1, max_length=80)]
Prose = Annotated[str, StringConstraints(strip_whitespace=True, min_length=1, max_length=2000)]


class Checked(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Concept(Checked):
    """A thing the text is about; `sentence` is where the text says most about it."""

    name: Name
    weight: Annotated[float, Field(ge=0, le=1)]
    sentence: str = ""


class Link(Checked):
    """`source` and `target` are names of concepts; `label` reads between them: plates "float on" mantle."""

    source: Name
    target: Name
    label: Annotated[str, StringConstraints(strip_whitespace=True, max_length=80)] = ""
    weight: Annotated[float, Field(ge=0, le=1)] = 0.5


class ConceptGraph(Checked):
    """`coverage` is the share of the text that was read; below 1 the document was longer than the limit."""

    concepts: Annotated[tuple[Concept, ...], Field(min_length=2)]
    links: Annotated[tuple[Link, ...], Field(min_length=1)]
    coverage: Annotated[float, Field(gt=0, le=1)] = 1.0

    @model_validator(mode="after")
    def _links_join_two_known_concepts(self) -> Self:
        names = {concept.name for concept in self.concepts}
        if len(names) != len(self.concepts):
            raise ValueError("two concepts have the same name")
        for link in self.links:
            if link.source not in names or link.target not in names or link.source == link.target:
                raise ValueError("a link must join two different concepts of the graph")
        return self


class Question(Checked):
    """Multiple choice; `source` is the sentence of the text that holds the answer."""

    prompt: Prose
    choices: Annotated[tuple[Name, ...], Field(min_length=3, max_length=5)]
    answer: Name
    source: str = ""

    @model_validator(mode="after")
    def _one_choice_is_the_answer(self) -> Self:
        if len({choice.casefold() for choice in self.choices}) != len(self.choices):
            raise ValueError("two choices are the same")
        if self.answer not in self.choices:
            raise ValueError("the answer is not among the choices")
        return self


class Quiz(Checked):
    questions: Annotated[tuple[Question, ...], Field(min_length=1)]


class Explanation(Checked):
    """Why two concepts belong together; every quote is a sentence of the text."""

    source: Name
    target: Name
    text: Prose
    quotes: tuple[str, ...] = ()
