"""Select in Triton against a sort of each row, whatever its scores, its length and the way it is cut.

Legend: T tokens, N entries, K picks.
"""

from __future__ import annotations

import math
from random import Random

import pytest
import torch
from attrs import frozen
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from dsv4.errors import KernelError
from dsv4.kernels.select_triton import SelectTiles, TritonSelect
from dsv4.metadata.buffers import select_scratch
from dsv4.metadata.fill_ref import selected_lanes
from dsv4.metadata.plans import IndexStream, ScoreInputs, SelectOutput
from dsv4.pool.base import KVView
from dsv4.pool.formats import PlainRows
from dsv4.pool.geometry import PagedRows

INF, NAN = math.inf, math.nan
POISON = 2**31 - 1
GUARD = 5
GOOD_SCORE = 0x7F7FFFFF
"""Bits of the largest finite score: what a candidate that nobody wrote would be picked for."""
TINY = SelectTiles(tile=64, columns=(4, 8), direct=20, block=16, most_block=32, pick_lanes=32)
"""Rows of a few hundred scores are narrowed twice, and picks are read in several blocks."""


@frozen(kw_only=True)
class Shape:
    num_entries: int
    topk: int
    visible: list[int]
    first_token: int = 0
    padding: int = 0
    """Columns behind a row that are not its own."""
    odd: int = 0
    """int32 lanes before the scratch."""


