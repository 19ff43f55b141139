"""Memory-mapped files of token ids: .npy, whose header has the dtype and the length, or raw ids as .bin."""

# B rows

from __future__ import annotations

import array
import ast
import contextlib
import mmap
import os
import struct
import warnings
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import IO

import torch

from ...atomic_write import write_whole
from ...errors import CorpusError
from ..arguments import require_at_least_one, require_one_of

DTYPES = {"uint16": torch.int16, "uint32": torch.int32, "int32": torch.int32, "int64": torch.int64}
"""What the ids of a file may be, and the signed dtype as which their bytes are read: torch computes with few others."""
_MASKS = {"uint16": 2**16 - 1, "uint32": 2**32 - 1}
_NPY_DTYPES = {"<u2": "uint16", "<u4": "uint32", "<i4": "int32", "<i8": "int64"}
_NPY_MAGIC = b"\x93NUMPY"
_HEADER_BYTES = 128
_MAPPED_AT_MOST = 8 * 2**20  # bytes that may be resident before they are given back to the page cache
_MAPPED_AROUND = 64 * 2**10  # Linux maps the pages around one that is read, 64 KiB by default


class TokenFile:
    """A memory-mapped file of token ids below ``vocabulary_size``. ``dtype`` is that of a .bin, which has no header.

    Mapped pages are given back after every 8 MiB, so the resident memory does not grow with the file.
    """

    def __init__(self, path: str | os.PathLike[str], vocabulary_size: int, *, dtype: str = "uint16") -> None:
        self.path, self.vocabulary_size = Path(path), require_at_least_one("vocabulary_size", vocabulary_size)
        require_one_of("dtype", dtype, [*DTYPES])
        if self.path.suffix not in (".bin", ".npy"):
            raise CorpusError(f"token ids are read from .bin or .npy, got {path}")
        if not self.path.is_file():
            raise CorpusError(f"no file {path}")
        with self.path.open("rb") as file:
            header_bytes, self.dtype = _npy_header(file, self.path) if self.path.suffix == ".npy" else (0, dtype)
            self._file = os.dup(file.fileno())
        self._stamp = self._stamp_now()
        item_bytes = DTYPES[self.dtype].itemsize
        ids_bytes = self._stamp[0] - header_bytes
        if ids_bytes % item_bytes:
            raise CorpusError(f"{path} has {self._stamp[0]:,} bytes: no whole number of {self.dtype} ids")
        if ids_bytes <= 0:
            raise CorpusError(f"{path} is empty: it has no token ids")
        self._map = mmap.mmap(self._file, 0, access=mmap.ACCESS_READ)
        with warnings.catch_warnings():  # that a tensor of a read-only file must not be written to
            warnings.simplefilter("ignore", UserWarning)
            self._ids = torch.frombuffer(self._map, dtype=DTYPES[self.dtype], offset=header_bytes)
        self._mapped_bytes = 0

    def __len__(self) -> int:
        return len(self._ids)

    def rows(self, starts_B: torch.Tensor, width: int) -> torch.Tensor:
        """The ``width`` ids from each start on, int64 ``[B, width]``. Refuses an id outside the vocabulary."""
        self._require_unchanged()
        rows = self._ids.unfold(0, width, 1).index_select(0, starts_B).to(torch.int64)
        self._give_back(len(starts_B) * max(_MAPPED_AROUND, width * self._ids.itemsize))
        mask = _MASKS.get(self.dtype)
        if mask is not None:
            rows.bitwise_and_(mask)
        if rows.numel() and (int(rows.max()) >= self.vocabulary_size or (mask is None and int(rows.min()) < 0)):
            row, place = ((rows < 0) | (rows >= self.vocabulary_size)).nonzero()[0].tolist()
            raise CorpusError(
                f"{self.path}: id {int(rows[row, place])} at place {int(starts_B[row]) + place} "
                f"is not in the vocabulary of {self.vocabulary_size}"
            )
        return rows

    def _give_back(self, num_bytes: int) -> None:
        self._mapped_bytes += num_bytes
        if self._mapped_bytes > _MAPPED_AT_MOST and hasattr(self._map, "madvise"):
            self._map.madvise(mmap.MADV_DONTNEED)
            self._mapped_bytes = 0

    def _stamp_now(self) -> tuple[int, int]:
        status = os.fstat(self._file)
        return status.st_size, status.st_mtime_ns

    def _require_unchanged(self) -> None:
        """A mapped file that became shorter would end the process, so this is asked before each read."""
        if (now := self._stamp_now()) != self._stamp:
            raise CorpusError(
                f"{self.path} changed while it was read: {self._stamp[0]:,} bytes when it was opened, {now[0]:,} now; "
                "open it again"
            )

    def __del__(self) -> None:
        with contextlib.suppress(AttributeError, OSError):  # a file that was refused has none
            os.close(self._file)

    def __reduce__(self) -> tuple[object, ...]:
        return _reopened, (self.path, self.vocabulary_size, self.dtype, self._stamp)


