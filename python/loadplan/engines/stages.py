"""The files that a series adds, as they stand after each of its patches.

What stands here is their last form: glue below ``python/``, core modules beside
LAYERS.toml. A patch that changes glue which an earlier one added has hunks for it; the
forms before come from taking those hunks back.
"""

from __future__ import annotations

from collections.abc import Sequence

from loadplan.engines.series import Patch, apply_hunks, reverse_hunks
from loadplan.engines.targets import Target
from loadplan.errors import EngineError


def own_stages(target: Target, series: Sequence[Patch]) -> list[dict[str, str]]:
    """After each patch of ``series``, the added files: upstream path to text.

    Raises:
        EngineError: a patch changes a file that is not there yet, or hunks do not fit.
    """
    adds = [added_files(target, patch) for patch in series]
    texts = {
        target.upstream(path): content.decode()
        for path, content in target.new_files().items()
    }
    stages: list[dict[str, str]] = []
    for patch, added in reversed(list(zip(series, adds, strict=True))):
        stages.insert(0, dict(texts))
        for path in changed_files(target, patch):
            if path not in texts:
                raise EngineError(
                    f"{patch.name}: changes {path}, which no patch up to it adds; move "
                    "the hunk or the line 'Adds:'"
                )
            hunks = reverse_hunks(patch.hunks[path])
            texts[path] = apply_hunks(texts[path], hunks, label=f"{patch.name}: {path}")
        for path in added:
            texts.pop(path, None)
    return stages


def added_files(target: Target, patch: Patch) -> list[str]:
    """The upstream paths of the glue and the core modules that ``patch`` brings."""
    modules = target.layers.get(patch.title, ())
    if modules and patch.title == next(iter(target.layers)):
        modules = ("__init__", *modules)
    core = [target.upstream(f"{target.core_folder}/{name}.py") for name in modules]
    return [*patch.trailers("Adds"), *core]


def changed_files(target: Target, patch: Patch) -> list[str]:
    """The upstream paths of files that an earlier patch added and this one changes."""
    return [
        path
        for path in patch.hunks
        if path.removeprefix(target.prefix) in target.new_files()
    ]
