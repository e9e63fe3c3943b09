"""``python -m aotpack``: the same as the ``aotpack`` program."""

import sys

from aotpack.cli import main

if __name__ == "__main__":
    sys.exit(main())
