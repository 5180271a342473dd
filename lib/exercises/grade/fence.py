"""A process of its own for code that nobody has read: no network, no disk to write, limits. Linux only.

Namespaces of the user, of mounts, processes, network and shared memory. They need no root where the system
allows that; many containers do not.
"""

import contextlib
import ctypes
import os
import resource
import signal
from pathlib import Path

MOST_DISK = 1 << 30  # bytes of the scratch folder, which is in memory, and of one file
MOST_PROCESSES = 200
NO_FENCE = "no fence: "
_NEW_USER, _NEW_MOUNTS = 0x10000000, 0x00020000
_NEW_PROCESSES, _NEW_NETWORK, _NEW_IPC = 0x20000000, 0x40000000, 0x08000000
_MS_RDONLY, _MS_NOSUID, _MS_NODEV, _MS_BIND, _MS_REC, _MS_PRIVATE = 1, 2, 4, 0x1000, 0x4000, 0x40000
_MOUNT_SETATTR, _AT_FDCWD, _AT_RECURSIVE, _ATTR_RDONLY = 442, -100, 0x8000, 1
_PR_SET_PDEATHSIG, _PR_CAPBSET_DROP, _PR_SET_NO_NEW_PRIVS = 1, 24, 38

_libc = ctypes.CDLL(None, use_errno=True)


class Fenceless(OSError):
    """This system does not allow a fence; the message says which step failed."""


def _must(result, step):
    if result:
        raise Fenceless(f"{step}: {os.strerror(ctypes.get_errno())}")


def _unshare(flags):
    """New namespaces, in which this user has the same number as before and may do everything."""
    uid, gid = os.getuid(), os.getgid()
    _must(_libc.unshare(_NEW_USER | flags), "new namespaces")
    try:
        Path("/proc/self/setgroups").write_text("deny")
        Path("/proc/self/uid_map").write_text(f"{uid} {uid} 1")
        Path("/proc/self/gid_map").write_text(f"{gid} {gid} 1")
    except OSError as error:
        raise Fenceless(f"a map of user numbers: {error.strerror}") from None


def _mount(kind, target, flags, options=None, source=None):
    args = [None if a is None else str(a).encode() for a in (source or kind, target, kind)]
    options = options and options.encode()
    _must(_libc.mount(*args, ctypes.c_ulong(flags), options), f"mount on {target}")


def _read_only():
    """No mount can be written any more, those below / included."""
    attributes = (ctypes.c_uint64 * 4)(_ATTR_RDONLY)  # set, clear, propagation, user namespace
    size = ctypes.c_size_t(ctypes.sizeof(attributes))
    args = (_MOUNT_SETATTR, _AT_FDCWD, b"/", _AT_RECURSIVE, ctypes.byref(attributes), size)
    _must(_libc.syscall(*args), "a read-only file system")


def _shut(scratch, hidden):
    """From here on: `scratch` can be written, what is `hidden` is empty, and there is no network."""
    _unshare(_NEW_MOUNTS | _NEW_PROCESSES | _NEW_NETWORK | _NEW_IPC)
    _mount(None, "/", _MS_REC | _MS_PRIVATE)
    _read_only()
    for path in hidden:
        if path.is_dir():
            _mount("tmpfs", path, _MS_RDONLY)
        else:
            _mount(None, path, _MS_BIND, source="/dev/null")
    for folder in (scratch, "/dev/shm"):
        if Path(folder).is_dir():
            _mount("tmpfs", folder, _MS_NOSUID | _MS_NODEV, f"size={MOST_DISK},mode=700")


def _lock():
    """The first process of the new namespace: its mounts cannot be undone by what it starts."""
    # a container may hide parts of /proc, and then it stays as it is
    with contextlib.suppress(Fenceless):
        _mount("proc", "/proc", _MS_NOSUID | _MS_NODEV)
    _unshare(_NEW_MOUNTS)  # mounts of another user namespace are locked
    _libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _no_capabilities():
    """Root of the namespace is as powerless as anybody."""
    for capability in range(64):  # those that this kernel does not have are an error, and no harm
        _libc.prctl(_PR_CAPBSET_DROP, capability, 0, 0, 0)
    header, none = (ctypes.c_uint32 * 2)(0x20080522, 0), (ctypes.c_uint32 * 6)()
    _must(_libc.capset(header, none), "no capabilities")


