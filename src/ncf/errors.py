"""What can go wrong: the two exceptions and the one warning that ncf raises on purpose.

The message is always one line that says what is wrong, the value received and how to fix it. Library code raises;
`cli.py` alone turns an exception into a line on stderr and an exit status.
"""


class InputError(ValueError):
    """The user's input or usage is at fault: a file, an id, an option value. Exit status 2."""


class RunError(RuntimeError):
    """A run that began well and failed: a loss that is not finite, a disk that filled up. Exit status 1."""


class NcfWarning(UserWarning):
    """Something odd but possible; the run goes on."""
