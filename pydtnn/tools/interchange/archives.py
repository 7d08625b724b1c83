"""Zip archives from elsewhere: records are read without an allocation that the file chooses."""

from __future__ import annotations

import io
import struct
import zipfile
import zlib

Buffer = bytes | memoryview

BEGIN = b"PK\x03\x04"
"""First bytes of an archive, and of each record."""

INVALID = (zipfile.BadZipFile, zlib.error, struct.error, EOFError, OSError, RuntimeError)
"""Errors of an archive that is damaged, encrypted or of an unknown version."""


class Archive:
    """A zip archive in memory.

    Attributes
    ----------
    names : set of str
        Of its records.

    Raises
    ------
    ValueError
        If it is damaged.
    """

    def __init__(self, data: bytes) -> None:
        self._data = data
        try:
            self._zip = zipfile.ZipFile(io.BytesIO(data))
        except INVALID as error:
            raise ValueError(str(error)) from error
        self.names = {*self._zip.namelist()}

    def record(self, name: str, limit: int) -> Buffer:
        """Return the content of a record, which is not copied if it is not compressed.

        Parameters
        ----------
        name : str
        limit : int
            Largest size of a compressed record, in B.

        Raises
        ------
        ValueError
            If it is missing, damaged, too large or not readable.
        """
        try:
            info = self._zip.getinfo(name)
            if info.compress_type == zipfile.ZIP_STORED and not info.flag_bits & 1:
                return self._stored(info)
            if info.compress_type != zipfile.ZIP_DEFLATED:
                raise ValueError(f"record {name} is encrypted or of an unknown compression")
            if info.file_size > limit:
                raise ValueError(
                    f"record {name} is compressed and would become {info.file_size} B, more than "
                    f"the {limit} B that the model requires"
                )
            with self._zip.open(info) as stream:
                return stream.read(info.file_size)
        except KeyError:
            raise ValueError(f"record {name} is missing") from None
        except INVALID as error:
            raise ValueError(f"record {name}: {error}") from error

    def _stored(self, info: zipfile.ZipInfo) -> memoryview:
        head = self._data[info.header_offset : info.header_offset + 30]
        before = 30 + sum(int.from_bytes(head[i : i + 2], "little") for i in (26, 28))
        start = info.header_offset + before
        content = memoryview(self._data)[start : start + info.file_size]
        if not head.startswith(BEGIN) or len(content) != info.file_size:
            raise ValueError(f"record {info.filename} is truncated")
        if zlib.crc32(content) != info.CRC:
            raise ValueError(f"record {info.filename} does not match its checksum")
        return content
