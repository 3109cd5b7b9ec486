import pathlib

import pytest

from jaxtpu import cli
from tests.config import ROOT


@pytest.fixture(autouse=True)
def at_root(monkeypatch):
    monkeypatch.chdir(ROOT)


@pytest.fixture
def refused(tmp_path, capsys):
    """Runs a command line that must be refused; returns the one line that it says."""

    def run(*words: str) -> str:
        before = contents(tmp_path)
        code = cli.main(list(words))
        printed = capsys.readouterr()
        assert code == 2
        assert printed.out == ""
        assert printed.err.count("\n") == 1 and printed.err.endswith("\n")
        assert printed.err.startswith("error: ")
        assert "Traceback" not in printed.err
        assert contents(tmp_path) == before
        return printed.err.removeprefix("error: ").strip()

    return run


def contents(folder: pathlib.Path) -> dict[str, str | None]:
    """Every path below `folder` with its text, None for a folder."""
    return {str(p): p.read_text() if p.is_file() else None for p in folder.rglob("*")}
