"""Which device computes, with how many threads, and its memory."""

import os
import platform
import resource
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from ncf.errors import InputError
from ncf.parallel.group import SINGLE, ProcessGroup


def backend_for(name: str) -> str:
    """The collectives of processes that compute on the device `name`: gloo, and NCCL between GPUs."""
    on_gpu = (name == "auto" or name.startswith("cuda")) and torch.cuda.is_available()
    return "cpu:gloo,cuda:nccl" if on_gpu else "gloo"


def pick_device(name: str, group: ProcessGroup = SINGLE) -> torch.device:
    """The device for `auto`, `cpu`, `cuda` or `cuda:N`; `auto` is the first GPU where there is one.

    Of several processes on a machine each takes a GPU of its own. Raises InputError where the name or the device is
    unknown.
    """
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
    except RuntimeError:
        raise InputError(f"--device must be auto, cpu, cuda or cuda:N: got {name!r}") from None
    if device.type not in ("cpu", "cuda") or (device.type == "cpu" and device.index):
        raise InputError(f"--device must be auto, cpu, cuda or cuda:N: got {name!r}")
    if device.type == "cpu":
        return device
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if device.index is not None and group.local_world > 1:
        raise InputError(f"--device {name} cannot serve {group.local_world} processes: use --device cuda")
    index = group.local_rank if device.index is None else device.index
    if index >= count:
        raise InputError(f"--device cuda:{index} is not there: torch sees {count} CUDA devices; use --device cpu")
    return torch.device("cuda", index)


def configure_cpu(group: ProcessGroup = SINGLE) -> None:
    """Let torch use one thread per physical core of this process's share, and flush denormal numbers to zero.

    OMP_NUM_THREADS wins. Adam is some 16 times slower on denormals, which rows that no step names reach in 67 steps.
    """
    torch.set_flush_denormal(True)
    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(max(1, physical_cores() // group.share))


@contextmanager
def configured(device: torch.device, group: ProcessGroup = SINGLE) -> Iterator[None]:
    """Set torch up for computing on `device`, and back at the end, as the host program had it."""
    if device.type == "cuda":
        with torch.cuda.device(device):
            yield
        return
    threads, flushed = torch.get_num_threads(), bool(torch.tensor(1e-39) * 1 == 0)
    configure_cpu(group)
    try:
        yield
    finally:
        torch.set_flush_denormal(flushed)
        torch.set_num_threads(threads)


def physical_cores() -> int:
    """Physical cores among those that this process may run on; logical ones where the system does not tell."""
    if not hasattr(os, "sched_getaffinity"):
        return os.cpu_count() or 1
    usable = os.sched_getaffinity(0)
    siblings = set()
    for core in usable:
        file = Path(f"/sys/devices/system/cpu/cpu{core}/topology/thread_siblings_list")
        siblings.add(file.read_text().strip() if file.exists() else str(core))
    return max(1, len(siblings))


def memory_of(device: torch.device) -> int:
    """The device's memory in bytes, all of it."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def peak_memory(device: torch.device) -> int:
    """The most bytes that this process has held so far, or on a GPU since its statistics were last reset."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else 1024 * peak


def device_name(device: torch.device) -> str:
    """The GPU's name, or the CPU's and how many physical cores of it may be used."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    file = Path("/proc/cpuinfo")
    lines = file.read_text().splitlines() if file.exists() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    cores = physical_cores()
    return f"{(names or [platform.machine()])[0]}, {cores} core{'s' * (cores > 1)}"


def check_fits(device: torch.device, needed: int, what: str) -> None:
    """Raise InputError, with both sizes, where `needed` bytes for `what` are more than the device has."""
    has = memory_of(device)
    if needed > has:
        raise InputError(
            f"{what} needs about {needed / 2**30:.1f} GiB and {device.type} has {has / 2**30:.1f} GiB: use a larger "
            "device, a smaller --batch-size, or fewer --factors and --layers"
        )
