"""`python -m ncf` is `ncf`."""

import sys

from ncf.cli import main

if __name__ == "__main__":
    sys.exit(main())
