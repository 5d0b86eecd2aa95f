"""Looks at what a compiler made of a kernel, before it is loaded: a text may mean something else where it is compiled
again."""

import re
import struct

_WS_ASSEMBLY = re.compile(
    r"^\s*(?:#+|//)\s*APP|file scope inline assembly|\.(?:incbin|include|macro|irpc?|rept|altmacro)\b",
    re.MULTILINE | re.IGNORECASE,
)
_WS_STARTUP_TAGS = (12, 13, 25, 26, 32)  # DT_INIT, DT_FINI, and the arrays of both and of DT_PREINIT
_WS_RELA, _WS_DYNAMIC, _WS_DYNSYM = 4, 6, 11
_WS_IFUNC, _WS_CHOSEN = 10, (37, 1032)  # R_X86_64_IRELATIVE, R_AARCH64_IRELATIVE
_WS_LOADED, _WS_THREAD_LOCAL, _WS_READ_ONLY_AFTER_LOADING, _WS_WRITABLE = 1, 7, 0x6474E552, 2


def _ws_require_kernel(assembly, library, calls, ending):
    """Raises RuntimeError where a library runs code as it is loaded, or may do more than compute.

    `calls`: names that it may call; `ending`: how others begin that end the process.
    """
    if _WS_ASSEMBLY.search(assembly):
        raise RuntimeError("the kernel holds assembly, which no judged one does")
    for name in _ws_needs(library):
        if name not in calls and not name.startswith(ending):
            raise RuntimeError(f"the kernel calls {name[:100]!r}, which no judged one does")
    if _ws_kept_bytes(library):
        raise RuntimeError("the kernel keeps memory from call to call, which no judged one does")


def _ws_needs(data):
    """Names that a 64-bit little-endian ELF library asks the process for (System V ABI, chapters 4 and 5)."""
    if data[:6] != b"\x7fELF\x02\x01":
        raise RuntimeError("the compiler gave no library for this machine")
    (offset,) = struct.unpack_from("<Q", data, 40)
    (count,) = struct.unpack_from("<H", data, 60)
    sections = [struct.unpack_from("<IIQQQQIIQQ", data, offset + 64 * number) for number in range(count)]
    for _, kind, _, _, start, length, link, *_ in sections:
        if kind == _WS_DYNAMIC:
            tags = {struct.unpack_from("<q", data, at)[0] for at in range(start, start + length, 16)}
            if tags & {*_WS_STARTUP_TAGS}:
                raise RuntimeError("the kernel runs code when it is loaded, which no judged one does")
        elif kind == _WS_RELA:
            kinds = {struct.unpack_from("<Q", data, at + 8)[0] & 0xFFFFFFFF for at in range(start, start + length, 24)}
            if kinds & {*_WS_CHOSEN}:
                raise RuntimeError("the kernel chooses a function when it is loaded, which no judged one does")
        elif kind == _WS_DYNSYM:
            strings = sections[link][4]
            for at in range(start + 24, start + length, 24):
                name, info, _, section = struct.unpack_from("<IBBH", data, at)
                if info & 15 == _WS_IFUNC:
                    raise RuntimeError("the kernel chooses a function when it is loaded, which no judged one does")
                if not section:
                    yield data[strings + name : data.index(b"\0", strings + name)].decode()


def _ws_kept_bytes(data):
    """What the loader leaves writable: writable segments less what it protects once it has relocated them."""
    (offset,) = struct.unpack_from("<Q", data, 32)
    (count,) = struct.unpack_from("<H", data, 56)
    segments = [struct.unpack_from("<IIQQQQQQ", data, offset + 56 * number) for number in range(count)]
    protected = [(at, at + size) for kind, _, _, at, _, _, size, _ in segments if kind == _WS_READ_ONLY_AFTER_LOADING]
    kept = 0
    for kind, flags, _, at, _, _, size, _ in segments:
        if kind == _WS_THREAD_LOCAL:
            kept += size
        elif kind == _WS_LOADED and flags & _WS_WRITABLE:
            kept += size - sum(max(0, min(end, at + size) - max(begin, at)) for begin, end in protected)
    return kept
