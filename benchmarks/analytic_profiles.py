"""Writes the profiles that are worked out from data sheets, or from published formulas.

python benchmarks/analytic_profiles.py [FOLDER]      (default: profiles)
"""

from __future__ import annotations

import sys
from pathlib import Path

from step_time_formulas import analytic_profiles, published_profiles


def main() -> None:
    folder = Path(sys.argv[1] if len(sys.argv) > 1 else "profiles")
    for profile in (*analytic_profiles(), *published_profiles()):
        print(profile.save(folder))


if __name__ == "__main__":
    main()
