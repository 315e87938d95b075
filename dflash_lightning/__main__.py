"""``python -m dflash_lightning``: the same as ``dflash``."""

import sys

from dflash_lightning.cli import main

if __name__ == "__main__":
    sys.exit(main())
