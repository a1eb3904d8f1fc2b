"""READ: selected tensors to a device, many in one read and one copy.

Neighbouring tensors share a span of device memory. A span is filled in pieces: a piece
is read into a pinned buffer by one thread and copied as a whole, while the next pieces
are read. Tensors are views of their span where that does not hold much else alive.
"""

from __future__ import annotations

import collections
import concurrent.futures
import contextlib
import dataclasses
import logging
import os
from collections.abc import Callable, Iterable, Iterator

import torch

from .header import FileHeader, LoadPlanError
from .plan import PlannedTensor
from .read import OpenFile, bytes_of, reader_pool, reader_threads

logger = logging.getLogger(__name__)

# Pinned memory is pieces in flight times their size: 128 MiB.
PIECE_BYTES = 8 << 20
PIECES_IN_FLIGHT = 16
_SPAN_BYTES = 32 << 20

# Reading a small gap costs less than a second read, up to a share of what is wanted.
_MAX_GAP = 4 << 10
_MAX_WASTE = 0.01

# A view smaller than this share of its span would keep too much alive.
_LEAST_SHARE = 8

# Pieces hold their files open: with 16 in flight that is 512 of the usual 1,024.
_FILES_PER_SPAN = 32

# Where a read starts in its span; CUDA's allocator aligns to no more.
_ALIGNMENT = 512


@dataclasses.dataclass(frozen=True, slots=True)
class Extent:
    """``nbytes`` of a file at ``offset``, which go to ``begin`` in the span."""

    file: FileHeader
    offset: int
    begin: int
    nbytes: int

    @property
    def end(self) -> int:
        return self.begin + self.nbytes


@dataclasses.dataclass(slots=True)
class Span:
    """Device memory for tensors that are read together; sizes in bytes."""

    nbytes: int = 0
    reads: list[Extent] = dataclasses.field(default_factory=list)
    tensors: list[tuple[PlannedTensor, int]] = dataclasses.field(default_factory=list)


