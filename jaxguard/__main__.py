"""``python -m jaxguard`` is the command ``jaxguard``."""

import sys

from jaxguard.cli import main

if __name__ == "__main__":
    sys.exit(main())
