"""The system call filter of a bubblewrap box: what no machine-learning program needs and an attacker would like."""

from __future__ import annotations

import errno
import os
import struct

# Numbers for (x86_64, aarch64); -1 where an architecture lacks the call.
_DENIED: dict[str, tuple[int, int]] = {
    # namespaces and mounts: a nested user namespace would hand back every capability
    "unshare": (272, 97), "setns": (308, 268), "mount": (165, 40), "umount2": (166, 39), "pivot_root": (155, 41),
    "open_tree": (428, 428), "move_mount": (429, 429), "fsopen": (430, 430), "fsconfig": (431, 431),
    "fsmount": (432, 432), "fspick": (433, 433), "mount_setattr": (442, 442), "chroot": (161, 51),
    # other processes, and the kernel's large attack surfaces
    "ptrace": (101, 117), "process_vm_readv": (310, 270), "process_vm_writev": (311, 271), "kcmp": (312, 272),
    "pidfd_getfd": (438, 438), "bpf": (321, 280), "perf_event_open": (298, 241), "userfaultfd": (323, 282),
    "io_uring_setup": (425, 425), "io_uring_enter": (426, 426), "io_uring_register": (427, 427),
    "add_key": (248, 217), "request_key": (249, 218), "keyctl": (250, 219),
    "name_to_handle_at": (303, 264), "open_by_handle_at": (304, 265), "lookup_dcookie": (212, 18),
    # the machine
    "init_module": (175, 105), "finit_module": (313, 273), "delete_module": (176, 106), "kexec_load": (246, 104),
    "kexec_file_load": (320, 294), "reboot": (169, 142), "swapon": (167, 224), "swapoff": (168, 225),
    "acct": (163, 89), "quotactl": (179, 60), "quotactl_fd": (443, 443), "syslog": (103, 116), "iopl": (172, -1),
    "ioperm": (173, -1), "modify_ldt": (154, -1), "settimeofday": (164, 170), "clock_settime": (227, 112),
    "adjtimex": (159, 171), "clock_adjtime": (305, 266), "sethostname": (170, 161), "setdomainname": (171, 162),
    "personality": (135, 92), "vhangup": (153, 58),
}  # fmt: skip
_ARCHES = {"x86_64": (0, 0xC000003E, 56), "aarch64": (1, 0xC00000B7, 220)}  # column, AUDIT_ARCH, number of clone
_CLONE3 = 435
_NEW_NAMESPACES = 0x7E020000  # CLONE_NEW{NS,CGROUP,UTS,IPC,USER,PID,NET}
_LOAD, _JUMP_EQ, _JUMP_GE, _JUMP_SET, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
_ALLOW, _ERRNO, _KILL = 0x7FFF0000, 0x00050000, 0x80000000
_X32 = 0x40000000  # system calls by another numbering


def program() -> bytes | None:
    """The filter as bubblewrap takes it (classic BPF), or None for an architecture that it isn't written for."""
    machine = os.uname().machine
    if machine not in _ARCHES:
        return None
    column, audit, clone = _ARCHES[machine]
    denied = sorted(number for pair in _DENIED.values() if (number := pair[column]) >= 0)
    code = [(_LOAD, 0, 0, 4), (_JUMP_EQ, 1, 0, audit), (_RETURN, 0, 0, _KILL), (_LOAD, 0, 0, 0)]
    code += [(_JUMP_GE, 0, 1, _X32), (_RETURN, 0, 0, _ERRNO | errno.ENOSYS)]
    for number in denied:
        code += [(_JUMP_EQ, 0, 1, number), (_RETURN, 0, 0, _ERRNO | errno.EPERM)]
    # clone3 takes its flags by pointer, which a filter can't read: without it, the C library uses clone.
    code += [(_JUMP_EQ, 0, 1, _CLONE3), (_RETURN, 0, 0, _ERRNO | errno.ENOSYS)]
    code += [(_JUMP_EQ, 0, 3, clone), (_LOAD, 0, 0, 16), (_JUMP_SET, 0, 1, _NEW_NAMESPACES)]
    code += [(_RETURN, 0, 0, _ERRNO | errno.EPERM), (_RETURN, 0, 0, _ALLOW)]
    return b"".join(struct.pack("HBBI", *instruction) for instruction in code)
