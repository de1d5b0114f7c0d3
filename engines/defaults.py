"""Your trainer's defaults: what TRL, verl, slime, OpenRLHF, prime-rl, SkyRL, NeMo-RL and AReaL do
if nothing is set.

defaults.json is their one home: a row for each trainer, and for each setting what it is and the
lines of source that say so. "checked" is "ran" where our tests call that version, and "read" where
its source was only read. `python -m engines.defaults` prints the README's table, and the same
table of the sources.
"""

from __future__ import annotations

import json
from pathlib import Path

ROWS = json.loads((Path(__file__).parent / "defaults.json").read_text("utf-8"))
SETTINGS = [key for key, value in ROWS[0].items() if isinstance(value, dict)]


def table(what: str) -> str:
    """Markdown; what is "is" or "source"."""
    lines = [f"| | {' | '.join(SETTINGS)} |", "|---" * (len(SETTINGS) + 1) + "|"]
    for row in ROWS:
        cells = " | ".join(row[name][what] for name in SETTINGS)
        lines.append(f"| {row['trainer']} {row['version']} ({row['checked']}) | {cells} |")
    return "\n".join(lines)


if __name__ == "__main__":
    print(table("is"), table("source"), sep="\n\n")
