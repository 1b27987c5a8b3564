"""`python -m patterns.engine`: which server a data directory uses, started if needed."""

import sys

from .server import main

sys.exit(main())
