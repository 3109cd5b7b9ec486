"""The README says what the command line says, and names every room of the house."""

import re

from jaxtpu.usage import USAGE
from tests.test_floors import ORDER, ROOT

README = (ROOT / "README.md").read_text()


def test_the_readme_has_what_help_prints():
    assert f"```\n{USAGE}```" in README


def test_every_room_is_in_the_table():
    table = README.split("| floor | what | where |")[1].split("\n\n")[0]
    named = {name.removesuffix(".py").rstrip("/") for name in re.findall(r"[\w./]+", table)}
    assert not set(ORDER) - named
