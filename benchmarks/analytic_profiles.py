"""Writes the profiles that are derived from data sheets or published formulas.

python benchmarks/analytic_profiles.py [FOLDER | --quick]      (default: profiles)

--quick writes to a temporary folder.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

from step_time_formulas import analytic_profiles, published_profiles


def main() -> None:
    if sys.argv[1:] == ["--quick"]:
        with tempfile.TemporaryDirectory() as folder:
            save(Path(folder))
    else:
        save(Path(sys.argv[1] if len(sys.argv) > 1 else "profiles"))


def save(folder: Path) -> None:
    for profile in (*analytic_profiles(), *published_profiles()):
        print(profile.save(folder))


if __name__ == "__main__":
    main()
