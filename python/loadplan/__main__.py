"""``python -m loadplan``."""

import sys

from loadplan.cli import main

sys.exit(main())