def scores_of(kind: str, num_tokens: int, num_entries: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    random_TN = torch.randn(num_tokens, num_entries, generator=generator)
    other_TN = torch.randn(num_tokens, num_entries, generator=generator)
    lane_N = torch.arange(num_entries)
    return {
        "random": random_TN,
        "equal": torch.full_like(random_TN, -2.5),
        "zeros of both signs": torch.where(random_TN > 0, 0.0, -0.0),
        "ascending": random_TN.sort(dim=-1).values,
        "descending": random_TN.sort(dim=-1, descending=True).values,
        "few values": random_TN.round(),
        "all -inf": torch.full_like(random_TN, -INF),
        "all NaN": torch.full_like(random_TN, NAN),
        "NaN and -inf": torch.where(
            random_TN > 1, NAN, torch.where(random_TN > 0, -INF, other_TN.round())
        ),
        "best side by side": torch.where(lane_N // 40 == 1, random_TN + 9, random_TN),
        "all magnitudes": random_TN * torch.exp(25 * other_TN),
        "one in five": torch.where(lane_N % 5 == 0, random_TN, -INF),
        "inf": torch.where(other_TN > 1, INF, random_TN),
    }[kind]


KINDS = (
    "random", "equal", "zeros of both signs", "ascending", "descending", "few values", "all -inf", "all NaN",
    "NaN and -inf", "best side by side", "all magnitudes", "one in five", "inf",
)  # fmt: skip


def check(kernel: TritonSelect, kind: str, shape: Shape, device: torch.device, seed: int) -> None:
    """All of the stream and what lies around it and around the scratch, against a stable sort."""
    tokens, num_entries = len(shape.visible), shape.num_entries
    width, rows_per_page = min(shape.topk, num_entries), 1 + seed % 7
    all_tokens = shape.first_token + tokens + 1
    generator = torch.Generator().manual_seed(seed)
    visible_T = torch.zeros(all_tokens, dtype=torch.int32)
    own = slice(shape.first_token, shape.first_token + tokens)
    visible_T[own] = torch.tensor(shape.visible, dtype=torch.int32)
    slot_T = torch.randint(-1, 3, (all_tokens,), generator=generator).int()
    pages = -(-num_entries // rows_per_page)
    table = torch.randperm(3 * pages, generator=generator).int().view(3, pages)
    table[:, seed % 3 :: 3] = -1
    indptr_T1, lane_TK = selected_lanes(visible_T, width)
    stream = torch.full((all_tokens * width + 2 * GUARD,), POISON, dtype=torch.int32)
    whole_TN = torch.full((tokens, num_entries + shape.padding), NAN)
    whole_TN[:, :num_entries] = scores_of(kind, tokens, num_entries, seed)
    for token, visible in enumerate(shape.visible):
        whole_TN[token, visible:] = (INF, NAN)[token % 2]
    expected = stream.clone()
    paged = PagedRows(block_table=table, rows_per_page=rows_per_page, base=11)
    for token, visible in enumerate(shape.visible, shape.first_token):
        row = whole_TN[token - shape.first_token, :visible]
        order = torch.where(row.isnan(), -INF, row).sort(descending=True, stable=True).indices
        best = order[:width].sort().values.int()
        picks = torch.full((width,), -1, dtype=torch.int32)
        picks[: len(best)] = paged.rows(slot_T[token], best)
        expected[GUARD + lane_TK[token].long()] = picks

    lanes = max(20_000, select_scratch(num_entries * tokens, tokens, width))
    scratch = torch.full((lanes + 2 * GUARD,), GOOD_SCORE, dtype=torch.int32, device=device)
    inner = scratch[GUARD + shape.odd : -GUARD]
    stream = stream.to(device)
    rows = PagedRows(block_table=table.to(device), rows_per_page=rows_per_page, base=11)
    output = SelectOutput(
        stream=IndexStream(indptr_T1.to(device), stream[GUARD:-GUARD], width, final=False),
        scratch=inner,
        lane_TK=lane_TK.to(device),
        rows=rows,
    )
    inputs = ScoreInputs(
        view=KVView(torch.empty(0, 1), 0, PlainRows(torch.float32, 1)), keys=rows,
        slot_T=slot_T.to(device), num_visible_T=visible_T.to(device), max_entries=num_entries,
        query_lengths=(1,) * all_tokens, request_slots_B=slot_T, tile_tokens=tokens,
    )  # fmt: skip
    scores_TN = whole_TN.to(device)[:, :num_entries]
    kernel.select(scores_TN, inputs, output, first_token=shape.first_token)
    assert stream.tolist() == expected.tolist()
    assert (scratch[: GUARD + shape.odd] == GOOD_SCORE).all()
    assert (scratch[-GUARD:] == GOOD_SCORE).all()


def shape_of(random: Random) -> Shape:
    """Hypothesis draws small numbers first, which would leave most rows without a choice; so it draws a seed."""
    num_entries = random.choice([1, 15, 16, 63, 64, 65, 130, 257, 320])
    topk = random.choice([1, 2, 3, 7, 8, 16, 17, 33])
    width = min(topk, num_entries)
    edges = [0, 1, width - 1, width, min(width + 1, num_entries), num_entries // 2, num_entries]
    return Shape(
        num_entries=num_entries,
        topk=topk,
        visible=[num_entries, random.choice(edges)],
        first_token=random.randrange(3),
        padding=random.choice([0, 1, 4]),
        odd=random.randrange(2),
    )


@pytest.mark.parametrize("kind", KINDS)
def test_any_row_cut_anyhow_gives_the_best_entries(kind: str, device: torch.device) -> None:
    @settings(deadline=None, max_examples=12, derandomize=True)
    @given(seed=st.integers(0, 10**6))
    def run(seed: int) -> None:
        check(TritonSelect(TINY), kind, shape_of(Random(f"{kind} {seed}")), device, seed)

    run()


@pytest.mark.parametrize(
    ("num_entries", "topk"), [(33_000, 512), (33_001, 300), (70_000, 1024), (9_000, 40)]
)
def test_rows_as_long_as_published_models_have_them(
    num_entries: int, topk: int, device: torch.device
) -> None:
    kinds = KINDS if device.type == "cuda" else ("random",)
    for kind in kinds:
        shape = Shape(num_entries=num_entries, topk=topk, visible=[num_entries - 3])
        check(TritonSelect(), kind, shape, device, seed=1)


def test_a_scratch_too_short_for_the_candidates_is_refused(device: torch.device) -> None:
    shape = Shape(num_entries=320, topk=16, visible=[320] * 99)
    with pytest.raises(KernelError, match="select_scratch"):
        check(TritonSelect(TINY), "random", shape, device, seed=0)
