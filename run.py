#!/usr/bin/env python3
"""Entry point: `python run.py --config=configs/quickstart.py`; see `python run.py help`."""

import sys

if __name__ == "__main__":
    try:
        from jaxtpu.cli import main
    except KeyboardInterrupt:
        sys.exit(130)
    sys.exit(main(sys.argv[1:]))
