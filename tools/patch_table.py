"""The table of all patches in docs/patches.md, made from their headers."""

from __future__ import annotations

from pathlib import Path

from loadplan.engines.series import Patch, read_series
from loadplan.engines.targets import load_targets

PAGE = Path(__file__).resolve().parents[1] / "docs" / "patches.md"
BEGIN = "<!-- The table: make patches writes it from the patches' headers. -->\n"
END = "<!-- End of the table. -->\n"


def write() -> None:
    PAGE.write_text(with_table(PAGE.read_text(encoding="utf-8")), encoding="utf-8")


def is_stale() -> bool:
    page = PAGE.read_text(encoding="utf-8")
    return with_table(page) != page


def with_table(page: str) -> str:
    """``page`` with the table as the headers have it now."""
    before, _, rest = page.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n{_table()}\n{END}{after}"


def _table() -> str:
    lines = [
        "| patch | what it does | sent | reason | updated |",
        "|---|---|---|---|---|",
    ]
    for target in load_targets().values():
        for patch in read_series(target.patches):
            lines.append(f"| {' | '.join(_cells(target.name, patch))} |")
    return "\n".join(lines) + "\n"


def _cells(engine: str, patch: Patch) -> list[str]:
    (subject,) = patch.trailers("Subject")
    name = f"[{patch.name.removesuffix('.patch')}](../patches/{engine}/{patch.name})"
    values = [patch.trailers(key)[0] for key in ("Forwarded", "Reason", "Last-Update")]
    return [f"{engine}: {name}", subject.removeprefix("[PATCH] "), *values]
