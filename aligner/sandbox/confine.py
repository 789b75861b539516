"""Restrictions that a process puts on itself before it runs a model's program: limits, files, system calls.

They need no privileges and cannot be undone. Numbers: Linux' asm/unistd_64.h and asm-generic/unistd.h,
linux/landlock.h, linux/seccomp.h, linux/bpf_common.h. Runs inside the sandbox: imports nothing of the package.
"""

from __future__ import annotations

import ctypes
import os
import platform
import resource
import struct

# name, number on x86_64, on aarch64 (-: none). Allowed: compute, read files, wait, write to open files. Not allowed:
# processes, signals to others, sockets, mounts, modes and owners, traces, keys, io_uring. The kernel returns ENOSYS
# for all other calls, so that libraries can fall back on an older call.
CALLS = """
read 0 63; write 1 64; readv 19 65; writev 20 66; pread64 17 67; pwrite64 18 68; lseek 8 62; close 3 57;
close_range 436 436; open 2 -; openat 257 56; access 21 -; faccessat 269 48; faccessat2 439 439; stat 4 -; lstat 6 -;
fstat 5 80; newfstatat 262 79; statx 332 291; readlink 89 -; readlinkat 267 78; getcwd 79 17; chdir 80 49;
getdents64 217 61; ioctl 16 29; dup 32 23; dup2 33 -; dup3 292 24; pipe 22 -; pipe2 293 59; eventfd2 290 19;
poll 7 -; ppoll 271 73; select 23 -; pselect6 270 72; epoll_create1 291 20; epoll_ctl 233 21; epoll_wait 232 -;
epoll_pwait 281 22; mmap 9 222; munmap 11 215; mremap 25 216; mprotect 10 226; madvise 28 233; brk 12 214;
mincore 27 232; futex 202 98; futex_waitv 449 449; set_robust_list 273 99; get_robust_list 274 100;
set_tid_address 218 96; rseq 334 293; membarrier 324 283; sched_yield 24 124; sched_getaffinity 204 123;
getcpu 309 168; arch_prctl 158 -; exit 60 93; exit_group 231 94; restart_syscall 219 128; rt_sigaction 13 134;
rt_sigprocmask 14 135; rt_sigreturn 15 139; sigaltstack 131 132; pause 34 -; alarm 37 -; setitimer 38 103;
getitimer 36 102; nanosleep 35 101; clock_nanosleep 230 115; clock_gettime 228 113; clock_getres 229 114;
gettimeofday 96 169; time 201 -; times 100 153; getrandom 318 278; getpid 39 172; getppid 110 173; gettid 186 178;
getuid 102 174; geteuid 107 175; getgid 104 176; getegid 108 177; uname 63 160; sysinfo 99 179; getrusage 98 165;
getrlimit 97 163; umask 95 166; fadvise64 221 223
"""
# refused to the programs of a terminal, which may do all else: namespaces, memory and pace of other processes, keys,
# memory that no limit counts, calls of which a kernel has had many errors
REFUSED = """
unshare 272 97; setns 308 268; mount 165 40; umount2 166 39; pivot_root 155 41; chroot 161 51; open_tree 428 428;
move_mount 429 429; fsopen 430 430; fsconfig 431 431; fsmount 432 432; fspick 433 433; mount_setattr 442 442;
ptrace 101 117; process_vm_readv 310 270; process_vm_writev 311 271; pidfd_getfd 438 438; process_madvise 440 440;
process_mrelease 448 448; kcmp 312 272; migrate_pages 256 238; move_pages 279 239; setpriority 141 140;
sched_setparam 142 118; sched_setscheduler 144 119; sched_setaffinity 203 122; sched_setattr 314 274;
ioprio_set 251 30; add_key 248 217; request_key 249 218; keyctl 250 219; bpf 321 280; perf_event_open 298 241;
userfaultfd 323 282; io_uring_setup 425 425; io_uring_enter 426 426; io_uring_register 427 427;
name_to_handle_at 303 264; open_by_handle_at 304 265; fanotify_init 300 262; memfd_create 319 279;
memfd_secret 447 447; shmget 29 194; msgget 68 186; mq_open 240 180; syslog 103 116; quotactl 179 60; personality 135 92
"""
CLONE3, NEW_NAMESPACES = 435, 0x7E020000  # clone3 hides its flags: a library falls back on clone
FCNTL, CLONE, PRLIMIT, SOCKET = (72, 25), (56, 220), (302, 261), (41, 198)  # allowed for some arguments only
FAMILIES = (1, 2, 10, 16)  # of sockets: unix, IPv4, IPv6, netlink. Others reach past a network's namespace, as vsock
ARCHITECTURES = {"x86_64": (0, 0xC000003E), "aarch64": (1, 0xC00000B7)}  # column, AUDIT_ARCH_*
CLONE_THREAD = 0x10000
F_SETOWN, F_SETSIG, F_SETOWN_EX = 8, 10, 15  # would send a signal to any process
PR_SET_PDEATHSIG, PR_SET_DUMPABLE, PR_SET_SECCOMP, PR_CAPBSET_DROP, PR_SET_NO_NEW_PRIVS = 1, 4, 22, 24, 38
CAPABILITIES = 41  # that Linux knows; a further one would be an error of the kernel
LANDLOCK_CREATE, LANDLOCK_ADD, LANDLOCK_RESTRICT = 444, 445, 446  # of all architectures
RETURNS = (0x7FFF0000, 0x50026, 0x50001, 0x50061, 0x80000000)
ALLOW, ABSENT, REFUSE, NO_FAMILY, KILL = ((6, 0, 0, value) for value in RETURNS)
MS_BIND, MS_REC, CAPABILITY_VERSION = 4096, 16384, 0x20080522
READ_FILE, READ_DIR = 1 << 2, 1 << 3
FILE_RIGHTS = {1: 13, 2: 14, 3: 15, 4: 15, 5: 16}  # bits that a version of Landlock knows; later ones as 5

