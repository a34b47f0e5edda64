"""Every script in benchmarks/ can at least be loaded with the code as it is, and a GPU's checks pass."""

import os
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[1] / "benchmarks"
OTHERS = {"run_tensorflow.py", "run_recbole.py", "run_als.py"}  # what they import is in environments of their own


@pytest.mark.parametrize(
    "script",
    [path for path in (*FOLDER.glob("*.py"), *FOLDER.glob("peers/*.py")) if path.name not in OTHERS],
    ids=lambda path: path.name,
)
def test_it_loads(script, monkeypatch):
    monkeypatch.setattr(sys, "path", [str(script.parent), *sys.path])
    monkeypatch.setattr(sys, "argv", [str(script)])
    monkeypatch.setenv("THP_MEM_ALLOC_ENABLE", "0")  # some set it; it is put back afterwards
    before = set(sys.modules)
    assert runpy.run_path(str(script), run_name="loaded")["__doc__"]
    for name in set(sys.modules) - before:
        if name in {"arm", "gpu_checks"} or name.startswith("peers"):
            del sys.modules[name]


def test_the_checks_of_a_gpu_pass_on_a_cpu_with_torch_alone():
    """As on a machine that has a checkout and torch: whatever else ncf depends on cannot be imported."""
    script = """
import sys
for name in ("numpy", "duckdb", "safetensors", "tqdm", "pandas", "polars", "pyarrow"):
    sys.modules[name] = None
import gpu
import torch
torch.set_num_threads(1)
gpu.check_all(torch.device("cpu"), ("fp32", "bf16", "fp16"))
sys.exit(bool(gpu.failures))
"""
    done = subprocess.run(
        [sys.executable, "-c", script],
        cwd=FOLDER,
        env={key: value for key, value in os.environ.items() if key != "PYTHONPATH"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("ok     ") == len(done.stdout.splitlines()) >= 14
