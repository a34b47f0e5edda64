"""Which device computes, with how many threads, and whether a job fits its memory."""

import os
from pathlib import Path

import torch

from ncf.errors import InputError


def pick_device(name: str) -> torch.device:
    """The device for `auto`, `cpu`, `cuda` or `cuda:N`; `auto` is the first GPU where there is one.

    Raises InputError where the name or the device is unknown. On a CPU, denormal numbers are flushed to zero from
    here on (Adam is some 16 times slower on them, and rows untouched for some 67 steps get there), and torch uses
    one thread for each physical core that the process may use.
    """
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
    except RuntimeError:
        raise InputError(f"--device must be auto, cpu, cuda or cuda:N: got {name!r}") from None
    if device.type not in ("cpu", "cuda") or (device.type == "cpu" and device.index):
        raise InputError(f"--device must be auto, cpu, cuda or cuda:N: got {name!r}")
    if device.type == "cuda":
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
        if (device.index or 0) >= count:
            raise InputError(f"--device {name} is not there: torch sees {count} CUDA devices; use --device cpu")
        return torch.device("cuda", device.index or 0)
    torch.set_flush_denormal(True)
    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(physical_cores())
    return device


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


def check_fits(device: torch.device, needed: int, what: str) -> None:
    """Raise InputError, with both sizes, where `needed` bytes for `what` are more than the device has."""
    has = memory_of(device)
    if needed > has:
        raise InputError(
            f"{what} needs about {needed / 2**30:.1f} GiB and {device} has {has / 2**30:.1f} GiB: use a larger device, "
            "a smaller --batch-size, or fewer --factors and --layers"
        )
