"""How much memory a load takes at its peak, looked at every few milliseconds."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable
from pathlib import Path
from types import TracebackType

import torch

_INTERVAL_SECONDS = 0.02


@dataclasses.dataclass(frozen=True, slots=True)
class Peaks:
    """Bytes above what was in use before, at the highest.

    ``host`` is anonymous and shared memory of this process, ``page_cache`` that of the
    whole machine, ``pinned`` torch's pinned buffers, ``device`` all use of the current
    GPU; the last two are None where there is no GPU.
    """

    host: int
    page_cache: int
    pinned: int | None
    device: int | None


class Watch:
    """Looks on in a thread of its own for a ``with`` block; then ``peaks()`` tells.

    ``besides`` tells how many bytes of host memory are held for something else.
    """

    def __init__(self, besides: Callable[[], int] = lambda: 0) -> None:
        self._besides = besides
        self._gpu = torch.cuda.is_available()
        self._before = self._look()
        self._highest = self._before
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> Watch:
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._ended.set()
        self._thread.join()

    def peaks(self) -> Peaks:
        host, cache, pinned, device = (
            high - before
            for high, before in zip(self._highest, self._before, strict=True)
        )
        return Peaks(
            host=host,
            page_cache=cache,
            pinned=pinned if self._gpu else None,
            device=device if self._gpu else None,
        )

    def _watch(self) -> None:
        while True:
            seen = self._look()
            self._highest = tuple(map(max, self._highest, seen))
            if self._ended.wait(_INTERVAL_SECONDS):
                return

    def _look(self) -> tuple[int, ...]:
        process = _kilobytes("/proc/self/status")
        machine = _kilobytes("/proc/meminfo")
        host = process["RssAnon"] + process["RssShmem"]
        # What tmpfs holds is counted as cached too, and is not given back.
        cache = machine["Cached"] - machine["Shmem"]
        pinned = used = 0
        if self._gpu:
            stats = torch.cuda.host_memory_stats()
            pinned = stats.get("allocated_bytes.current", 0)
            free, total = torch.cuda.mem_get_info()
            used = total - free
        return (host << 10) - self._besides(), cache << 10, pinned, used


def _kilobytes(path: str) -> dict[str, int]:
    fields = (line.split() for line in Path(path).read_text().splitlines())
    return {words[0][:-1]: int(words[1]) for words in fields if words[2:] == ["kB"]}
