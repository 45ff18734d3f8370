"""`python -m bros` is `bros`."""

from __future__ import annotations

import sys

from bros.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
