"""What a source gives: documents, answers to prompts, and records that could not be read."""

import dataclasses


@dataclasses.dataclass(frozen=True)
class Answer:
    """A document of two parts, of which the second is to be learned.

    Attributes:
      prompt, answer: text, as str or in UTF-8.
    """

    prompt: str | bytes
    answer: str | bytes


@dataclasses.dataclass(frozen=True)
class BadRecord:
    """A record that is no document.

    Attributes:
      place: `corpus/a.jsonl, line 7`.
      problem: what is wrong with it, as the end of a sentence.
    """

    place: str
    problem: str

    def __str__(self) -> str:
        return f"{self.place}: {self.problem}"


Record = str | bytes | Answer | BadRecord


@dataclasses.dataclass(frozen=True)
class Counts:
    """What became of the records of a split; `read` is the sum of the others.

    Attributes:
      read: records of the source.
      used: documents with text.
      empty: documents without text.
      bad: records that could not be read.
      first_bad: the first of those; "" where there is none.
    """

    read: int = 0
    used: int = 0
    empty: int = 0
    bad: int = 0
    first_bad: str = ""

    def __str__(self) -> str:
        words = [f"{self.read:,} records read", f"{self.used:,} used"]
        words += [f"{self.empty:,} empty"] if self.empty else []
        words += [f"{self.bad:,} unreadable (the first: {self.first_bad})"] if self.bad else []
        return ", ".join(words)


def record_of(values: tuple, place: str, names: tuple[str, ...]) -> Record:
    """The document of a record's fields: a text, or a prompt and an answer."""
    for name, value in zip(names, values, strict=True):
        if not isinstance(value, (str, bytes)):
            return BadRecord(place, f"{name} is {type(value).__name__}, not text")
    return values[0] if len(values) == 1 else Answer(*values)
