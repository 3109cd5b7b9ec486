#!/usr/bin/env python3
"""Entry point: `python run.py --config=configs/quickstart.py`; see `python run.py help`."""

import sys

from jaxtpu.cli import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
