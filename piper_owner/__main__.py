"""`python -m piper_owner` is the command `piper-owner`."""

from __future__ import annotations

import sys

from piper_owner.cli import main

if __name__ == "__main__":
    sys.exit(main())