def make_spans(entries: Iterable[PlannedTensor]) -> list[Span]:
    """Group tensors, given in file and byte order, into spans with the fewest reads."""
    spans, span = [], Span()
    wanted = wasted = files = 0
    for entry in entries:
        tensor, path = entry.tensor, entry.file.path
        full = span.tensors and span.nbytes + tensor.nbytes > _SPAN_BYTES
        if full or files > _FILES_PER_SPAN:
            spans.append(span)
            span, files = Span(), 0
        if not span.reads or span.reads[-1].file.path != path:
            files += 1
        wanted += tensor.nbytes
        last = span.reads[-1] if span.reads else None
        gap = -1
        if last is not None and last.file.path == path:
            gap = tensor.begin - (last.offset + last.nbytes)
        if not tensor.nbytes:
            begin = span.nbytes
        elif gap == 0 or (0 < gap <= _MAX_GAP and wasted + gap <= _MAX_WASTE * wanted):
            wasted += gap
            begin = span.nbytes + gap
            longer = last.nbytes + gap + tensor.nbytes
            span.reads[-1] = dataclasses.replace(last, nbytes=longer)
        else:
            begin = -(-span.nbytes // _ALIGNMENT) * _ALIGNMENT
            span.reads.append(Extent(entry.file, tensor.begin, begin, tensor.nbytes))
        span.tensors.append((entry, begin))
        span.nbytes = begin + tensor.nbytes
    return [*spans, span] if span.tensors else spans


def device_buffer(nbytes: int, device: torch.device) -> torch.Tensor:
    """Uninitialised bytes on ``device``: all memory that READ takes there."""
    return torch.empty(nbytes, dtype=torch.uint8, device=device)


FilledSpans = Iterator[tuple[Span, torch.Tensor]]


@dataclasses.dataclass(frozen=True, slots=True)
class Piece:
    """The bytes from ``start`` to ``stop`` of a span: what one thread reads at once."""

    span: Span
    start: int
    stop: int
    reads: tuple[Extent, ...]


def make_pieces(spans: Iterable[Span]) -> Iterator[Piece]:
    """Cut spans into pieces, in their order."""
    for span in spans:
        remaining = collections.deque(span.reads)
        # A span of zero-byte tensors has one piece, which reads nothing.
        for start in range(0, max(span.nbytes, 1), PIECE_BYTES):
            stop = min(start + PIECE_BYTES, span.nbytes)
            reads = []
            while remaining and remaining[0].begin < stop:
                read = remaining.popleft()
                head = min(read.end, stop) - read.begin
                reads.append(dataclasses.replace(read, nbytes=head))
                if read.end > stop:
                    rest = Extent(
                        read.file, read.offset + head, stop, read.nbytes - head
                    )
                    remaining.appendleft(rest)
            yield Piece(span, start, stop, tuple(reads))


def fill_spans(spans: list[Span], device: torch.device, threads: int) -> FilledSpans:
    """Yield each span with its memory, filled and safe on the current stream."""
    copier = Copier(device)
    memory = None
    with contextlib.closing(read_ahead(make_pieces(spans), copier, threads)) as ready:
        for piece, buffer in ready:
            if piece.start == 0:
                memory = copier.allocate(piece.span.nbytes)
            copier.copy(buffer, memory, piece.start, piece.stop)
            if piece.stop == piece.span.nbytes:
                copier.hand_over(memory)
                yield piece.span, memory
                memory = None


def read_ahead(
    pieces: Iterator[Piece], copier: Copier, threads: int | None
) -> Iterator[tuple[Piece, torch.Tensor]]:
    """Yield each piece with the buffer that holds it, while the next are being read.

    The buffer goes back by ``copier.copy``, before the next piece is asked for.
    """
    in_flight: collections.deque = collections.deque()
    pool = reader_pool(threads or reader_threads())
    file = None

    def submit() -> bool:
        nonlocal file
        piece = next(pieces, None)
        if piece is None:
            return False
        files = []
        for read in piece.reads:
            if file is None or file.path != read.file.path:
                file = OpenFile(read.file, threads)
            files.append(file)
        buffer = copier.take_buffer()
        future = pool.submit(_read_piece, piece, files, bytes_of(buffer))
        in_flight.append((piece, buffer, future))
        return True

    try:
        while len(in_flight) < PIECES_IN_FLIGHT and submit():
            pass
        while in_flight:
            piece, buffer, future = in_flight.popleft()
            future.result()
            yield piece, buffer
            submit()
    finally:
        # The buffers go with this frame: nothing may write into them any more.
        running = [future for _, _, future in in_flight if not future.cancel()]
        concurrent.futures.wait(running)


def _read_piece(piece: Piece, files: list[OpenFile], buffer: memoryview) -> None:
    for file, read in zip(files, piece.reads, strict=True):
        begin = read.begin - piece.start
        file.read_into(buffer[begin : begin + read.nbytes], read.offset)


def stream_reader() -> str:
    """Who reads whole files: "instanttensor", or "read", by LOADPLAN_STREAM_READER.

    Raises:
        LoadPlanError: the variable names no reader.
    """
    reader = os.environ.get("LOADPLAN_STREAM_READER", "instanttensor")
    if reader not in ("instanttensor", "read"):
        raise LoadPlanError(
            f"LOADPLAN_STREAM_READER is {reader!r}, expected 'instanttensor' or 'read'"
        )
    return reader


def all_read(files: Iterable[FileHeader]) -> dict[str, str]:
    """READ for every file, as its obstacle by path."""
    return {file.path: "LOADPLAN_STREAM_READER=read" for file in files}


class Copier:
    """Pinned buffers and a stream of their own on CUDA, plain copies elsewhere.

    Memory is allocated on the stream that fills it: on the consumer's, kernels that
    still read what was there before would be overtaken.
    """

    def __init__(self, device: torch.device):
        self._device = device
        self._free: list[torch.Tensor] = []
        self._copying: collections.deque = collections.deque()
        self._made = 0
        probe = device_buffer(0, device)
        self._stream = torch.cuda.Stream(device) if probe.is_cuda else None
        self._pinned = self._stream is not None

    def another_stream(self) -> contextlib.AbstractContextManager:
        """A stream that waits for nothing of this one."""
        if self._stream is None:
            return contextlib.nullcontext()
        return torch.cuda.stream(torch.cuda.Stream(self._device))

    def on_stream(self) -> contextlib.AbstractContextManager:
        if self._stream is None:
            return contextlib.nullcontext()
        return torch.cuda.stream(self._stream)

    def take_buffer(self) -> torch.Tensor:
        """A host buffer that nothing reads any more."""
        if not self._free and self._made < PIECES_IN_FLIGHT:
            self._made += 1
            return self._make_buffer()
        if not self._free:
            event, buffer = self._copying.popleft()
            event.synchronize()
            self._free.append(buffer)
        return self._free.pop()

    def _make_buffer(self) -> torch.Tensor:
        options = {"dtype": torch.uint8, "device": "cpu"}
        if self._pinned:
            try:
                return torch.empty(PIECE_BYTES, pin_memory=True, **options)
            except RuntimeError as error:  # A limit of locked memory.
                logger.warning(
                    "Copies will be slower, without pinned memory: %s", error
                )
                self._pinned = False
        return torch.empty(PIECE_BYTES, **options)

    def allocate(self, nbytes: int) -> torch.Tensor:
        with self.on_stream():
            return device_buffer(nbytes, self._device)

    def copy(
        self, buffer: torch.Tensor, memory: torch.Tensor, start: int, stop: int
    ) -> None:
        """Copy a piece; the buffer comes back when the copy is done."""
        with self.on_stream():
            memory[start:stop].copy_(buffer[: stop - start], non_blocking=True)
        if self._stream is None:
            self._free.append(buffer)
            return
        event = torch.cuda.Event()
        event.record(self._stream)
        self._copying.append((event, buffer))

    def hand_over(self, memory: torch.Tensor) -> None:
        """Let the consumer's current stream use ``memory`` when it is filled."""
        if self._stream is not None:
            torch.cuda.current_stream(self._device).wait_stream(self._stream)
        self.lend(memory)

    def lend(self, memory: torch.Tensor) -> None:
        """Keep ``memory``, which is filled, until the consumer's stream is done."""
        if self._stream is not None:
            memory.record_stream(torch.cuda.current_stream(self._device))


def read_tensors(
    entries: Iterable[PlannedTensor],
    device: torch.device,
    fill: Callable[[list[Span], torch.device, int | None], FilledSpans] = fill_spans,
    *,
    threads: int | None = None,
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield each tensor on ``device``, bit for bit what official safetensors loads.

    ``fill`` is a generator function that fills the spans. The tensors are the
    consumer's and ready on its current stream.
    """
    spans = make_spans(entries)
    with contextlib.closing(fill(spans, device, threads)) as filled:
        for span, memory in filled:
            for entry, begin in span.tensors:
                tensor = entry.tensor
                raw = memory[begin : begin + tensor.nbytes]
                misplaced = begin * 8 % max(tensor.element_bits, 8)
                if misplaced or tensor.nbytes * _LEAST_SHARE < memory.nbytes:
                    raw = device_buffer(tensor.nbytes, device).copy_(raw)
                yield tensor.name, raw.view(tensor.torch_dtype).view(tensor.torch_shape)