def _reopened(path: Path, vocabulary_size: int, dtype: str, stamp: tuple[int, int]) -> TokenFile:
    """The same file in another process, such as a worker of a data loader."""
    tokens = TokenFile(path, vocabulary_size, dtype=dtype)
    tokens._stamp = stamp
    tokens._require_unchanged()
    return tokens


def write_tokens(path: str | os.PathLike[str], pieces: Iterable[Sequence[int]], vocabulary_size: int) -> TokenFile:
    """Write a .npy of uint16 ids, or of uint32 where the vocabulary needs it, one piece at a time."""
    path = Path(path)
    if path.suffix != ".npy":
        raise CorpusError(f"token ids are written to .npy, got {path}")
    kind, code = ("<u2", "H") if require_at_least_one("vocabulary_size", vocabulary_size) <= 2**16 else ("<u4", "I")

    def write(file: IO[bytes]) -> None:
        count = 0
        file.write(bytes(_HEADER_BYTES))
        for ids in pieces:
            for extreme in (min(ids, default=0), max(ids, default=0)):
                if not 0 <= extreme < vocabulary_size:
                    raise CorpusError(f"{path}: id {extreme} is not in the vocabulary of {vocabulary_size}")
            array.array(code, ids).tofile(file)
            count += len(ids)
        if not count:
            raise CorpusError(f"{path}: the corpus is empty, there are no token ids to write")
        file.seek(0)
        file.write(_header(kind, count))

    write_whole(path, write, "the token file")
    return TokenFile(path, vocabulary_size)


# ---------------------------------------------------------------- numpy's file format, without numpy
def _header(kind: str, count: int) -> bytes:
    text = repr({"descr": kind, "fortran_order": False, "shape": (count,)})
    start = _NPY_MAGIC + b"\x01\x00" + struct.pack("<H", _HEADER_BYTES - 10)
    return start + text.encode().ljust(_HEADER_BYTES - 11) + b"\n"


def _npy_header(file: IO[bytes], path: Path) -> tuple[int, str]:
    """The length of the header, and the dtype of the ids."""
    try:
        if file.read(6) != _NPY_MAGIC:
            raise ValueError("it does not start as one")
        (major, _) = file.read(2)
        length_format = "<H" if major == 1 else "<I"
        (length,) = struct.unpack(length_format, file.read(struct.calcsize(length_format)))
        header = ast.literal_eval(file.read(length).decode("utf-8").strip())
        kind, shape = header["descr"], header["shape"]
    except (ValueError, KeyError, TypeError, SyntaxError, struct.error, OSError) as error:
        raise CorpusError(f"{path} is not a .npy file: {error}") from None
    if kind not in _NPY_DTYPES or len(shape) != 1:
        raise CorpusError(f"{path} must hold one row of {', '.join(DTYPES)} ids, got dtype {kind!r} and shape {shape}")
    return file.tell(), _NPY_DTYPES[kind]