_libc = ctypes.CDLL(None, use_errno=True)


def _call(what: str, function, *args) -> int:
    code = function(*args)
    if code < 0:
        error = ctypes.get_errno()
        raise OSError(error, f"{what}: {os.strerror(error)}")
    return code


def hide() -> None:
    """Let no process without rights look into this one, or trace it."""
    _call("prctl", _libc.prctl, PR_SET_DUMPABLE, 0, 0, 0, 0)


def die_with_parent(parent: int) -> None:
    _call("prctl", _libc.prctl, PR_SET_PDEATHSIG, 9, 0, 0, 0)
    if os.getppid() != parent:
        os._exit(1)


def leave_other_files(readable: list[str]) -> None:
    """Restrict the file system to these paths, with the rights of a user namespace, then give the rights up.

    Unlike with Landlock, names and sizes of other files cannot be seen either.
    """
    root = "/proc"  # an existing folder with nothing readable
    mount("tmpfs", root, "tmpfs", 0)
    for path in (*readable, "/dev/null"):
        target = root + path
        os.makedirs(target if os.path.isdir(path) else os.path.dirname(target), exist_ok=True)
        if not os.path.isdir(path):
            os.close(os.open(target, os.O_CREAT))
        mount(path, target, None, MS_BIND | MS_REC)
    os.chroot(root)
    os.chdir("/")
    give_up_rights()


def give_up_rights(forever: bool = False) -> None:
    """Give up all capabilities; `forever`: also those that the start of a program would bring back."""
    for number in range(CAPABILITIES if forever else 0):
        _call("prctl", _libc.prctl, PR_CAPBSET_DROP, number, 0, 0, 0)
    _call("capset", _libc.capset, struct.pack("=Ii", CAPABILITY_VERSION, 0), bytes(24))


def mount(source: str, target: str, kind: str | None, flags: int, options: str | None = None) -> None:
    texts = [None if text is None else text.encode() for text in (source, target, kind)]
    data = None if options is None else options.encode()
    _call(f"mount {target}", _libc.mount, *texts, ctypes.c_ulong(flags), data)


def limits(cpu_s: int, memory_bytes: int) -> None:
    """Set the limits. No file may grow by a byte, so a program's only output is its standard output.

    The kernel counts CPU time for this limit in ticks and may be far off. `runner.py` reads the exact clock; this is
    the fallback.
    """
    for kind, value in (
        (resource.RLIMIT_CPU, 2 * cpu_s + 1),
        (resource.RLIMIT_AS, memory_bytes),
        (resource.RLIMIT_FSIZE, 0),
        (resource.RLIMIT_NOFILE, 64),
        (resource.RLIMIT_CORE, 0),
    ):
        resource.setrlimit(kind, (value, value))


def landlock_version() -> int:
    """Return the version of Landlock; 0 if the kernel has none."""
    return max(0, _libc.syscall(LANDLOCK_CREATE, None, 0, 1))


