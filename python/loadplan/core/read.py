"""Positioned reads of payload: rows into host memory, tensors to a device."""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterable, Iterator

import torch

from .header import LoadPlanError, TensorHeader
from .plan import PlannedTensor

# Linux; Python's mmap names it since 3.13.
_MAP_NORESERVE = 0x4000


class ShortFileError(LoadPlanError, EOFError):
    """A file ended before the bytes that its header promises."""


class OpenFile:
    """A file descriptor shared by a file's readers, closed with the last of them."""

    def __init__(self, path: str):
        self.path = path
        self._fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)

    def __del__(self) -> None:
        # Weight loaders may outlive the iterator that opened the file, so that the
        # last reference closes it, not a scope.
        fd, self._fd = getattr(self, "_fd", -1), -1
        if fd >= 0:
            os.close(fd)

    def read_into(self, buffer: memoryview, offset: int) -> None:
        """Fill ``buffer`` (bytes) from ``offset`` on; complete when it returns.

        Raises:
            ShortFileError: the file ends first.
        """
        done = 0
        # One call returns at most 2 GiB - 4 KiB, and less when it likes.
        while done < len(buffer):
            count = os.preadv(self._fd, [buffer[done:]], offset + done)
            if count == 0:
                raise ShortFileError(
                    f"{self.path}: ends at byte {offset + done}, expected "
                    f"{len(buffer) - done} B more; was the file replaced while loading?"
                )
            done += count

    def map(self) -> mmap.mmap:
        """Map the whole file; writes go to the caller's own copy of the page."""
        # Private and writable counts against the memory that may be promised, unless
        # nothing is reserved for it.
        flags = mmap.MAP_PRIVATE | getattr(mmap, "MAP_NORESERVE", _MAP_NORESERVE)
        return mmap.mmap(self._fd, 0, flags=flags)


class SafetensorsRowSource:
    """Reads rows of one tensor of a file straight into memory of the caller.

    A row is everything behind the first dimension. The source keeps the file open and
    may be used from any thread, also after the load that made it has ended.
    """

    def __init__(self, file: OpenFile, tensor: TensorHeader):
        self._file = file
        self._tensor = tensor
        self.dtype = tensor.torch_dtype
        self.shape = tensor.torch_shape

    def read_rows_into(self, dst: torch.Tensor, row_start: int) -> None:
        """Fill ``dst`` with the rows ``row_start`` to ``row_start + len(dst)``.

        Args:
            dst: Contiguous CPU tensor ``(rows, *tail)`` of the source's dtype, owned by
                the caller.
            row_start: First row of the source.

        Raises:
            LoadPlanError: ``dst`` has another dtype, tail or layout, or asks for rows
                that the tensor does not have.
            ShortFileError: the file ends before the last row.
        """
        rows, tail = self.shape[0], self.shape[1:]
        if (
            dst.device.type != "cpu"
            or not dst.is_contiguous()
            or dst.dtype != self.dtype
            or dst.ndim == 0
            or tuple(dst.shape[1:]) != tail
        ):
            raise LoadPlanError(
                f"{self._file.path}: rows of {self._tensor.name!r} cannot be read into "
                f"a {tuple(dst.shape)} {dst.dtype} tensor on {dst.device} with strides "
                f"{dst.stride()}, expected a contiguous CPU tensor (rows, *{tail}) of "
                f"{self.dtype}"
            )
        if row_start < 0 or row_start + dst.shape[0] > rows:
            raise LoadPlanError(
                f"{self._file.path}: tensor {self._tensor.name!r} has {rows} rows, "
                f"asked for rows {row_start} to {row_start + dst.shape[0]}"
            )
        row_bytes = self._tensor.nbytes // rows if rows else 0
        self._file.read_into(bytes_of(dst), self._tensor.begin + row_start * row_bytes)


def bytes_of(tensor: torch.Tensor) -> memoryview:
    """The memory of a contiguous CPU tensor as writable bytes."""
    return memoryview(tensor.reshape(-1).view(torch.uint8).numpy())


def to_device(host: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Copy bytes (uint8, one dimension) to ``device``: READ's only way there."""
    return host.to(device)


def read_tensors(
    entries: Iterable[PlannedTensor], device: torch.device
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield each tensor on ``device``, bit for bit what official safetensors loads."""
    file = None
    for entry in entries:
        tensor = entry.tensor
        if file is None or file.path != entry.file.path:
            file = OpenFile(entry.file.path)
        host = torch.empty(tensor.nbytes, dtype=torch.uint8)
        file.read_into(bytes_of(host), tensor.begin)
        yield (
            tensor.name,
            to_device(host, device).view(tensor.torch_dtype).view(tensor.torch_shape),
        )


def host_tensors(
    entries: Iterable[PlannedTensor],
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield each tensor as a CPU tensor over the file; no payload is read.

    The tensor is the consumer's to write, the file never changes. One that has rows
    carries its ``SafetensorsRowSource`` as ``row_source``, so that a weight loader can
    read just the rows it owns.
    """
    file = mapped = None
    for entry in entries:
        header = entry.tensor
        if file is None or file.path != entry.file.path:
            file = OpenFile(entry.file.path)
            mapped = file.map()
        raw = torch.empty(0, dtype=torch.uint8)
        if header.nbytes:
            raw = torch.frombuffer(
                mapped, dtype=torch.uint8, count=header.nbytes, offset=header.begin
            )
        tensor = raw.view(header.torch_dtype).view(header.torch_shape)
        if tensor.ndim > 0:
            tensor.row_source = SafetensorsRowSource(file, header)
        yield header.name, tensor
