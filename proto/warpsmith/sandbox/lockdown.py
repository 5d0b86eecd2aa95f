"""What a process gives up before it runs untrusted code: file access, system calls, capabilities, resources.

The one idea: each function only ever takes rights away from the calling process, needs no privilege, and is
inherited by everything the process starts. Standard library and raw system calls only, because it runs in the
bare interpreter that sets up a jail. It does not choose what is taken away; `warpsmith.sandbox.jail` does.

Sources: the kernel's userspace-api/landlock.rst and seccomp_filter.rst; system call numbers from the kernel's
syscall_64.tbl (x86-64) and asm-generic/unistd.h (aarch64).
"""

from __future__ import annotations

import ctypes
import errno
import os
import resource
import stat
import struct
from collections.abc import Iterable, Mapping
from typing import Final

_LIBC: Final = ctypes.CDLL(None, use_errno=True)
ARM: Final = os.uname().machine == "aarch64"

PR_SET_PDEATHSIG, PR_SET_DUMPABLE, PR_CAPBSET_DROP = 1, 4, 24
PR_SET_CHILD_SUBREAPER, PR_SET_NO_NEW_PRIVS, PR_CAP_AMBIENT = 36, 38, 47
PR_CAP_AMBIENT_CLEAR_ALL = 4


def syscall(number: int, *arguments: int | bytes | None) -> int:
    """Calls the kernel directly; raises OSError where the call fails."""
    # Every integer is widened by hand: ctypes would pass a C int, and the kernel reads the whole register.
    wide = [ctypes.c_long(a) if isinstance(a, int) else a for a in arguments]
    result: int = _LIBC.syscall(ctypes.c_long(number), *wide)
    if result < 0:
        code = ctypes.get_errno()
        raise OSError(code, f"system call {number}: {os.strerror(code)}")
    return result


def prctl(option: int, *values: int) -> None:
    """prctl(2) with unused arguments zero, as the kernel demands of the newer options."""
    syscall(167 if ARM else 157, option, *values, *([0] * (4 - len(values))))


def drop_capabilities() -> None:
    """Empties every capability set and forbids regaining any through a set-user-id program."""
    prctl(PR_SET_NO_NEW_PRIVS, 1)
    prctl(PR_CAP_AMBIENT, PR_CAP_AMBIENT_CLEAR_ALL)
    for capability in range(64):
        try:
            prctl(PR_CAPBSET_DROP, capability)
        except OSError:
            break  # past the last capability, or not ours to drop: no_new_privs holds either way
    header = struct.pack("Ii", 0x20080522, 0)  # _LINUX_CAPABILITY_VERSION_3, this thread
    syscall(91 if ARM else 126, header, bytes(24))


def limit_resources(limits: Mapping[str, int]) -> None:
    """Sets each limit (named as in `resource`, without RLIMIT_) hard; never above what is already in force."""
    for name, value in limits.items():
        kind: int = getattr(resource, f"RLIMIT_{name}")
        ceiling = resource.getrlimit(kind)[1]
        bounded = value if ceiling == resource.RLIM_INFINITY else min(value, ceiling)
        resource.setrlimit(kind, (bounded, bounded))


# --- Landlock -------------------------------------------------------------------------------------

_EXECUTE, _WRITE_FILE, _READ_FILE, _READ_DIR = 1 << 0, 1 << 1, 1 << 2, 1 << 3
_TRUNCATE, _IOCTL_DEV = 1 << 14, 1 << 15
_ON_FILES = _EXECUTE | _WRITE_FILE | _READ_FILE | _TRUNCATE | _IOCTL_DEV
_CREATE_RULESET, _ADD_RULE, _RESTRICT_SELF = 444, 445, 446
_SCOPE_ABSTRACT_SOCKETS, _SCOPE_SIGNALS = 1, 2

COMPLETE_ABI: Final = 3
"""From this Landlock version (Linux 6.2) truncation is governed too. Before it a jailed process can empty a file
that it may only read, so Landlock alone is no jail there."""

SIGNAL_ABI: Final = 6
"""From this Landlock version (Linux 6.12) a process can be kept from signalling processes outside its jail."""


def landlock_abi() -> int:
    """The kernel's Landlock version; 0 where there is none."""
    try:
        return syscall(_CREATE_RULESET, None, 0, 1)
    except OSError:
        return 0


