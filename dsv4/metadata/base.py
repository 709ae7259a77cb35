"""The abstract metadata builder: turns a batch and a pool's live lengths into what all layers of a forward share."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Mapping

from torch import Tensor

from dsv4.config import BackendConfig, ModelConfig
from dsv4.metadata.batch import BatchShape, ForwardBatch
from dsv4.metadata.buffers import Buffers
from dsv4.metadata.forward import Epoch, ForwardMetadata, SharedTensors
from dsv4.pool.base import KVPool
from dsv4.pool.geometry import PoolGeometry


class FillKernel(ABC):
    """The device side of `fill`, for the buffers of one builder.

    1. Computes every shared tensor of a forward from the static input buffers and the pool's live lengths and block
       table, each once, and counts it in `buffers.computed`. 2. Has no effect on the pool. 3. Shapes depend on the
       BatchShape alone. 4. No host sync.
    """

    @abstractmethod
    def __init__(
        self, model: ModelConfig, geometry: PoolGeometry, pool: KVPool, buffers: Buffers
    ) -> None: ...

    @abstractmethod
    def fill(self, shape: BatchShape) -> SharedTensors:
        """Fill the prefixes that `shape` needs; the same tensors, values and addresses for equal inputs."""


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
    def __init__(
        self, pool: KVPool, config: BackendConfig, fill: type[FillKernel] | None = None
    ) -> None:
        """Allocate every buffer for the largest batch of a resolved `config`, on the pool's device.

        `fill`: the op that computes the shared tensors; None = plain torch."""

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
