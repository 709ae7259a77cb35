"""The mix of deterministic mode, for any number of streams."""

from __future__ import annotations

import pytest
import torch

from dsv4.kernels.mix_ref import sinkhorn


@pytest.mark.parametrize("streams", [1, 2, 3, 4, 5, 6, 7, 8, 16])
@pytest.mark.parametrize("tokens", [2, 8, 17, 130])
def test_in_deterministic_mode_a_tokens_mix_has_the_same_bits_in_any_batch(
    streams: int, tokens: int
) -> None:
    rng = torch.Generator().manual_seed(streams)
    logits_TNN = torch.randn(tokens, streams, streams, generator=rng)
    together_TNN = sinkhorn(logits_TNN.clone(), iterations=3, eps=1e-6, few_tokens=0)
    alone = [
        sinkhorn(row.clone(), iterations=3, eps=1e-6, few_tokens=0) for row in logits_TNN.split(1)
    ]
    assert torch.equal(together_TNN, torch.cat(alone))