def _handled_rights(abi: int) -> int:
    """Every file right that version `abi` can deny: 13 at first, then REFER, TRUNCATE, IOCTL_DEV."""
    return (1 << (13 + (abi >= 2) + (abi >= 3) + (abi >= 5))) - 1


def _enter_domain(files: int, network: int, scope: int, rules: Iterable[tuple[int, str]]) -> None:
    abi = landlock_abi()
    attributes = struct.pack("QQQ", files, network, scope)[: 24 if abi >= 6 else 16 if abi >= 4 else 8]
    ruleset = syscall(_CREATE_RULESET, attributes, len(attributes), 0)
    try:
        for rights, path in rules:
            try:
                descriptor = os.open(path, os.O_PATH | os.O_CLOEXEC)
            except FileNotFoundError:
                continue  # a system path that this machine does not have
            try:
                is_directory = stat.S_ISDIR(os.fstat(descriptor).st_mode)
                allowed = rights & files & (files if is_directory else _ON_FILES)
                syscall(_ADD_RULE, ruleset, 1, struct.pack("=Qi", allowed, descriptor), 0)
            finally:
                os.close(descriptor)
        prctl(PR_SET_NO_NEW_PRIVS, 1)
        syscall(_RESTRICT_SELF, ruleset, 0)
    finally:
        os.close(ruleset)


def restrict_files(
    *, readable: Iterable[str], listable: Iterable[str], writable: Iterable[str], devices: Iterable[str]
) -> None:
    """Denies every file but those under the given paths, all of TCP, and signals out of the jail.

    `listable` directories show their names only, which is what an import path needs.
    """
    abi = landlock_abi()
    if abi < 1:
        return
    handled = _handled_rights(abi)
    rules = [(_EXECUTE | _READ_FILE | _READ_DIR, path) for path in readable]
    rules += [(_READ_DIR, path) for path in listable]
    rules += [(handled & ~_IOCTL_DEV, path) for path in writable]
    rules += [(_READ_FILE | _WRITE_FILE | _READ_DIR | _TRUNCATE | _IOCTL_DEV, path) for path in devices]
    network = 3 if abi >= 4 else 0  # bind and connect
    scope = _SCOPE_ABSTRACT_SOCKETS | _SCOPE_SIGNALS if abi >= SIGNAL_ABI else 0
    _enter_domain(handled, network, scope, rules)


def scope_signals() -> bool:
    """Keeps this process from signalling anything but its descendants. False where the kernel cannot."""
    if landlock_abi() < SIGNAL_ABI:
        return False
    _enter_domain(0, 0, _SCOPE_SIGNALS, ())
    return True


# --- seccomp --------------------------------------------------------------------------------------

# name: (x86-64, aarch64 or None). Each opens a way out of the jail or a part of the kernel that no kernel
# generator, compiler or tensor library needs.
_DENIED: Final[dict[str, tuple[int, int | None]]] = {
    # network
    "sendmsg": (46, 211), "sendmmsg": (307, 269),
    "io_uring_setup": (425, 425), "io_uring_enter": (426, 426),
    "io_uring_register": (427, 427),
    # other processes
    "ptrace": (101, 117), "process_vm_readv": (310, 270), "process_vm_writev": (311, 271), "kcmp": (312, 272),
    "pidfd_getfd": (438, 438), "pidfd_send_signal": (424, 424), "process_madvise": (440, 440),
    # namespaces, mounts and handles that pass by paths
    "mount": (165, 40), "umount2": (166, 39), "pivot_root": (155, 41), "chroot": (161, 51),
    "setns": (308, 268), "unshare": (272, 97), "open_tree": (428, 428), "move_mount": (429, 429),
    "fsopen": (430, 430), "fsconfig": (431, 431), "fsmount": (432, 432), "fspick": (433, 433),
    "mount_setattr": (442, 442), "open_tree_attr": (467, 467), "name_to_handle_at": (303, 264),
    "open_by_handle_at": (304, 265), "fanotify_init": (300, 262), "quotactl": (179, 60),
    "quotactl_fd": (443, 443), "acct": (163, 89), "swapon": (167, 224), "swapoff": (168, 225),
    # the kernel itself
    "bpf": (321, 280), "perf_event_open": (298, 241), "userfaultfd": (323, 282), "add_key": (248, 217),
    "request_key": (249, 218), "keyctl": (250, 219), "kexec_load": (246, 104), "kexec_file_load": (320, 294),
    "init_module": (175, 105), "finit_module": (313, 273), "delete_module": (176, 106), "syslog": (103, 116),
    "reboot": (169, 142), "iopl": (172, None), "ioperm": (173, None), "modify_ldt": (154, None),
    "sethostname": (170, 161), "setdomainname": (171, 162), "settimeofday": (164, 170),
    "clock_settime": (227, 112), "adjtimex": (159, 171), "clock_adjtime": (305, 266), "vhangup": (153, 58),
}  # fmt: skip

