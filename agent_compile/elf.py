"""Reads the few facts of an ELF file that a check of a binary needs; little-endian 64-bit files only.

Source: the System V ABI, chapters 4 and 5 (sections, symbols, dynamic table). It reads nothing outside the bytes
that it is given, and any malformed file is `NotElf`, because the file comes out of a jail.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass

_SYMTAB, _DYNAMIC, _DYNSYM = 2, 6, 11
_STARTUP_TAGS = {12: "DT_INIT", 13: "DT_FINI", 25: "DT_INIT_ARRAY", 26: "DT_FINI_ARRAY", 32: "DT_PREINIT_ARRAY"}
_IFUNC, _CUDA = 10, 190
_RELA, _CHOSEN_WHEN_LOADED = 4, frozenset({37, 1032})  # R_X86_64_IRELATIVE, R_AARCH64_IRELATIVE
_RELOCATIONS = {4: 24, 9: 16}  # bytes of an entry, with what is to be added and without: sm_80 to sm_89 have both
_LDC, _ANY_SLOT = 0xB82, -1
_CUDA_TABLES = frozenset({("__cudart_i2opi_f", 24), ("__cudart_i2opi_d", 144), ("__cudart_sin_cos_coeffs", 128)})
_LOADED, _THREAD_LOCAL, _READ_ONLY_AFTER_LOADING, _WRITABLE = 1, 7, 0x6474E552, 2
_LONGEST_NAME = 4096


class NotElf(ValueError):
    """The bytes are not an ELF file that this reader understands."""


@dataclass(frozen=True)
class Elf:
    """What a binary defines and needs."""

    defined: frozenset[str]
    """Names of the global functions and objects that it defines."""
    undefined: frozenset[str]
    """Names that the process that loads it must provide."""
    startup: tuple[str, ...]
    """Ways in which it runs code when it is loaded or unloaded; empty for none."""
    kept_bytes: int = 0
    """Memory of its own that it can write and find again in the next call, thread-local memory included."""
    device_variables: tuple[str, ...] = ()
    """Of a cubin: names of its variables in global memory, which live from launch to launch."""


def read(data: bytes) -> Elf:
    """Reads symbols and dynamic table.

    Raises:
        NotElf: the bytes are malformed.
    """
    try:
        return _read(data)
    except (struct.error, IndexError, ValueError) as error:
        raise NotElf(str(error)) from error


def _read(data: bytes) -> Elf:
    if data[:6] != b"\x7fELF\x02\x01":
        raise NotElf("no 64-bit little-endian ELF header")
    (offset,) = struct.unpack_from("<Q", data, 40)
    (machine,) = struct.unpack_from("<H", data, 18)
    size, count = struct.unpack_from("<HH", data, 58)
    if size != 64 or count > 100_000:
        raise NotElf("unexpected section table")
    # name, type, flags, address, offset, size, link, info, alignment, entry size
    sections = [struct.unpack_from("<IIQQQQIIQQ", data, offset + 64 * i) for i in range(count)]
    defined: set[str] = set()
    undefined: set[str] = set()
    startup: set[str] = set()
    # A shared object speaks through its dynamic symbols; a cubin has only the static table.
    kinds = {section[1] for section in sections}
    wanted = _DYNSYM if _DYNSYM in kinds else _SYMTAB
    for _, kind, _, _, start, length, link, *_ in sections:
        if kind == wanted:
            names = sections[link]
            strings = data[names[4] : names[4] + names[5]]
            for at in range(start + 24, start + length, 24):
                name, info, _, section = struct.unpack_from("<IBBH", data, at)
                if info & 15 == _IFUNC:
                    startup.add("an indirect function")
                if info >> 4 == 0:
                    continue  # local
                text = strings[name : strings.index(b"\0", name, name + _LONGEST_NAME)].decode()
                (defined if section else undefined).add(text)
        elif kind == _RELA and machine != _CUDA:
            kinds = {struct.unpack_from("<Q", data, at + 8)[0] & 0xFFFFFFFF for at in range(start, start + length, 24)}
            if kinds & _CHOSEN_WHEN_LOADED:  # of a local function there is no symbol
                startup.add("an indirect function")
        elif kind == _DYNAMIC:
            for at in range(start, start + length, 16):
                tag, _ = struct.unpack_from("<qQ", data, at)
                if tag in _STARTUP_TAGS:
                    startup.add(_STARTUP_TAGS[tag])
    return Elf(
        frozenset(defined),
        frozenset(undefined - {""}),
        tuple(sorted(startup)),
        _kept_bytes(data),
        tuple(_device_variables(data, sections)) if machine == _CUDA else (),
    )


def _device_variables(data: bytes, sections: list[tuple[int, ...]]) -> Iterator[str]:
    """Variables in a cubin's sections `.nv.global` and `.nv.global.init` whose address some instruction loads, or which
    stands in an instruction or in other variables, constant ones too.

    ptxas puts the address of every variable, folded constants included, into constant bank 4, so that only the
    instructions tell which of these are used. The tables of CUDA's own sine and cosine do not count.
    """
    (titles,) = struct.unpack_from("<H", data, 62)
    named = [(_text(data, sections[titles], section[0]), section) for section in sections]
    used: set[int] = set()
    for title, (_, _, _, _, start, length, *_) in named:
        if title.startswith(".text."):
            used |= _slots(data[start : start + length])
    for title, (_, kind, _, _, start, length, link, *_) in named:
        if kind not in _RELOCATIONS or ".debug" in title:
            continue
        symbols, is_bank = sections[link], title.endswith(".nv.constant4")
        for at in range(start, start + length, _RELOCATIONS[kind]):
            slot, information = struct.unpack_from("<QQ", data, at)
            name, _, _, section, _, size = struct.unpack_from("<IBBHQQ", data, symbols[4] + 24 * (information >> 32))
            text = _text(data, sections[symbols[6]], name)
            is_global = section < len(named) and named[section][0].startswith(".nv.global")
            is_used = not is_bank or slot in used or _ANY_SLOT in used
            if is_global and (text, size) not in _CUDA_TABLES and is_used:
                yield text or "of no name"


def _slots(code: bytes) -> set[int]:
    """Offsets in constant bank 4 that instructions of sm_90 (16 bytes each) read; `_ANY_SLOT` for one that varies.

    Found by compiling: bits 9 to 11 tell that an operand is in a constant bank (5, or 3 for the last operand), 54 to
    58 which bank, 38 to 53 where; the register that may be added stands in bits 24 to 31, 255 being none.
    """
    found: set[int] = set()
    for at in range(0, len(code) - 15, 16):
        (word,) = struct.unpack_from("<Q", code, at)
        if (word >> 9) & 7 in (3, 5) and (word >> 54) & 31 == 4:
            is_load = word & 0xFFF == _LDC
            found.add(_ANY_SLOT if is_load and (word >> 24) & 255 != 255 else (word >> 38) & 0xFFFF)
    return found


def _text(data: bytes, strings: tuple[int, ...], at: int) -> str:
    begin = strings[4] + at
    return data[begin : data.index(b"\0", begin, begin + _LONGEST_NAME)].decode()


def _kept_bytes(data: bytes) -> int:
    """What the loader leaves writable: writable segments less what it protects once it has relocated them."""
    (offset,) = struct.unpack_from("<Q", data, 32)
    size, count = struct.unpack_from("<HH", data, 54)
    if count and size != 56:
        raise NotElf("unexpected program headers")
    # type, flags, offset, address, physical address, bytes in the file, bytes in memory, alignment
    segments = [struct.unpack_from("<IIQQQQQQ", data, offset + 56 * i) for i in range(count)]
    protected = [(at, at + size) for kind, _, _, at, _, _, size, _ in segments if kind == _READ_ONLY_AFTER_LOADING]
    kept = 0
    for kind, flags, _, at, _, _, size, _ in segments:
        if kind == _THREAD_LOCAL:
            kept += size
        elif kind == _LOADED and flags & _WRITABLE:
            kept += size - sum(max(0, min(end, at + size) - max(begin, at)) for begin, end in protected)
    return kept
