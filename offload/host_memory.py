"""How much host memory a process may use, and what holds it to less than the machine has."""

from __future__ import annotations

import contextlib
import re
from dataclasses import dataclass
from pathlib import Path

GIB = 2**30

_CGROUPS = Path("/sys/fs/cgroup")


@dataclass(frozen=True)
class HostMemory:
    """Bytes.

    Attributes:
        total: of the machine.
        available: that programs can still have, without swapping.
        limit: of the control group (container, job, systemd slice) that this process is in; None for no limit.
        used_of_limit: what counts towards that limit already, what the kernel can drop at once left out.
        locked_limit: ``ulimit -l``, what this process may lock itself; None for no limit. CUDA's driver locks pages on
            its own account, io_uring and RDMA do not.
        is_wsl: Windows' Linux, whose driver page-locks at most a part of what it has.
    """

    total: int
    available: int
    limit: int | None
    used_of_limit: int
    locked_limit: int | None
    is_wsl: bool

    @property
    def usable(self) -> int:
        """What this process can still allocate before something is killed or swapped."""
        return self.available if self.limit is None else max(0, min(self.available, self.limit - self.used_of_limit))


def host_memory() -> HostMemory:
    """Of this process, now."""
    import psutil

    memory = psutil.virtual_memory()
    limit, used = cgroup_limit()
    return HostMemory(memory.total, memory.available, limit, used, _limit("RLIMIT_MEMLOCK"), _is_wsl())


def why_not_locked(memory: HostMemory, nbytes: int) -> str:
    """What most likely kept memory from being page-locked, and the way out.

    Args:
        memory: of this process, now.
        nbytes: that could not be locked.
    """
    if memory.is_wsl:
        return (
            "This is WSL 2, whose driver page-locks about half of its memory: give it more in "
            "%UserProfile%\\.wslconfig ([wsl2] memory=48GB, then `wsl --shutdown`), or boot Linux"
        )
    if memory.limit is not None and memory.usable < nbytes:
        return (
            f"Its control group may have {memory.limit / GIB:.1f} GiB, of which {memory.usable / GIB:.1f} are left: "
            "give the container or the job more (docker run --memory, #SBATCH --mem)"
        )
    if memory.usable < nbytes:
        return f"The host has {memory.usable / GIB:.1f} GiB left: end what else takes its memory"
    if memory.locked_limit is not None and memory.locked_limit < nbytes:
        return (
            f"`ulimit -l` is {memory.locked_limit / GIB:.2g} GiB: raise it (`ulimit -l unlimited`, memlock in "
            "/etc/security/limits.conf, docker run --ulimit memlock=-1)"
        )
    return "The driver refused it though the host has room: `tune doctor` tells how much it locks"


@dataclass(frozen=True)
class Use:
    """Bytes of this process.

    Attributes:
        resident: in memory.
        mapped: of its address space, ``ulimit -v`` counts them.
    """

    resident: int
    mapped: int


def use_of_this_process() -> Use:
    """Now."""
    import psutil

    memory = psutil.Process().memory_info()
    return Use(memory.rss, memory.vms)


def allowance(use: Use, *, processes: int = 1) -> int:
    """Bytes that this process may have in memory in all, which has ``use`` now.

    Of a limit of the address space (``ulimit -v``), what is mapped and not resident is gone. What the host and the
    control group have left is for all of ``processes`` that take as much as this one.
    """
    limit = _limit("RLIMIT_AS")
    least = host_memory().usable // processes + use.resident
    return least if limit is None else min(least, max(use.resident, limit - use.mapped + use.resident))


def oom_kills(root: Path = _CGROUPS, of_process: Path = Path("/proc/self/cgroup")) -> int | None:
    """How often the kernel has killed a process of this one's control group for want of memory; None if it is not told.

    Args:
        root: where control groups are mounted.
        of_process: the file that tells this process's groups; cgroups(7).
    """
    for folder, _ in _groups(root, of_process):
        for name in ("memory.events", "memory.oom_control"):
            with contextlib.suppress(OSError):
                found = re.search(r"^oom_kill (\d+)$", (folder / name).read_text(), re.M)
                if found:
                    return int(found[1])
    return None


def kernel_killed(before: int | None, now: int | None) -> bool | None:
    """Whether the kernel has killed a process for want of memory between two :func:`oom_kills`; None if that is not
    told."""
    return None if before is None or now is None else now > before


def who_killed(before: int | None, now: int | None) -> str:
    """In words, who killed a process between two :func:`oom_kills`."""
    killed = kernel_killed(before, now)
    if killed is None:
        return "probably the host's memory ran out"
    if killed:
        return "the kernel killed it because the host's memory ran out"
    return "not by the kernel for want of memory, which counts such kills"


def cgroup_limit(root: Path = _CGROUPS, of_process: Path = Path("/proc/self/cgroup")) -> tuple[int | None, int]:
    """The least memory limit of the control groups around this process, and what counts towards it already.

    Args:
        root: where control groups are mounted.
        of_process: the file that tells this process's groups; cgroups(7).
    """
    least: int | None = None
    used = 0
    for folder, names in _groups(root, of_process):
        limit, now = (_number(folder / name) for name in names[:2])
        # The first version says "no limit" with a number above any machine's memory.
        if limit is not None and limit < 2**60 and (least is None or limit < least):
            least, used = limit, max(0, (now or 0) - _reclaimable(folder))
    return least, used


def _groups(root: Path, of_process: Path) -> list[tuple[Path, tuple[str, str]]]:
    """This process's groups and all around them, each with the names of its limit and its use."""
    found = []
    try:
        lines = of_process.read_text().splitlines()
    except OSError:
        return []
    for line in lines:
        number, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if number == "0":
            top, names = root, ("memory.max", "memory.current")
        elif "memory" in controllers.split(","):
            top, names = root / "memory", ("memory.limit_in_bytes", "memory.usage_in_bytes")
        else:
            continue
        folder = top / path.lstrip("/")
        # In a container the path is the host's and the mount is the group itself.
        around = [folder, *folder.parents] if folder.is_dir() else [top]
        found += [(each, names) for each in around if each == top or top in each.parents]
    return found


def _reclaimable(folder: Path) -> int:
    """File pages that the kernel drops before it kills."""
    with contextlib.suppress(OSError):
        for line in (folder / "memory.stat").read_text().splitlines():
            name, _, value = line.partition(" ")
            if name in ("inactive_file", "total_inactive_file"):
                return int(value)
    return 0


def _number(path: Path) -> int | None:
    try:
        return int(path.read_text())
    except (OSError, ValueError):  # "max" is no limit
        return None


def _limit(name: str) -> int | None:
    try:
        import resource
    except ImportError:
        return None
    soft, _ = resource.getrlimit(getattr(resource, name))
    return None if soft == resource.RLIM_INFINITY else soft


def _is_wsl() -> bool:
    with contextlib.suppress(OSError):
        return "microsoft" in Path("/proc/version").read_text().lower()
    return False
