"""Our docs pages in the form of an engine's documentation, MDX."""

from __future__ import annotations

import re

from loadplan.errors import EngineError

_CODE = "    "


def to_mdx(text: str, *, label: str) -> str:
    """Turn a page into MDX: a title in front, fenced code, nothing that reads as JSX.

    Raises:
        EngineError: the page has no title, or text that MDX would take for code.
    """
    title, _, body = text.partition("\n")
    if not title.startswith("# "):
        raise EngineError(f"{label}: starts with {title!r}, expected a title, '# ...'")
    lines: list[str] = []
    code: list[str] = []
    for line in [*body.strip().splitlines(), ""]:
        if line.startswith(_CODE) and (code or not lines or not lines[-1]):
            code.append(line.removeprefix(_CODE))
            continue
        if code and not line:
            # The blank line may belong to the code or end it.
            code.append("")
            continue
        if code:
            lines += [*_fenced(code), ""]
            code = []
        _check_text(line, label=label)
        lines.append(line)
    if code:
        lines += _fenced(code)
    body = "\n".join(lines).strip()
    # A title is plain text, in quotes because it may hold a colon.
    escaped = title.removeprefix("# ").replace("`", "").replace('"', '\\"')
    return f'---\ntitle: "{escaped}"\n---\n\n{body}\n'


def _fenced(code: list[str]) -> list[str]:
    text = "\n".join(code).strip("\n").split("\n")
    language = "python" if text[0].startswith(("@", "def ", "class ")) else "bash"
    return [f"```{language}", *text, "```"]


def _check_text(line: str, *, label: str) -> None:
    bare = re.sub(r"`[^`]*`", "", line)
    for found in re.findall(r"[{<]|\]\((?!https?://)[^)]*\)", bare):
        raise EngineError(
            f"{label}: has {found!r} in {line!r}, expected text that upstream's pages "
            "can hold; put it into code or drop it"
        )
