"""The house: a file imports only from floors below its own, or from earlier rooms of its floor."""

import ast
import pathlib

ROOT = pathlib.Path(__file__).parents[1]
# Lowest first. A room may import those above it in this list.
ROOMS = (
    "errors environment config hardware",  # floor 0
    "paths precision mesh processes",  # 1
    "sharding kernels",  # 2
    "models data layerwise optimizer",  # 3
    "train checkpoint",  # 5
    "observe plan",  # 6
    "interop setup generate begin closing scoring evaluation convert",  # 7
    "running debug rollback trainer interface",
    "options usage cli",  # 8
)
ORDER = [room for floor in ROOMS for room in floor.split()]


def imported_rooms(path: pathlib.Path) -> set[str]:
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module:
            if node.module == "jaxtpu":
                names |= {alias.name for alias in node.names}
            elif node.module.startswith("jaxtpu."):
                names.add(node.module.split(".")[1])
    return names


def test_every_file_imports_downwards():
    files = sorted((ROOT / "jaxtpu").rglob("*.py"))
    rooms = {p: p.relative_to(ROOT / "jaxtpu").parts[0].removesuffix(".py") for p in files}
    checked = 0
    for path, room in rooms.items():
        if room == "__init__":
            continue
        assert room in ORDER, f"{room} has no floor"
        for other in imported_rooms(path) - {room}:
            assert ORDER.index(other) < ORDER.index(room), f"{path} imports {other}"
            checked += 1
    assert checked > 50
