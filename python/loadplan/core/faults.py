"""What InstantTensor gets wrong or refuses: files that must not be streamed whole.

Facts about release 0.2.2, compared with the library on a GPU: it refuses a foreign
format, dies on some zero-byte tensors and returns the wrong bytes for sub-byte dtypes.
Release 0.1.9 also refuses tensors that are not aligned and the FNUZ dtypes.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence

from .header import FileHeader, TensorHeader


def is_old_reader() -> bool:
    """Whether the InstantTensor of this process is older than 0.2."""
    import instanttensor

    # The releases carry no version; the filter came with 0.2.
    parameters = inspect.signature(instanttensor.safe_open).parameters
    return "tensor_filter" not in parameters


def reader_faults(
    files: Sequence[FileHeader], *, old_reader: bool = False
) -> dict[str, str]:
    """By path, why InstantTensor cannot stream one of ``files`` with the others.

    ``old_reader`` says that it is older than 0.2 on some rank.
    """
    found = {file.path: _fault(file, old_reader) for file in files}
    return found | _minority_medium([file for file in files if not found[file.path]])


def _fault(file: FileHeader, old_reader: bool) -> str:
    if file.in_memory is None:
        return "in memory for some ranks, on disk for others"
    form = (file.metadata or {}).get("format", "pt")
    if form != "pt":
        return f"metadata format {form!r}"
    for tensor in file.tensors:
        if tensor.is_sub_byte:
            return f"sub-byte dtype {tensor.dtype} in its file"
        if tensor.begin == tensor.end:
            return "zero-byte tensor in its file"
        if old_reader and (fault := _old_fault(tensor)):
            return f"{fault}, which InstantTensor before 0.2 refuses"
    return ""


def _old_fault(tensor: TensorHeader) -> str:
    if tensor.dtype.endswith("FNUZ"):
        return f"dtype {tensor.dtype}"
    if tensor.begin % (tensor.element_bits // 8):
        return "a tensor that is not aligned"
    return ""


def _minority_medium(files: Sequence[FileHeader]) -> dict[str, str]:
    """InstantTensor wants all files in memory or all on disk: fewer bytes give way."""
    media: dict[bool, list[FileHeader]] = {True: [], False: []}
    for file in files:
        media[file.in_memory].append(file)
    if not media[True] or not media[False]:
        return {}
    minority = min(
        (True, False), key=lambda m: sum(file.payload_bytes for file in media[m])
    )
    reason = "in memory, others on disk" if minority else "on disk, others in memory"
    return {file.path: reason for file in media[minority]}