def _limit(timeout_s, memory):
    limits = {
        "CORE": 0,
        "CPU": int(timeout_s) + 10,
        "FSIZE": MOST_DISK,
        # threads count, and on old systems this user's other processes
        "NPROC": 4 * MOST_PROCESSES,
        "AS": memory + (64 << 30),  # some checks reserve addresses and touch few of them
    }
    for name, most in limits.items():
        kind = getattr(resource, f"RLIMIT_{name}")
        hard = resource.getrlimit(kind)[1]
        most = most if hard == resource.RLIM_INFINITY else min(most, hard)
        resource.setrlimit(kind, (most, most))


def _quiet(pipe):
    """Nothing is read or printed, and of the open files only `pipe` stays; its new number."""
    # where memory runs out all the same, this process goes first
    with contextlib.suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("1000")
    null = os.open(os.devnull, os.O_RDWR)
    for stream in (0, 1, 2):
        os.dup2(null, stream)
    pipe = os.dup2(os.dup(pipe), 3)
    os.closerange(4, os.sysconf("SC_OPEN_MAX"))
    return pipe


def _in_a_child(work, pipe):
    """Run `work()` in a child, wait for it, and end as it ended."""
    child = os.fork()
    if not child:
        _finish(work, pipe)
    _, status = os.waitpid(child, 0)
    code = os.waitstatus_to_exitcode(status)
    os._exit(code if code >= 0 else 128 - code)


def _finish(work, pipe):
    try:
        work()
        os._exit(0)
    except Fenceless as error:
        os.write(pipe, f"{NO_FENCE}{error}".encode())
    finally:
        os._exit(70)


def start(work, *, scratch, hidden, timeout_s, memory, safe=True):
    """Start `work(pipe)` behind the fence. (process, where to read what it writes).

    safe=False: limits alone, for a system that allows no fence.
    """
    out, pipe = os.pipe()
    process = os.fork()
    if process:
        os.close(pipe)
        os.set_blocking(out, False)
        return process, out
    try:
        os.setsid()
        _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        pipe = _quiet(pipe)
    except OSError:
        os._exit(70)

    def inside():
        _limit(timeout_s, memory)
        os.chdir(scratch)
        work(pipe)

    def locked():
        _lock()
        _no_capabilities()
        _in_a_child(inside, pipe)

    def fenced():
        _shut(scratch, hidden)
        _in_a_child(locked, pipe)

    return _finish(fenced if safe else inside, pipe)


def reason_against(scratch, hidden):
    """Why this system allows no fence; '' where it does."""
    process, out = start(
        lambda pipe: os.write(pipe, b"fenced"),
        scratch=scratch,
        hidden=hidden,
        timeout_s=10,
        memory=1 << 30,
    )
    os.waitpid(process, 0)
    with open(out, "rb") as answer:
        text = (answer.read() or b"it ended without a word").decode()
    return "" if text == "fenced" else text.removeprefix(NO_FENCE)


def family(process):
    """The numbers of a process and of all that it started."""
    members = [process]
    for member in members:
        for children in Path(f"/proc/{member}/task").glob("*/children"):
            with contextlib.suppress(OSError):  # it has ended meanwhile
                members += map(int, children.read_text().split())
    return members


def bytes_held(processes):
    """The memory that processes hold; what two share counts twice."""
    pages = 0
    for process in processes:
        with contextlib.suppress(OSError, IndexError):
            pages += int(Path(f"/proc/{process}/statm").read_text().split()[1])
    return pages * resource.getpagesize()


def end(process):
    """End a process and all that it started; its exit status."""
    members = family(process)
    with contextlib.suppress(OSError):
        os.killpg(process, signal.SIGKILL)
    for member in members:
        with contextlib.suppress(OSError):
            os.kill(member, signal.SIGKILL)
    return os.waitpid(process, 0)[1]
