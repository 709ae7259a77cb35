"""`python -m dsv4` is the command `dsv4`."""

import sys

from dsv4.cli import main

sys.exit(main())
