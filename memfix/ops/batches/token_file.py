"""Files of token ids: .npy, whose header has the dtype and the length, or raw ids as .bin.

Rows are read with ``pread``, not by mapping the file: mapped pages count as resident memory once they are read, up to
2 MiB around each row, and a file truncated while it is mapped ends the process with SIGBUS instead of an error.
"""

# B rows

from __future__ import annotations

import array
import ast
import contextlib
import os
import struct
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import IO

import torch

from ...atomic_write import write_whole
from ...errors import CorpusError
from ..arguments import require_at_least_one, require_one_of

DTYPES = {"uint16": torch.int16, "uint32": torch.int32, "int32": torch.int32, "int64": torch.int64}
"""The dtypes of ids in files, and the signed dtype as which torch reads them: it has few operators on unsigned ones."""
_MASKS = {"uint16": 2**16 - 1, "uint32": 2**32 - 1}
_NPY_DTYPES = {"<u2": "uint16", "<u4": "uint32", "<i4": "int32", "<i8": "int64"}
_NPY_MAGIC = b"\x93NUMPY"
_HEADER_BYTES = 128


class TokenFile:
    """A file of token ids below ``vocabulary_size``. ``dtype`` is needed for a .bin, which has no header.

    No part of the file is kept in memory. A file whose size or modification time changes while it is open is refused.
    """

    def __init__(self, path: str | os.PathLike[str], vocabulary_size: int, *, dtype: str = "uint16") -> None:
        self.path, self.vocabulary_size = Path(path), require_at_least_one("vocabulary_size", vocabulary_size)
        require_one_of("dtype", dtype, [*DTYPES])
        if self.path.suffix not in (".bin", ".npy"):
            raise CorpusError(f"token ids are read from .bin or .npy, got {path}")
        if not self.path.is_file():
            raise CorpusError(f"no file {path}")
        with self.path.open("rb") as file:
            self._header_bytes, self.dtype = _npy_header(file, self.path) if self.path.suffix == ".npy" else (0, dtype)
            self._file = os.dup(file.fileno())
        self._stamp = self._stamp_now()
        self._item_bytes = DTYPES[self.dtype].itemsize
        ids_bytes = self._stamp[0] - self._header_bytes
        if ids_bytes % self._item_bytes:
            raise CorpusError(f"{path} has {self._stamp[0]:,} bytes: no whole number of {self.dtype} ids")
        if ids_bytes <= 0:
            raise CorpusError(f"{path} is empty: it has no token ids")
        self._count = ids_bytes // self._item_bytes

    def __len__(self) -> int:
        return self._count

    def rows(self, starts_B: torch.Tensor, width: int) -> torch.Tensor:
        """Return the ``width`` ids from each start on, int64 ``[B, width]``. Refuses an id outside the vocabulary."""
        if not len(starts_B):
            return torch.empty(0, width, dtype=torch.int64)
        rows = self._read(starts_B.tolist(), width).to(torch.int64)
        self._require_unchanged()
        mask = _MASKS.get(self.dtype)
        if mask is not None:
            rows.bitwise_and_(mask)
        if int(rows.max()) >= self.vocabulary_size or (mask is None and int(rows.min()) < 0):
            row, place = ((rows < 0) | (rows >= self.vocabulary_size)).nonzero()[0].tolist()
            raise CorpusError(
                f"{self.path}: id {int(rows[row, place])} at place {int(starts_B[row]) + place} "
                f"is not in the vocabulary of {self.vocabulary_size}"
            )
        return rows

    def _read(self, starts: list[int], width: int) -> torch.Tensor:
        """Return the rows in the dtype of the file. Equally spaced rows without gaps are read at once."""
        step = starts[1] - starts[0] if len(starts) > 1 else 1
        if 0 < step <= width and starts == [*range(starts[0], starts[-1] + 1, step)]:
            content = bytearray((starts[-1] - starts[0] + width) * self._item_bytes)
            self._read_into(memoryview(content), starts[0])
        else:
            row_bytes, step = width * self._item_bytes, width
            content = bytearray(len(starts) * row_bytes)
            buffer = memoryview(content)
            for row, start in enumerate(starts):
                self._read_into(buffer[row * row_bytes : (row + 1) * row_bytes], start)
        return torch.frombuffer(content, dtype=DTYPES[self.dtype]).unfold(0, width, step)

    def _read_into(self, buffer: memoryview, start: int) -> None:
        position = self._header_bytes + start * self._item_bytes
        while buffer:  # one call reads at most 2 GiB
            num_bytes = os.preadv(self._file, [buffer], position)
            if not num_bytes:
                self._require_unchanged()
                raise IndexError(f"{self.path}: a row ends after the last of {len(self):,} ids")
            buffer, position = buffer[num_bytes:], position + num_bytes

    def _stamp_now(self) -> tuple[int, int]:
        status = os.fstat(self._file)
        return status.st_size, status.st_mtime_ns

    def _require_unchanged(self) -> None:
        if (now := self._stamp_now()) != self._stamp:
            raise CorpusError(
                f"{self.path} changed while it was read: {self._stamp[0]:,} bytes when it was opened, {now[0]:,} now; "
                "open it again"
            )

    def __del__(self) -> None:
        with contextlib.suppress(AttributeError, OSError):  # a refused file has no descriptor
            os.close(self._file)

    def __reduce__(self) -> tuple[object, ...]:
        return _reopened, (self.path, self.vocabulary_size, self.dtype, self._stamp)


def _reopened(path: Path, vocabulary_size: int, dtype: str, stamp: tuple[int, int]) -> TokenFile:
    """Open the same file in another process, such as a worker of a data loader."""
    tokens = TokenFile(path, vocabulary_size, dtype=dtype)
    tokens._stamp = stamp
    tokens._require_unchanged()
    return tokens


def write_tokens(path: str | os.PathLike[str], pieces: Iterable[Sequence[int]], vocabulary_size: int) -> TokenFile:
    """Write a .npy of uint16 ids, or of uint32 if the vocabulary needs it, one piece at a time."""
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
    """Return the length of the header, and the dtype of the ids."""
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
