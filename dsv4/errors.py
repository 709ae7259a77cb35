"""Every exception that dsv4 raises on purpose.

A message says four things: the name of what is wrong, the value that was given, the limit it broke, and the remedy.
"""


class Dsv4Error(Exception):
    """Base of all errors of this library; the command line prints one as a single line."""


class ConfigError(Dsv4Error, ValueError):
    """A configuration is unusable: unknown key, conflict, value out of range."""


class CheckpointError(Dsv4Error, ValueError):
    """A checkpoint is truncated, incomplete, or holds tensors that nothing consumes."""


class PoolExhaustedError(Dsv4Error, RuntimeError):
    """A pool has no free slot or page left for the request; nothing was changed."""


class SlotError(Dsv4Error, ValueError):
    """A slot is used that is not live, or a length leaves what the slot has reserved."""


class RollbackError(Dsv4Error, ValueError):
    """A rollback reaches further back than the pool can undo; nothing was changed."""


class SnapshotError(Dsv4Error, ValueError):
    """A snapshot cannot be exported or attached exactly; nothing was changed."""


class BatchError(Dsv4Error, ValueError):
    """A forward batch is malformed or larger than the builder's capacity."""


class StaleMetadataError(Dsv4Error, RuntimeError):
    """Metadata of an earlier forward is read after a newer fill."""


class KernelError(Dsv4Error, RuntimeError):
    """No kernel set can run the request; the message lists the reason of each."""


class RequestError(Dsv4Error, ValueError):
    """A generation request cannot be served: empty prompt, too long for max_context, bad sampling value."""