# Denied as well where the jail has no namespaces of its own: Landlock does not govern these, and they would reach
# the host's files (attributes), shared memory or other processes of the same user.
_DENIED_ON_SHARED_HOST: Final[dict[str, tuple[int, int | None]]] = {
    "chmod": (90, None), "fchmod": (91, 52), "fchmodat": (268, 53), "fchmodat2": (452, 452),
    "chown": (92, None), "fchown": (93, 55), "lchown": (94, None), "fchownat": (260, 54),
    "setxattr": (188, 5), "lsetxattr": (189, 6), "fsetxattr": (190, 7), "setxattrat": (463, 463),
    "removexattr": (197, 14), "lremovexattr": (198, 15), "fremovexattr": (199, 16),
    "removexattrat": (466, 466), "file_setattr": (469, 469),
    "utime": (132, None), "utimes": (235, None), "futimesat": (261, None), "utimensat": (280, 88),
    "inotify_init": (253, None), "inotify_init1": (294, 26),
    "shmget": (29, 194), "semget": (64, 190), "msgget": (68, 186), "mq_open": (240, 180),
    "setpriority": (141, 140), "sched_setscheduler": (144, 119), "sched_setparam": (142, 118),
    "sched_setattr": (314, 274), "ioprio_set": (251, 30), "migrate_pages": (256, 238),
    "move_pages": (279, 239), "process_mrelease": (448, 448),
}  # fmt: skip

# Signals to a process named by the first argument.
_SIGNALLING: Final = ((62, 129), (200, 130), (234, 131), (129, 138), (297, 240))
_CLONE, _CLONE3, _PRLIMIT64, _SECCOMP = (56, 220), (435, 435), (302, 261), (317, 277)
_SOCKET, _BIND, _CONNECT, _SENDTO = (41, 198), (49, 200), (42, 203), (44, 206)
_FALLOCATE, _MADVISE = (285, 47), (28, 233)
_PUNCHING = 0x1A  # FALLOC_FL_PUNCH_HOLE, COLLAPSE_RANGE, ZERO_RANGE
_ADVICE_FOR_ALL = (9, 20, 21, 25)  # MADV_REMOVE, COLD, PAGEOUT, COLLAPSE
_NEW_NAMESPACE_FLAGS = 0x7E020000  # CLONE_NEWNS, CGROUP, UTS, IPC, USER, PID, NET
_X32_BIT = 0x40000000

_LOAD, _EQUAL, _AT_LEAST, _ANY_BIT, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
_ALLOW, _KILL_PROCESS, _ERRNO = 0x7FFF0000, 0x80000000, 0x00050000
_NUMBER_AT, _ARCHITECTURE_AT = 0, 4
_FIRST_ARGUMENT_AT, _SECOND_ARGUMENT_AT, _THIRD_ARGUMENT_AT, _FIFTH_ARGUMENT_AT = (
    16,
    24,
    32,
    48,
)  # in struct seccomp_data


def _instruction(code: int, value: int, when_true: int = 0, when_false: int = 0) -> bytes:
    return struct.pack("HBBI", code, when_true, when_false, value & 0xFFFFFFFF)


