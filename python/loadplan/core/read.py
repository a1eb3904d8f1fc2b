"""Positioned reads of payload, and rows of a tensor straight into host memory."""

from __future__ import annotations

import concurrent.futures
import errno
import functools
import mmap
import os
import resource
from collections.abc import Callable, Iterable, Iterator

import torch

from .header import (
    FileHeader,
    LoadPlanError,
    ShortFileError,
    TensorHeader,
    file_system,
    is_in_memory,
)
from .plan import PlannedTensor

# Linux; Python's mmap names it since 3.13.
_MAP_NORESERVE = 0x4000

# Measured on tmpfs with 16 cores: 16 threads that read 16 MiB at a time fill a table
# 1.5 times as fast as 8 threads with 64 MiB; more threads gain nothing.
_CHUNK_BYTES = 16 << 20
_MAX_THREADS = 16
_FEWEST_THREADS = 4

# On a disk of 2 GB/s such reads were 10 % slower than the best way that was measured:
# many short ones break the kernel's readahead.
_DISK_CHUNK_BYTES = 64 << 20


# statfs(2) f_type of file systems whose files another machine may cut short, or that
# fail where they are mapped: NFS, SMB, SMB2, CIFS, AFS, Coda, Ceph, Lustre, GPFS,
# BeeGFS, 9p and FUSE.
_REMOTE_FILE_SYSTEMS = frozenset(
    (
        0x6969,
        0x517B,
        0xFE534D42,
        0xFF534D42,
        0x5346414F,
        0x73757245,
        0x00C36400,
        0x0BD00BD0,
        0x47504653,
        0x19830326,
        0x01021997,
        0x65735546,
    )
)

# On these a larger tensor is still mapped: it is a table, of which a weight loader
# reads rows, and a copy of it would take its size twice.
_MOST_COPIED_BYTES = 1 << 30


