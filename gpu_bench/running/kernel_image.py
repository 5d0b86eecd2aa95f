"""A shared object laid out at an address, as a loader would leave it: bytes, and who may do what with which pages.

The one idea: the parts of a loader that read a stranger's file are Python over bytes, where a lie is an exception; the
process that runs the code only copies and protects. Nothing is run on loading: constructors, indirect functions and
thread-local memory are refused, and of functions outside there are those of `kernel_calls`. Little-endian 64-bit only.

Source: the System V ABI, chapters 4 and 5, and its supplements for x86-64 and aarch64 (relocations).
"""

from __future__ import annotations

import mmap
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from gpu_bench.running.executor import ProgramFault
from warpsmith.sandbox import kernel_calls
from warpsmith.v1 import verdict_pb2

TRAP = "trap"
"""Stands for every function that ends the process."""

_LOAD, _DYNAMIC, _THREAD_LOCAL, _RELRO = 1, 2, 7, 0x6474E552
_EXECUTE, _WRITE, _READ = 1, 2, 4
_MACHINES: Mapping[int, tuple[int, int, int]] = {62: (1, 6, 8), 183: (257, 1025, 1027)}
"""Number of a machine → its relocations: an address, one in a table (and the next, for calls), one of its own."""
_SYMTAB, _STRTAB, _STRSZ, _RELA, _RELASZ, _JMPREL, _PLTRELSZ, _RELR = 6, 5, 10, 7, 8, 23, 2, 36
_INDIRECT, _DYNSYM = 10, 11
_MOST_BYTES = 64 << 20
_PAGE = mmap.PAGESIZE


@dataclass(frozen=True)
class Segment:
    """Whole pages with one protection."""

    address: int
    size: int
    protection: int
    """PROT_READ and the like."""


@dataclass(frozen=True)
class Image:
    """What lies in memory."""

    address: int
    content: bytes
    segments: tuple[Segment, ...]
    entries: Mapping[str, int]
    """Addresses of the functions that it defines."""


class Unloadable(ProgramFault):
    """The file is no shared object that a kernel could be in."""

    def __init__(self, why: str) -> None:
        super().__init__(verdict_pb2.FAILURE_KIND_LAUNCH_ERROR, f"the shared object does not load: {why}")


def laid_out(data: bytes, address: int, functions: Mapping[str, int]) -> Image:
    """The image at an address (a multiple of a page). `functions`: what there is outside, `TRAP` included.

    Raises ProgramFault.
    """
    try:
        return _laid_out(data, address, functions)
    except (struct.error, LookupError, ValueError, OverflowError) as error:
        raise Unloadable(str(error)) from error


