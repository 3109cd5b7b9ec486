"""Tests of the configuration and the command line."""

import pathlib

ROOT = pathlib.Path(__file__).parents[2]
TINY = str(ROOT / "tests" / "configs" / "tiny.py")