class OpenFile:
    """A file descriptor shared by a file's readers, closed with the last of them.

    A copy is the same object, so that a descriptor has one owner; one that is pickled
    opens the file again. ``threads`` is how many read it at once, None for as many as
    this process may have alone.
    """

    def __init__(self, header: FileHeader, threads: int | None = None):
        self.path = header.path
        self.threads = threads or reader_threads()
        self._header = header
        try:
            self._fd = os.open(header.path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            raise _told(error, header.path) from error
        header.check_unchanged(os.fstat(self._fd))

    def __del__(self) -> None:
        # Weight loaders may outlive the iterator that opened the file, so that the
        # last reference closes it, not a scope.
        fd, self._fd = getattr(self, "_fd", -1), -1
        if fd >= 0:
            os.close(fd)

    def __copy__(self) -> OpenFile:
        return self

    def __deepcopy__(self, memo: dict) -> OpenFile:
        return self

    def __reduce__(self) -> tuple[type[OpenFile], tuple[FileHeader, int]]:
        return OpenFile, (self._header, self.threads)

    @functools.cached_property
    def in_memory(self) -> bool:
        """Whether the file lies on tmpfs or ramfs."""
        if self._header.in_memory is not None:
            return self._header.in_memory
        # By the descriptor: the name may be gone by now.
        return is_in_memory(f"/proc/self/fd/{self._fd}")

    @functools.cached_property
    def is_remote(self) -> bool:
        """Whether a page of it, once mapped, may be gone when it is touched."""
        return file_system(f"/proc/self/fd/{self._fd}") in _REMOTE_FILE_SYSTEMS

    def read_into(self, buffer: memoryview, offset: int) -> None:
        """Fill ``buffer`` (bytes) from ``offset`` on; complete when it returns.

        Raises:
            ShortFileError: the file ends first.
        """
        done = 0
        # One call returns at most 2 GiB - 4 KiB, and less when it likes.
        while done < len(buffer):
            try:
                count = os.preadv(self._fd, [buffer[done:]], offset + done)
            except OSError as error:
                what = f"{error.strerror} at byte {offset + done}"
                raise OSError(error.errno, what, self.path) from error
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
        try:
            return mmap.mmap(self._fd, 0, flags=flags)
        except OSError as error:
            raise _told(error, self.path) from error

    def drop_cached(self, offset: int, nbytes: int) -> None:
        """Give the page cache of a range back to the system."""
        os.posix_fadvise(self._fd, offset, nbytes, os.POSIX_FADV_DONTNEED)


def _told(error: OSError, path: str) -> Exception:
    """``error`` with the way out, where this process may open no more files."""
    if error.errno != errno.EMFILE:
        return error
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return LoadPlanError(
        f"{path}: cannot be opened, {limit} files are open already, expected room for "
        "one a file with tensors that stay on the host; raise it by 'ulimit -n'"
    )


def reader_threads(node_ranks: int = 1) -> int:
    """How many threads of this rank read, beside ``node_ranks`` - 1 others."""
    cpus = len(os.sched_getaffinity(0))
    if cpus == os.cpu_count():  # A rank that is bound to cores has them for itself.
        cpus //= node_ranks
    return max(_FEWEST_THREADS, min(cpus, _MAX_THREADS))


@functools.cache
def reader_pool(threads: int) -> concurrent.futures.ThreadPoolExecutor:
    """The pool of this process in which ``threads`` read files."""
    return concurrent.futures.ThreadPoolExecutor(threads, "loadplan-read")


# Threads do not survive a fork.
os.register_at_fork(after_in_child=reader_pool.cache_clear)


def settle(futures: Iterable[concurrent.futures.Future[None]]) -> None:
    """Wait until nothing runs any more, then raise the first failure, if any.

    What has not begun when one fails is cancelled: memory that is being filled must
    not be given up before its last writer is done.
    """
    futures = list(futures)
    concurrent.futures.wait(futures, return_when=concurrent.futures.FIRST_EXCEPTION)
    running = [future for future in futures if not future.cancel()]
    concurrent.futures.wait(running)
    for future in running:
        future.result()


def _read_in_pool(file: OpenFile, buffer: memoryview, offset: int) -> None:
    """``OpenFile.read_into``, in chunks by the pool if there is more than one."""
    if len(buffer) <= _CHUNK_BYTES:
        file.read_into(buffer, offset)
        return
    chunk = _CHUNK_BYTES if file.in_memory else _DISK_CHUNK_BYTES
    settle(
        reader_pool(file.threads).submit(
            file.read_into, buffer[at : at + chunk], offset + at
        )
        for at in range(0, len(buffer), chunk)
    )


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
        """Fill ``dst`` with the rows from ``row_start`` on; complete when it returns.

        ``dst`` is a contiguous CPU tensor ``(rows, *tail)`` of the source's dtype, the
        caller's own.

        Raises:
            LoadPlanError: ``dst`` does not fit, or asks for rows that are not there.
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
        offset = self._tensor.begin + row_start * self._row_bytes
        _read_in_pool(self._file, bytes_of(dst), offset)

    def drop_cached(self, row_start: int, rows: int) -> None:
        """Give back the page cache that reading these rows filled."""
        begin = self._tensor.begin + row_start * self._row_bytes
        self._file.drop_cached(begin, rows * self._row_bytes)

    @property
    def _row_bytes(self) -> int:
        return self._tensor.nbytes // self.shape[0] if self.shape[0] else 0


def bytes_of(tensor: torch.Tensor) -> memoryview:
    """The memory of a contiguous CPU tensor as writable bytes."""
    return memoryview(tensor.reshape(-1).view(torch.uint8).numpy())


def host_tensors(
    entries: Iterable[PlannedTensor],
    copied: Callable[[str], bool] = lambda name: False,
    *,
    threads: int | None = None,
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield each tensor as a CPU tensor over the mapped file; no payload is read.

    One whose name is ``copied`` is read into anonymous memory instead, so that its
    consumer touches no mapped page, and so is all but the largest where the file system
    is not of this machine: a mapped page of a file that has become shorter is a SIGBUS.
    Either way the tensor is the consumer's to write,
    the file never changes. One that has rows carries its ``SafetensorsRowSource`` as
    ``row_source``, so that a weight loader can read just the rows it owns.

    Raises:
        ShortFileError: a file ends before the last byte of a copied tensor.
    """
    file = mapped = None
    for entry in entries:
        header = entry.tensor
        if file is None or file.path != entry.file.path:
            file, mapped = OpenFile(entry.file, threads), None
        small = header.nbytes <= _MOST_COPIED_BYTES
        if not header.nbytes or copied(header.name) or (small and file.is_remote):
            raw = torch.empty(header.nbytes, dtype=torch.uint8, device="cpu")
            _read_in_pool(file, bytes_of(raw), header.begin)
        else:
            if mapped is None:
                mapped = file.map()
            raw = torch.frombuffer(
                mapped, dtype=torch.uint8, count=header.nbytes, offset=header.begin
            )
        tensor = raw.view(header.torch_dtype).view(header.torch_shape)
        if tensor.ndim > 0:
            tensor.row_source = SafetensorsRowSource(file, header)
        yield header.name, tensor
