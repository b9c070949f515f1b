"""A second name for a shared library that is loaded (ELF, 64 bits): an empty library of that name which needs it.

Whoever opens the second name finds the empty library by its SONAME, and through it all symbols of the first.
"""

import platform
import struct

MACHINES = {"x86_64": 62, "aarch64": 183}
_LOAD, _DYNAMIC, _STACK = 1, 2, 0x6474E551  # segment types
_NEEDED, _STRTAB, _SYMTAB, _STRSZ, _SYMENT, _SONAME = 1, 5, 6, 10, 11, 14  # entries of the dynamic section
_READ_WRITE = 6


def alias(name: str, library: str) -> bytes:
    """The content of a shared library called `name` (its SONAME) that needs the loaded `library` (its SONAME)."""
    strings = b"\0" + name.encode() + b"\0" + library.encode() + b"\0"
    header_size, segment_size, symbol_size = 64, 56, 24
    symbols = header_size + 3 * segment_size  # the one symbol that every table begins with
    table = symbols + symbol_size
    dynamic = -(-(table + len(strings)) // 8) * 8
    entries = [(_SONAME, 1), (_NEEDED, 2 + len(name.encode())), (_STRTAB, table), (_STRSZ, len(strings))]
    entries += [(_SYMTAB, symbols), (_SYMENT, symbol_size), (0, 0)]
    section = b"".join(struct.pack("<QQ", *entry) for entry in entries)
    size = dynamic + len(section)

    def segment(kind: int, offset: int, length: int, alignment: int) -> bytes:
        return struct.pack("<IIQQQQQQ", kind, _READ_WRITE, offset, offset, offset, length, length, alignment)

    header = b"\x7fELF" + bytes((2, 1, 1)) + bytes(9)
    header += struct.pack("<HHIQQQIHHHHHH", 3, MACHINES[platform.machine()], 1, 0, header_size, 0, 0,
                          header_size, segment_size, 3, 0, 0, 0)  # fmt: skip
    segments = segment(_LOAD, 0, size, 4096) + segment(_DYNAMIC, dynamic, len(section), 8) + segment(_STACK, 0, 0, 16)
    content = header + segments + bytes(symbol_size) + strings
    return content.ljust(dynamic, b"\0") + section