def landlock(readable: list[str]) -> None:
    """Allow only to read files below `readable`: no other file is opened, none made or changed; no TCP; no signal
    leaves."""
    version = landlock_version()
    rights = (1 << FILE_RIGHTS[min(version, 5)]) - 1
    net, scoped = (3 if version >= 4 else 0), (3 if version >= 6 else 0)
    fields = struct.pack("=QQQ", rights, net, scoped)[: 8 if version < 4 else 16 if version < 6 else 24]
    _call("prctl", _libc.prctl, PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    rules = _call("landlock_create_ruleset", _libc.syscall, LANDLOCK_CREATE, fields, len(fields), 0)
    for path in readable:
        folder_fd = os.open(path, os.O_PATH)
        allowed = READ_FILE | (READ_DIR if os.path.isdir(path) else 0)
        _call("landlock_add_rule", _libc.syscall, LANDLOCK_ADD, rules, 1, struct.pack("=Qi", allowed, folder_fd), 0)
        os.close(folder_fd)
    _call("landlock_restrict_self", _libc.syscall, LANDLOCK_RESTRICT, rules, 0)
    os.close(rules)


def seccomp(terminal: bool = False) -> None:
    """Allow only the system calls of `CALLS`, threads, and limits of the process itself; in a terminal all but those
    of `REFUSED`, new namespaces, limits of other processes, and sockets of other families than `FAMILIES`."""
    if platform.machine() not in ARCHITECTURES:
        raise OSError(f"no table of system calls for {platform.machine()}, only for {', '.join(ARCHITECTURES)}")
    column, architecture = ARCHITECTURES[platform.machine()]
    numbers = [entry.split()[1 + column] for entry in (REFUSED if terminal else CALLS).split(";")]
    make = _refusals if terminal else _filter
    code = make(architecture, column, [int(number) for number in numbers if number != "-"])
    text = ctypes.create_string_buffer(code, len(code))
    # struct sock_fprog: count, pointer
    program = struct.pack("@HP", len(code) // 8, ctypes.addressof(text))
    _call("prctl", _libc.prctl, PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    _call("seccomp", _libc.prctl, PR_SET_SECCOMP, 2, program, 0, 0)


def _filter(architecture: int, column: int, numbers: list[int]) -> bytes:
    """Return instructions of classic BPF over struct seccomp_data: nr at 0, arch at 4, arguments from 16, 8 bytes
    each."""
    code = [*_of_architecture(architecture)]
    for number in numbers:
        code += [_equal(number, 0, 1), ALLOW]
    code += [_equal(CLONE[column], 0, 4), _load(16), (0x45, 0, 1, CLONE_THREAD), ALLOW, ABSENT]
    code += [_equal(PRLIMIT[column], 0, 4), _load(16), _equal(0, 0, 1), ALLOW, ABSENT]
    code += [_equal(FCNTL[column], 0, 6), _load(24)]
    code += [_equal(F_SETOWN, 3, 0), _equal(F_SETSIG, 2, 0), _equal(F_SETOWN_EX, 1, 0), ALLOW, ABSENT]
    return _bytes([*code, ABSENT])


def _refusals(architecture: int, column: int, numbers: list[int]) -> bytes:
    code = [*_of_architecture(architecture)]
    for number in numbers:
        code += [_equal(number, 0, 1), REFUSE]
    code += [_equal(CLONE3, 0, 1), ABSENT]
    code += [_equal(CLONE[column], 0, 4), _load(16), (0x45, 0, 1, NEW_NAMESPACES), REFUSE, ALLOW]
    code += [_equal(PRLIMIT[column], 0, 4), _load(16), _equal(0, 1, 0), REFUSE, ALLOW]
    code += [_equal(SOCKET[column], 0, len(FAMILIES) + 3), _load(16)]
    code += [_equal(family, len(FAMILIES) - index, 0) for index, family in enumerate(FAMILIES)]
    return _bytes([*code, NO_FAMILY, ALLOW, ALLOW])


def _of_architecture(architecture: int) -> list[tuple]:
    """Kill at calls of another architecture, or of x32, whose numbers are others; then load the number."""
    return [_load(4), _equal(architecture, 1, 0), KILL, _load(0), (0x35, 0, 1, 0x40000000), KILL]


def _load(at: int) -> tuple:
    return (0x20, 0, 0, at)


def _equal(value: int, then: int, otherwise: int) -> tuple:
    return (0x15, then, otherwise, value)


def _bytes(code: list[tuple]) -> bytes:
    return b"".join(struct.pack("=HBBI", *each) for each in code)
