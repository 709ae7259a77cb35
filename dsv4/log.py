"""Structured events of the library, silent until the application asks for them.

Events are rendered by structlog's processors, as the application configured them, and handed to the
standard logger of the same name: nothing is printed until `logging` has a handler for `dsv4`.
"""

from __future__ import annotations

import logging
from typing import cast

import structlog
from structlog.typing import FilteringBoundLogger


def get_logger(name: str) -> FilteringBoundLogger:
    """A structlog logger below the standard logger `name` (pass `__name__`)."""
    # structlog's own default would print to stdout, where the command line writes its results.
    return cast(FilteringBoundLogger, structlog.wrap_logger(logging.getLogger(name)))
