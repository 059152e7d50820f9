"""`python -m aiodist`: the command line."""

from __future__ import annotations

import sys

from aiodist._tools.cli import main

if __name__ == "__main__":
    sys.exit(main())