def _laid_out(data: bytes, address: int, functions: Mapping[str, int]) -> Image:
    machine = struct.unpack_from("<H", data, 18)[0] if data[:6] == b"\x7fELF\x02\x01" else 0
    if machine not in _MACHINES or struct.unpack_from("<H", data, 16)[0] != 3:
        raise Unloadable("it is no ELF file for this kind of processor")
    (offset,) = struct.unpack_from("<Q", data, 32)
    size, count = struct.unpack_from("<HH", data, 54)
    if size != 56 or count > 64:
        raise Unloadable("unexpected program headers")
    # type, flags, offset, address, physical address, bytes in the file, bytes in memory, alignment
    headers = [struct.unpack_from("<IIQQQQQQ", data, offset + 56 * i) for i in range(count)]
    loads = [header for header in headers if header[0] == _LOAD]
    if any(header[0] == _THREAD_LOCAL for header in headers):
        raise Unloadable("it has thread-local memory")
    end = max((header[3] + header[6] for header in loads), default=0)
    if not 0 < end <= _MOST_BYTES:
        raise Unloadable("unexpected size")
    content = bytearray(-(-end // _PAGE) * _PAGE)
    for _, _, begin, at, _, file_size, memory_size, _ in loads:
        part = data[begin : begin + file_size]
        if file_size > memory_size or len(part) != file_size:
            raise Unloadable("a segment is longer than the file")
        content[at : at + file_size] = part
    found = _Dynamic.of(content, next((header for header in headers if header[0] == _DYNAMIC), None), _symbols(data))
    _relocate(content, found, address, functions, _MACHINES[machine])
    segments = [Segment(address, len(content), 0)]
    segments += [_segment(address, header[3], header[6], _protection(header[1])) for header in loads]
    for header in headers:
        if header[0] == _RELRO:  # to the last whole page, which is as far as a linker means it
            begin, end = header[3] // _PAGE * _PAGE, (header[3] + header[6]) // _PAGE * _PAGE
            if begin < end:
                segments.append(Segment(address + begin, end - begin, mmap.PROT_READ))
    entries = {name: address + value for name, value, kind, section in found.symbols() if section and kind != _INDIRECT}
    return Image(address, bytes(content), tuple(segments), entries)


def _symbols(data: bytes) -> int:
    """How many dynamic symbols there are: only the table of sections says it."""
    (offset,) = struct.unpack_from("<Q", data, 40)
    size, count = struct.unpack_from("<HH", data, 58)
    if size != 64 or count > 10_000:
        raise Unloadable("unexpected section table")
    sections = (struct.unpack_from("<IIQQQQ", data, offset + 64 * i) for i in range(count))
    return sum(section[5] // 24 for section in sections if section[1] == _DYNSYM)


def _segment(address: int, at: int, size: int, protection: int) -> Segment:
    begin = at // _PAGE * _PAGE
    return Segment(address + begin, -(-(at + size - begin) // _PAGE) * _PAGE, protection)


def _protection(flags: int) -> int:
    if flags & _EXECUTE and flags & _WRITE:
        raise Unloadable("a segment can be written and run")
    named = {_READ: mmap.PROT_READ, _WRITE: mmap.PROT_WRITE, _EXECUTE: mmap.PROT_EXEC}
    return sum(protection for flag, protection in named.items() if flags & flag)


@dataclass(frozen=True)
class _Dynamic:
    """The dynamic table, and what it points to."""

    content: bytearray
    table: Mapping[int, int]
    count: int
    """Of symbols."""

    @staticmethod
    def of(content: bytearray, header: tuple[int, ...] | None, count: int) -> _Dynamic:
        table: dict[int, int] = {}
        if header is not None:
            for at in range(header[3], header[3] + header[6], 16):
                tag, value = struct.unpack_from("<qQ", content, at)
                table.setdefault(tag, value)
        if _RELR in table:
            raise Unloadable("its relocations are packed: link with -z nopack-relative-relocs")
        return _Dynamic(content, table, count)

    def symbol(self, index: int) -> tuple[str, int, int, int]:
        """Name, value, kind and section (0: not its own) of a symbol."""
        name, info, _, section, value = struct.unpack_from("<IBBHQ", self.content, self.table[_SYMTAB] + 24 * index)
        begin = self.table[_STRTAB] + name
        end = self.content.index(b"\0", begin, self.table[_STRTAB] + self.table[_STRSZ])
        return self.content[begin:end].decode(), value, info & 15, section

    def symbols(self) -> Iterator[tuple[str, int, int, int]]:
        """All of them."""
        yield from map(self.symbol, range(self.count if _SYMTAB in self.table else 0))

    def relocations(self) -> Iterator[tuple[int, int, int, int]]:
        """Where, kind, symbol, and what to add."""
        for begin, size in ((_RELA, _RELASZ), (_JMPREL, _PLTRELSZ)):
            for at in range(self.table.get(begin, 0), self.table.get(begin, 0) + self.table.get(size, 0), 24):
                where, info, addend = struct.unpack_from("<QQq", self.content, at)
                yield where, info & 0xFFFF_FFFF, info >> 32, addend


def _relocate(
    content: bytearray, found: _Dynamic, address: int, functions: Mapping[str, int], kinds: tuple[int, int, int]
) -> None:
    absolute, in_table, relative = kinds
    fixed: list[tuple[int, int]] = []
    for where, kind, index, addend in found.relocations():
        if kind == relative:
            value = address + addend
        elif kind in (absolute, in_table, in_table + 1):
            value = _address_of(found.symbol(index), address, functions) + (addend if kind != in_table + 1 else 0)
        elif kind == 0:
            continue
        else:
            raise Unloadable(f"a relocation of kind {kind}")
        if not 0 <= where <= len(content) - 8:
            raise Unloadable("a relocation outside of it")
        fixed.append((where, value))
    for where, value in fixed:  # only now: they might change the tables
        struct.pack_into("<Q", content, where, value & 0xFFFF_FFFF_FFFF_FFFF)


def _address_of(symbol: tuple[str, int, int, int], address: int, functions: Mapping[str, int]) -> int:
    name, value, kind, section = symbol
    if section:
        if kind == _INDIRECT:
            raise Unloadable("an indirect function runs when it is loaded")
        return address + value
    if kernel_calls.ends(name):
        return functions[TRAP]
    if not (known := functions.get(name, 0)) and name not in kernel_calls.ABSENT:
        raise ProgramFault(
            verdict_pb2.FAILURE_KIND_POLICY_REJECT, f"the kernel calls {name[:100]!r}, which a kernel may not"
        )
    return known
