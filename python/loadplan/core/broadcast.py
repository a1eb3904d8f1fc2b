"""READ by all ranks of a group: each reads its share of the bytes and broadcasts it.

Spans are cut into stripes that the ranks own in turn. Every rank sends and receives all
of them in one order, several ahead of what is yielded. A window of stripes ends with
the word of every rank that all went well, so that one that could not read, or had no
memory, still takes part until all know.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import functools
import itertools
from collections.abc import Iterable, Iterator

import torch
import torch.distributed as dist

from .plan import PlannedTensor
from .ranks import PeerFailure
from .spans import (
    PIECE_BYTES,
    Copier,
    FilledSpans,
    Piece,
    Span,
    fill_spans,
    make_pieces,
    read_ahead,
    read_tensors,
)

# Measured on two GPUs: broadcasts of 32 MiB fill the link, and two windows of 128 MiB
# keep it busy.
_PIECES_PER_STRIPE = 4
_STRIPES_PER_WINDOW = 4
_WINDOWS_IN_FLIGHT = 2
_WINDOW_BYTES = _STRIPES_PER_WINDOW * _PIECES_PER_STRIPE * PIECE_BYTES
SHARED_BYTES = _WINDOWS_IN_FLIGHT * _WINDOW_BYTES

# Memory of spans that are not yielded yet; only a span that is larger may exceed it.
_MOST_BYTES = 512 << 20

# Less than this is read by every rank alone: it costs no more than the exchange.
LEAST_SHARED_BYTES = 512 << 20

_Stripe = tuple[Piece, ...]


def read_shared(
    entries: list[PlannedTensor],
    device: torch.device,
    *,
    group: dist.ProcessGroup | None,
    threads: int | None = None,
) -> Iterator[tuple[str, torch.Tensor]]:
    """``read_tensors``; the ranks of ``group`` read each byte once between them.

    ``group`` is one for tensors on ``device``, None for this rank alone. Where there is
    little, each rank reads it alone all the same.
    """
    fill = fill_spans
    if (
        group is not None
        and dist.get_world_size(group) > 1
        and sum(entry.tensor.nbytes for entry in entries) >= LEAST_SHARED_BYTES
    ):
        fill = functools.partial(fill_together, group=group)
        # Each rank may have been given the files in an order of its own.
        entries = sorted(entries, key=lambda entry: entry.file.path)
    return read_tensors(entries, device, fill, threads=threads)


def fill_together(
    spans: list[Span],
    device: torch.device,
    threads: int | None = None,
    *,
    group: dist.ProcessGroup,
) -> FilledSpans:
    """Yield each span with its memory, filled and safe on the current stream.

    All ranks of ``group``, a group for tensors on ``device``, must call it with the
    same spans and take all of them.

    Raises:
        PeerFailure: another rank could not read, or had no memory for what it gets;
            that one raises what happened.
    """
    stripes = _make_stripes(make_pieces(spans))
    rank, ranks = dist.get_rank(group), dist.get_world_size(group)
    copier = Copier(device)
    own = (piece for stripe in stripes[rank::ranks] for piece in stripe)
    windows: collections.deque[_Window] = collections.deque()
    with contextlib.closing(read_ahead(own, copier, threads)) as ready:
        sender = _Sender(group, copier, ready)
        for new in _make_windows(stripes):
            while windows and not (
                len(windows) < _WINDOWS_IN_FLIGHT
                and _fits([s for window in windows for s in window.stripes], new)
            ):
                yield from sender.finish(windows.popleft())
            windows.append(sender.send(new))
        while windows:
            yield from sender.finish(windows.popleft())


def _make_stripes(pieces: Iterable[Piece]) -> list[_Stripe]:
    """Neighbouring pieces of one span, as many as one rank reads and sends at once."""
    stripes: list[_Stripe] = []
    for piece in pieces:
        if piece.start == 0 or len(stripes[-1]) == _PIECES_PER_STRIPE:
            stripes.append(())
        stripes[-1] += (piece,)
    return stripes


def _make_windows(stripes: Iterable[_Stripe]) -> list[list[_Stripe]]:
    """What is sent at once: fewer stripes where their spans take much memory."""
    windows: list[list[_Stripe]] = []
    for stripe in stripes:
        last = windows[-1] if windows else []
        if not 0 < len(last) < _STRIPES_PER_WINDOW or not _fits(last, [stripe]):
            windows.append([])
        windows[-1].append(stripe)
    return windows


def _fits(held: list[_Stripe], more: list[_Stripe]) -> bool:
    """Whether ``more`` needs no new memory beside ``held``, or none above the bound."""
    return _memory([*held, *more]) <= max(_memory(held), _MOST_BYTES)


def _memory(stripes: Iterable[_Stripe]) -> int:
    """Bytes of the spans that ``stripes`` lie in; a span is allocated whole."""
    return sum({id(s[0].span): s[0].span.nbytes for s in stripes}.values())


@dataclasses.dataclass(frozen=True, slots=True)
class _Window:
    """Broadcasts under way, the spans that they complete, and the word of the ranks."""

    stripes: list[_Stripe]
    works: list[dist.Work]
    spans: list[tuple[Span, torch.Tensor]]
    word: torch.Tensor


class _Sender:
    """One rank's part: what it reads goes out, what others read comes in."""

    def __init__(
        self,
        group: dist.ProcessGroup,
        copier: Copier,
        ready: Iterator[tuple[Piece, torch.Tensor]],
    ):
        self._group = group
        self._rank = dist.get_rank(group)
        self._owners = itertools.cycle(range(dist.get_world_size(group)))
        self._copier = copier
        self._ready = ready
        self._failure: Exception | None = None
        self._memory: torch.Tensor | None = None
        self._listening = copier.another_stream()

    def send(self, stripes: list[_Stripe]) -> _Window:
        """Start the broadcasts of a window."""
        works, spans = [], []
        with self._copier.on_stream():
            for stripe in stripes:
                owner = next(self._owners)
                span, start, stop = stripe[0].span, stripe[0].start, stripe[-1].stop
                if start == 0:
                    self._memory = self._room_for(span)
                if owner == self._rank and self._failure is None:
                    self._read(stripe)
                source = dist.get_global_rank(self._group, owner)
                if self._memory is None:
                    part = self._copier.allocate(stop - start)
                else:
                    part = self._memory[start:stop]
                works.append(
                    dist.broadcast(part, source, group=self._group, async_op=True)
                )
                if stop == span.nbytes:
                    spans.append((span, self._memory))
                    self._memory = None
            word = self._copier.allocate(4).view(torch.int32)
            word.fill_(0 if self._failure is None else self._rank + 1)
            works.append(
                dist.all_reduce(
                    word, dist.ReduceOp.MAX, group=self._group, async_op=True
                )
            )
        return _Window(stripes, works, spans, word)

    def _room_for(self, span: Span) -> torch.Tensor | None:
        """Memory for ``span``; without it this rank takes part stripe by stripe."""
        try:
            return self._copier.allocate(span.nbytes)
        except Exception as error:
            self._failure = self._failure or error
            return None

    def _read(self, stripe: _Stripe) -> None:
        try:
            for piece in stripe:
                _, buffer = next(self._ready)
                self._copier.copy(buffer, self._memory, piece.start, piece.stop)
        except Exception as error:
            self._failure = error

    def finish(self, window: _Window) -> FilledSpans:
        """Yield the spans of a window that every rank has sent whole."""
        with self._listening:
            for work in window.works:
                work.wait()
            # Waits for the word, which comes after all the bytes.
            failed = int(window.word.item())
        if failed:
            raise self._failure or PeerFailure(
                f"rank {failed - 1} of {dist.get_world_size(self._group)} could not "
                "read or hold its share of the checkpoint; its own error says why"
            )
        for span, memory in window.spans:
            self._copier.lend(memory)
            yield span, memory
