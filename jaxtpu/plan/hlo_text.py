"""Pieces of HLO text, each read in one linear scan: brackets, quotes, commas, stack frames."""

import dataclasses
import re
from collections.abc import Iterator

QUOTED = r'"[^"\\]*(?:\\.[^"\\]*)*"'
PAIR = re.compile(r"(\w+)=(" + QUOTED + r"|[^\s{}]+)")  # of metadata and frame tables
_TOKEN = re.compile(QUOTED + r"|[{}()\[\],]")
_DEPTH = dict.fromkeys("({[", 1) | dict.fromkeys(")}]", -1)


@dataclasses.dataclass(frozen=True)
class Frame:
    """A place in the source: the `file`, the `line` (from 1) and the `function` it is in."""

    file: str
    line: int
    function: str = ""


def closing(text: str, start: int) -> int:
    """Where the bracket that was opened just before `start` closes; -1 if it does not."""
    depth = 1
    for found in _TOKEN.finditer(text, start):
        depth += _DEPTH.get(found[0], 0)
        if not depth:
            return found.start()
    return -1


def split(text: str) -> Iterator[str]:
    """The parts of `text` between the commas that no bracket and no quote holds."""
    depth = start = 0
    for found in _TOKEN.finditer(text):
        depth += _DEPTH.get(found[0], 0)
        if found[0] == "," and not depth:
            yield text[start : found.start()].strip()
            start = found.end()
    yield text[start:].strip()


def unquoted(text: str) -> str:
    """`text` without the quotes around it and the escapes inside."""
    return re.sub(r"\\(.)", r"\1", text[1:-1]) if text[:1] == '"' else text


def stack_frames(
    FileNames, FunctionNames, FileLocations, StackFrames
) -> dict[int, tuple[Frame, int]]:
    """The tables of the head, joined."""
    fields = lambda text: {key: int(value) for key, value in PAIR.findall(text)}  # noqa: E731
    places = {}
    for key, text in FileLocations.items():
        at = fields(text)
        file = unquoted(FileNames.get(at["file_name_id"], ""))
        function = unquoted(FunctionNames.get(at.get("function_name_id", 0), ""))
        places[key] = Frame(file, at.get("line", 0), function)
    links = {key: fields(text) for key, text in StackFrames.items()}
    # Printed one too high: the first frame names itself as its caller.
    shift = any(at.get("parent_frame_id", 0) >= key for key, at in links.items())
    return {
        key: (places[at["file_location_id"]], at.get("parent_frame_id", 0) - shift)
        for key, at in links.items()
    }
