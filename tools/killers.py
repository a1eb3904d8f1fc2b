"""Write test/proof/killers.json from the lines that a run of the proof wrote.

python tools/killers.py LINES
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

OUTPUT = Path(__file__).resolve().parents[1] / "test" / "proof" / "killers.json"


def main() -> None:
    found: dict[str, str] = {}
    for line in Path(sys.argv[1]).read_text().splitlines():
        found |= json.loads(line)
    OUTPUT.write_text(json.dumps(found, indent=2, sort_keys=True) + "\n")
    print(f"{OUTPUT.name}: {len(found)} hunks")


if __name__ == "__main__":
    main()
