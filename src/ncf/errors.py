"""What can go wrong: the two exceptions and the one warning that ncf raises on purpose.

The message is always one line that says what is wrong, the value received and how to fix it. Library code raises;
`explain` puts it into words, and `cli.py` alone prints it and exits.
"""


class InputError(ValueError):
    """The user's input or usage is at fault: a file, an id, an option value. Exit status 2."""


class RunError(RuntimeError):
    """A run that began well and failed: a loss that is not finite, a disk that filled up. Exit status 1."""


class NcfWarning(UserWarning):
    """Something odd but possible; the run goes on."""


def explain(error: BaseException) -> tuple[int, str]:
    """Exit status and message of what a user or a machine can cause; anything else is ours, and is raised again."""
    text = str(error)
    if isinstance(error, KeyboardInterrupt):
        return 130, f"interrupted{f'; {text}' if text else ''}"
    if isinstance(error, (InputError, RunError)):
        return (2 if isinstance(error, InputError) else 1), f"error: {text}"
    if isinstance(error, OSError):
        return 1, f"error: {error.filename or 'system'}: {error.strerror or text}"
    if isinstance(error, MemoryError) or "out of memory" in text or "can't allocate memory" in text:
        return 1, "error: out of memory: use a larger device, or a smaller --batch-size, --valid-users-per-batch or log"
    raise error
