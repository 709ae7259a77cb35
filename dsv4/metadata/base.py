"""The abstract metadata builder: turns a batch and a pool's live lengths into what all layers of a forward share."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Mapping

from torch import Tensor

from dsv4.config import BackendConfig, ModelConfig
from dsv4.metadata.batch import ForwardBatch
from dsv4.metadata.forward import Epoch, ForwardMetadata
from dsv4.pool.base import KVPool
from dsv4.pool.geometry import PoolGeometry


class MetadataBuilder(ABC):
    """One per pool family. Promises, each with a conformance test in `dsv4.testing`:

    1. `prepare` copies host values into static input buffers and checks them; a failing prepare changes nothing.
    2. `fill` computes everything else on the device from the lengths of this moment; it has no effect on the pool and
       is idempotent: filling again gives equal tensors at the same addresses under a new epoch.
    3. Every shared tensor is computed exactly once per fill, for any number of layers (`computed` counts).
    4. Shapes depend on the BatchShape alone; buffers are prefixes of the largest shape's.
    5. Metadata of an earlier epoch raises StaleMetadataError on access.
    6. `swa_loc_for` is exact for any batch: the stored tensor if batch and positions are the filled ones, otherwise a
       recompute from live positions, logged as `swa_loc_recomputed` with its reason.
    7. Padding tokens and requests have slot -1, no rows, no visible entries.
    8. `advance` adds accepted tokens to the lengths on the device; host commits of the same tokens, in order and any
       number of forwards later, change nothing more.
    """

    metadata: ForwardMetadata
    """Same object for the builder's life."""
    computed: Counter[str]
    """How often each shared tensor was computed by the latest fill."""

    @abstractmethod
    def __init__(self, pool: KVPool, config: BackendConfig) -> None:
        """Allocate every buffer for the largest batch of a resolved `config`, on the pool's device."""

    @classmethod
    @abstractmethod
    def estimate(
        cls, model: ModelConfig, geometry: PoolGeometry, config: BackendConfig
    ) -> Mapping[str, int]:
        """What `nbytes` of a builder of this resolved config returns; allocates nothing."""

    @abstractmethod
    def prepare(self, batch: ForwardBatch) -> None:
        """Host -> static input buffers; raises BatchError or SlotError."""

    @abstractmethod
    def fill(self) -> Epoch:
        """Device side; returns the epoch that `metadata.for_layer` wants."""

    @abstractmethod
    def advance(self, accepted_B: Tensor) -> None:
        """lengths[slot of request b] += accepted_B[b] (int, [B]) for the prepared batch, on the device."""

    @abstractmethod
    def swa_loc_for(self, batch: ForwardBatch | None) -> Tensor:
        """int32 [batch.num_tokens] window-ring rows; None or an idle batch gives an empty or all -1 tensor."""

    @abstractmethod
    def nbytes(self) -> Mapping[str, int]:
        """Bytes of every buffer this builder holds, workspace included."""
