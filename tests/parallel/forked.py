"""Run several programs at once, each in a process that is forked after MODULES are loaded, which takes seconds.

    python forked.py MODULES

Standard input holds a JSON object of them: name -> environment and arguments, the first of which is `ncf` or the path
of a Python program. Standard output gets name -> exit status, output and seconds.
"""

import importlib
import json
import os
import runpy
import sys
import time
from pathlib import Path


def become(name: str, environ: dict[str, str], arguments: list[str]) -> None:
    """Run a program in this process."""
    os.environ.update(environ)
    for descriptor, kind in ((1, "out"), (2, "err")):
        os.dup2(os.open(f"{name}.{kind}", os.O_WRONLY | os.O_CREAT, 0o600), descriptor)
    sys.argv = arguments
    if arguments[0] == "ncf":
        runpy.run_module("ncf", run_name="__main__")
    else:
        runpy.run_path(arguments[0], run_name="__main__")
    sys.exit(0)


def run_all() -> None:
    for module in sys.argv[1:]:
        importlib.import_module(module)
    running, found, begin = {}, {}, time.monotonic()
    for name, wanted in json.load(sys.stdin).items():
        if not (process := os.fork()):
            become(name, **wanted)
        running[process] = name
    while running:
        process, status = os.wait()
        name = running.pop(process)
        out, err = (Path(f"{name}.{kind}").read_text() for kind in ("out", "err"))
        seconds = time.monotonic() - begin
        found[name] = {"status": os.waitstatus_to_exitcode(status), "seconds": seconds, "out": out, "err": err}
    sys.stdout.write(json.dumps(found))


if __name__ == "__main__":
    run_all()
