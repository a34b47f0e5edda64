"""Every script in benchmarks/ can at least be loaded with the code as it is."""

import runpy
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
