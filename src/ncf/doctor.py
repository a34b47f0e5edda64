"""What this machine offers: versions, devices, and which precisions are fast on them."""

import importlib
import platform
import shutil
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch

from ncf import __version__
from ncf.device import memory_of, physical_cores
from ncf.model.products import has_fast_bf16

LIBRARIES = ("torch", "numpy", "duckdb", "safetensors", "filelock", "tqdm")
EXTRAS = ("tensorboard",)


def examine() -> dict[str, Any]:
    """Name -> value, in the order in which a person wants to read them; JSON can hold it."""
    found: dict[str, Any] = {"ncf": __version__, "python": platform.python_version(), "system": platform.platform()}
    for name in LIBRARIES:
        found[name] = _version(name) or "missing: pip install ncf"
    for name in EXTRAS:
        found[f"{name} (extra)"] = _version(name) or f"not installed: pip install 'ncf[{name}]'"
    found["CPU cores (physical, usable)"] = physical_cores()
    found["memory"] = f"{memory_of(torch.device('cpu')) / 2**30:.1f} GiB"
    found["CPU instructions"] = torch.backends.cpu.get_cpu_capability()
    found["CPU bf16 products"] = "in hardware" if has_fast_bf16() else "no: --precision bf16 rounds, at fp32's speed"
    amx = getattr(torch.cpu, "_is_amx_tile_supported", None)
    found["CPU AMX"] = "yes" if amx is not None and amx() else "no"
    found["C compiler (for --compile)"] = next((name for name in ("cc", "gcc", "clang") if shutil.which(name)), "none")
    found["CUDA devices"] = torch.cuda.device_count()
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        found[f"cuda:{index}"] = f"{properties.name}, {properties.total_memory / 2**30:.1f} GiB, fp32, bf16, fp16"
    found["device picked by auto"] = "cuda" if torch.cuda.is_available() else "cpu"
    return found


def _version(name: str) -> str | None:
    try:
        importlib.import_module(name)
        return version(name)
    except (ImportError, PackageNotFoundError):
        return None
