import fcntl
import os
import pty
import struct
import subprocess
import sys
import termios
import threading

OPTIONS = [
    "--recipe",
    "nvidia",
    "--factors",
    "8",
    "--layers",
    "16",
    "8",
    "--valid-negative",
    "20",
    "--device",
    "cpu",
    "-e",
    "2",
]


def drain(terminal: int, shown: list[bytes]) -> None:
    while True:
        try:
            block = os.read(terminal, 4096)
        except OSError:  # what Linux says when the other side has closed
            return
        if not block:
            return
        shown.append(block)


def test_bars_on_a_terminal_and_lines_on_stdout(tiny_data, tmp_path):
    """stderr is a terminal here, stdout a pipe: the bars go to the one and never to the other."""
    parent, child = pty.openpty()
    fcntl.ioctl(child, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))  # a terminal without a size shows no bar
    shown: list[bytes] = []
    reader = threading.Thread(target=drain, args=(parent, shown))
    reader.start()
    run = subprocess.run(
        [sys.executable, "-m", "ncf", "train", "--data", tiny_data, "--checkpoint-dir", "run", *OPTIONS],
        stdout=subprocess.PIPE,
        stderr=child,
        text=True,
        cwd=tmp_path,
        timeout=120,
        check=True,
    )
    os.close(child)
    reader.join()
    os.close(parent)
    bars = b"".join(shown).decode()
    assert "epoch 2/2" in bars
    assert "evaluate" in bars
    assert "epoch 2/2" not in run.stdout
    assert run.stdout.startswith("Recipe: nvidia (factors 8, layers 16 8, epochs 2)\nNew Best Epoch: 01")


def test_no_bar_in_a_pipe(spawn, tiny_data):
    run = spawn("train", "--data", tiny_data, "--checkpoint-dir", "run", *OPTIONS)
    assert run.communicate()[1] == ""
