"""`--devices N`: start N processes of this command on this machine."""

import logging
import secrets
import signal
import sys
import tempfile
from collections.abc import Mapping, Sequence
from typing import Any

from ncf.errors import RunError
from ncf.parallel.environment import LAUNCHED


def launch(devices: int, arguments: Sequence[str]) -> int:
    """Run `ncf` with `arguments` in `devices` processes; the exit status of the one that failed, or 0.

    Torch's elastic launcher starts them, and ends all where one ends badly. A process prints its own error; for one
    that was killed and cannot, RunError names it.
    """
    from torch.distributed.elastic.multiprocessing import (  # noqa: PLC0415 - seconds, which only this takes
        DefaultLogsSpecs,
        SignalException,
    )
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError  # noqa: PLC0415
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch  # noqa: PLC0415

    logging.disable(logging.CRITICAL)  # this process does nothing else, and the launcher's noise would hide our line
    with tempfile.TemporaryDirectory(prefix="ncf-launch-") as logs:
        config = LaunchConfig(
            min_nodes=1,
            max_nodes=1,
            nproc_per_node=devices,
            run_id=LAUNCHED + secrets.token_hex(8),
            rdzv_backend="c10d",
            rdzv_endpoint="localhost:0",  # a free port
            local_addr="localhost",
            max_restarts=0,
            logs_specs=DefaultLogsSpecs(log_dir=logs),
            shutdown_timeout=10,
        )
        try:
            elastic_launch(config, sys.executable)("-m", "ncf", *arguments)
        except ChildFailedError as error:
            return _status(error.failures)
        except SignalException as error:
            if error.sigval == signal.SIGINT:
                return 130  # rank 0 has said what is saved
            raise RunError(f"ended by {error.sigval.name}; go on from the last saved epoch with --resume") from None
    return 0


def _status(failures: Mapping[int, Any]) -> int:
    """The exit status of processes that failed, by rank. Raises RunError where one was killed and cannot say it."""
    killed = {rank: signal.Signals(-one.exitcode) for rank, one in failures.items() if one.exitcode < 0}
    # The launcher ends the others with SIGTERM, and they are in `failures` too.
    first = {rank: name for rank, name in killed.items() if name != signal.SIGTERM}
    if first or len(killed) == len(failures):
        rank, name = next(iter((first or killed).items()))
        hint = " (out of memory?)" if name == signal.SIGKILL else ""
        raise RunError(f"rank {rank} was killed by {name.name}{hint}, and the run ended with it; go on with --resume")
    # The processes that lost a failing one end with 1, so a higher status is its own.
    return max(int(one.exitcode) for one in failures.values())