def _filter_program(*, shared_host: bool, own_signals_only: bool, cuda: bool, peers: bool) -> bytes:
    """The BPF program: a straight line of "if it is this call, refuse", so that no jump can be miscounted.

    Its length costs nothing: the kernel caches which system calls a filter always allows.
    """
    deny = _instruction(_RETURN, _ERRNO | errno.EPERM)
    absent = _instruction(_RETURN, _ERRNO | errno.ENOSYS)
    load_first = _instruction(_LOAD, _FIRST_ARGUMENT_AT)
    reload = _instruction(_LOAD, _NUMBER_AT)
    code = [
        _instruction(_LOAD, _ARCHITECTURE_AT),
        _instruction(_EQUAL, 0xC00000B7 if ARM else 0xC000003E, 1, 0),
        _instruction(_RETURN, _KILL_PROCESS),  # 32-bit entry points have other numbers
        reload,
    ]
    if not ARM:
        code += [_instruction(_AT_LEAST, _X32_BIT, 0, 1), absent]
    refused = dict(_DENIED)
    if shared_host:
        refused |= _DENIED_ON_SHARED_HOST
    for numbers in refused.values():
        number = numbers[ARM]
        if number is not None:
            code += [_instruction(_EQUAL, number, 0, 1), deny]
    # CUDA starts by making a Unix socket and binding it to a name, and fails (error 304) where it may not. It may;
    # it can connect it to nothing and send nothing through it.
    if not cuda:
        code += [_instruction(_EQUAL, _BIND[ARM], 0, 1), deny]
    if not peers:
        code += [_instruction(_EQUAL, _CONNECT[ARM], 0, 1), deny]
    code += [_instruction(_EQUAL, _SOCKET[ARM], 0, 4), load_first]
    code += [_instruction(_EQUAL, 1 if cuda else 0xFFFF, 1, 0), deny, reload]
    # A datagram socket from socketpair could still be pointed at a service's socket: no address may be given.
    code += [_instruction(_EQUAL, _SENDTO[ARM], 0, 6), _instruction(_LOAD, _FIFTH_ARGUMENT_AT)]
    code += [_instruction(_EQUAL, 0, 0, 2), _instruction(_LOAD, _FIFTH_ARGUMENT_AT + 4)]
    code += [_instruction(_EQUAL, 0, 1, 0), deny, reload]
    # clone3 keeps its flags in memory, where a filter cannot look; on ENOSYS the C library falls back to clone.
    code += [_instruction(_EQUAL, _CLONE3[ARM], 0, 1), absent]
    code += [_instruction(_EQUAL, _CLONE[ARM], 0, 4), load_first]
    code += [_instruction(_ANY_BIT, _NEW_NAMESPACE_FLAGS, 0, 1), deny, reload]
    # Pages of memory that several processes share, taken away: the process timed next would fetch each anew.
    code += [_instruction(_EQUAL, _FALLOCATE[ARM], 0, 4), _instruction(_LOAD, _SECOND_ARGUMENT_AT)]
    code += [_instruction(_ANY_BIT, _PUNCHING, 0, 1), deny, reload]
    for advice in _ADVICE_FOR_ALL:
        code += [_instruction(_EQUAL, _MADVISE[ARM], 0, 4), _instruction(_LOAD, _THIRD_ARGUMENT_AT)]
        code += [_instruction(_EQUAL, advice, 0, 1), deny, reload]
    # Limits of other processes: only "this process" (0) may be named.
    code += [_instruction(_EQUAL, _PRLIMIT64[ARM], 0, 4), load_first]
    code += [_instruction(_EQUAL, 0, 1, 0), deny, reload]
    if own_signals_only:
        for numbers in _SIGNALLING:
            code += [_instruction(_EQUAL, numbers[ARM], 0, 4), load_first]
            code += [_instruction(_EQUAL, os.getpid(), 1, 0), deny, reload]
    code.append(_instruction(_RETURN, _ALLOW))
    return b"".join(code)


def filter_syscalls(*, shared_host: bool, cuda: bool, peers: bool = False) -> None:
    """Refuses the system calls of the two tables above, and sockets, for this process and all that it starts.

    `peers`: Unix sockets may be connected, to what the jail's own namespaces and files let them find.

    `shared_host`: the jail has no namespaces of its own. There, on kernels where Landlock does not yet govern
    signals, a process may also signal only itself (a compiler driver's child that aborts then ends by SIGSEGV).
    """
    own_signals_only = shared_host and landlock_abi() < SIGNAL_ABI
    program = _filter_program(shared_host=shared_host, own_signals_only=own_signals_only, cuda=cuda, peers=peers)
    instructions = ctypes.create_string_buffer(program, len(program))
    header = struct.pack("HxxxxxxQ", len(program) // 8, ctypes.addressof(instructions))
    prctl(PR_SET_NO_NEW_PRIVS, 1)
    # SPEC_ALLOW: before Linux 5.16 a filter would otherwise switch speculative store bypass off and slow every
    # kernel that we time by a few percent.
    spec_allow = 4
    syscall(_SECCOMP[ARM], 1, spec_allow, header)
