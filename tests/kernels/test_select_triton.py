"""The Triton select against a sort in Python: small tiles, so that few entries go every way that many would.

Legend: T tokens, N entries, K picks.
"""

from __future__ import annotations

import math

import pytest
import torch
from attrs import frozen
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from dsv4.errors import KernelError
from dsv4.kernels.select_triton import SelectTiles, TritonSelect, plan_select
from dsv4.metadata.buffers import select_scratch
from dsv4.metadata.plans import IndexStream, ScoreInputs, SelectOutput
from dsv4.pool.base import KVView
from dsv4.pool.formats import PlainRows
from dsv4.pool.geometry import PagedRows
from dsv4.testing.memory import guarded, poisoned
from dsv4.testing.select import best

# NaN is what missing entries compare as, and numpy, under the interpreter, wonders about each.
pytestmark = pytest.mark.filterwarnings("ignore:.*:RuntimeWarning")

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
INF, NAN = math.inf, math.nan
TINY = SelectTiles(lanes=2, fold=4, small_lanes=2, small=(16, 32), scan=16)
"""Chunks of 64 entries; an exact search takes 32; more than 8 picks go to the kernel for any number."""
WIDE = SelectTiles(lanes=4, fold=2, list_fold=2, small_lanes=2, small=(16, 32), scan=64)
PER_PAGE, BASE, SLOTS = 7, 50, 3


@frozen(eq=False)
class Case:
    """Tokens with their scores, pages and lanes; poison around everything that is written."""

    scores_TN: Tensor
    visible: list[int]
    topk: int
    first_token: int = 0
    """Tokens of the forward in front of the first score row."""

    def run(self, tiles: SelectTiles | None) -> list[list[int]]:
        """What the lanes of each token hold after a select, which must have left everything else alone."""
        tokens, width = self.scores_TN.shape
        everyone = self.first_token + tokens + 1
        generator = torch.Generator().manual_seed(everyone * width)
        stream = guarded([everyone * self.topk], torch.int32, DEVICE)
        lanes = torch.randperm(everyone * self.topk, generator=generator).int()
        lane_TK = lanes.view(everyone, self.topk).to(DEVICE)
        numel = select_scratch(tokens * width, tokens, self.topk)
        if tiles is not None:
            numel = tokens * 4 * self.topk * (width // tiles.block + 1)
        scratch = guarded([numel], torch.int32, DEVICE)
        rows = PagedRows(block_table=self.table().to(DEVICE), rows_per_page=PER_PAGE, base=BASE)
        indptr = poisoned([everyone + 1], torch.int32, DEVICE)
        output = SelectOutput(
            stream=IndexStream(indptr, stream.inner, self.topk, final=False),
            scratch=scratch.inner,
            lane_TK=lane_TK,
            rows=rows,
        )
        padding = [0] * self.first_token
        inputs = ScoreInputs(
            view=KVView(torch.empty(0, 1), 0, PlainRows(torch.float32, 1)),
            keys=rows,
            slot_T=_ints([*padding, *self.slots(), 0]),
            num_visible_T=_ints([*padding, *self.visible, 0]),
            max_entries=width,
            query_lengths=(everyone,),
            request_slots_B=_ints([0]),
            tile_tokens=tokens,
        )
        TritonSelect(tiles).select(
            self.scores_TN.to(DEVICE), inputs, output, first_token=self.first_token
        )
        assert stream.intact()
        assert scratch.intact()
        held = stream.inner[lane_TK.flatten().long()].view(everyone, self.topk).tolist()
        own = slice(self.first_token, self.first_token + tokens)
        others = held[: own.start] + held[own.stop :]
        assert others == [[2**31 - 1] * self.topk] * (everyone - tokens)
        return held[own]

    def slots(self) -> list[int]:
        """-1 for padding, which sees nothing."""
        return [t % SLOTS if n else -1 for t, n in enumerate(self.visible)]

    def table(self) -> Tensor:
        """Pages in any order, some of them absent."""
        pages = -(-self.scores_TN.shape[1] // PER_PAGE)
        generator = torch.Generator().manual_seed(pages)
        return torch.randint(-1, 9, (SLOTS, pages), dtype=torch.int32, generator=generator)

    def wanted(self) -> list[list[int]]:
        table, scores = self.table().tolist(), self.scores_TN.tolist()
        result = []
        for t, (slot, n) in enumerate(zip(self.slots(), self.visible, strict=True)):
            entries = best(scores[t], n, self.topk)
            pages = [table[slot][e // PER_PAGE] for e in entries]
            rows = [
                -1 if page < 0 else BASE + page * PER_PAGE + e % PER_PAGE
                for e, page in zip(entries, pages, strict=True)
            ]
            result.append(rows + [-1] * (self.topk - len(rows)))
        return result

    def check(self, tiles: SelectTiles | None) -> None:
        assert self.run(tiles) == self.wanted()


def _ints(values: list[int]) -> Tensor:
    return torch.tensor(values, dtype=torch.int32, device=DEVICE)


def _strided(scores_TN: Tensor, *, spare: int) -> Tensor:
    """The same rows in wider memory full of NaN, which stands behind each row's entries too."""
    tokens, width = scores_TN.shape
    wide = torch.full((tokens, width + spare), NAN)
    wide[:, :width] = scores_TN
    return wide[:, :width]


KINDS = {
    "random": lambda g, n: torch.randn(n, generator=g),
    "equal": lambda g, n: torch.full((n,), -1.5),
    "few values": lambda g, n: torch.randint(-2, 3, (n,), generator=g) / 4 * -1.0,
    "zeros of both signs": lambda g, n: torch.where(torch.rand(n, generator=g) < 0.5, -0.0, 0.0),
    "minus infinity": lambda g, n: torch.full((n,), -INF),
    "NaN": lambda g, n: torch.full((n,), NAN),
    "mostly nothing": lambda g, n: torch.tensor([NAN, -INF, -INF, NAN, 1.0, -3e38])[
        torch.randint(0, 6, (n,), generator=g)
    ],
    "extremes": lambda g, n: torch.tensor([INF, -INF, NAN, 3e38, -3e38, 1e-42, -1e-42, 0.0, -0.0])[
        torch.randint(0, 9, (n,), generator=g)
    ],
    "wide range": lambda g, n: torch.exp(30 * torch.randn(n, generator=g)),
    "ascending": lambda g, n: torch.randn(n, generator=g).sort().values,
    "descending": lambda g, n: torch.randn(n, generator=g).sort(descending=True).values,
    "best in one place": lambda g, n: (
        torch.randn(n, generator=g) + 9.0 * ((torch.arange(n) // 12) == 3)
    ),
}
"""Score rows that a search over values may trip over."""


def _case(
    kinds: list[str], visible: list[int], topk: int, width: int, *, seed: int, first_token: int = 0,
    spare: int = 0,
) -> Case:  # fmt: skip
    generator = torch.Generator().manual_seed(seed)
    rows = []
    for kind, n in zip(kinds, visible, strict=True):
        row = KINDS[kind](generator, width).float()
        # what stands behind the visible entries does not matter, however good or bad
        row[n:] = torch.tensor([INF, NAN, 99.0])[torch.arange(width - n) % 3]
        rows.append(row)
    scores_TN = _strided(torch.stack(rows), spare=spare)
    return Case(scores_TN, visible, topk, first_token)


@settings(max_examples=100)
@given(data=st.data())
def test_select_picks_the_best_visible_entries_in_ascending_order(data: st.DataObject) -> None:
    tiles = data.draw(st.sampled_from([TINY, WIDE]))
    topk = data.draw(st.sampled_from([1, 2, 3, 5, 7, 8, 9, 21]))
    width = data.draw(st.sampled_from([1, 5, 16, 31, 33, 64, 65, 100, 128, 150, 300]))
    tokens = data.draw(st.integers(1, 4))
    edges = [0, 1, topk - 1, topk, topk + 1, 2 * topk, width - 1, width]
    few = st.sampled_from([n for n in edges if 0 <= n <= width])
    visible = [data.draw(few | st.integers(0, width)) for _ in range(tokens)]
    kinds = [data.draw(st.sampled_from(sorted(KINDS))) for _ in range(tokens)]
    case = _case(
        kinds, visible, topk, width,
        seed=data.draw(st.integers(0, 99)),
        first_token=data.draw(st.integers(0, 3)),
        spare=data.draw(st.sampled_from([0, 1, 4])),
    )  # fmt: skip
    case.check(tiles)


@pytest.mark.parametrize("kind", sorted(KINDS))
@pytest.mark.parametrize("topk", [7, 30])
def test_cut_rows_of_every_kind_are_picked_exactly(kind: str, topk: int) -> None:
    width = 200
    visible = [width, 131, 64, 65]
    _case([kind] * 4, visible, topk, width, seed=topk).check(TINY)


@pytest.mark.parametrize(("width", "topk"), [(5000, 512), (2049, 1024), (20000, 7), (4100, 1500)])
def test_tiles_of_the_gpu_pick_exactly(width: int, topk: int) -> None:
    kinds = ["random", "few values", "best in one place"]
    _case(kinds, [width, width - 3, topk + 1], topk, width, seed=0).check(None)


def test_lists_that_exceed_one_tile_are_narrowed_again() -> None:
    """Of 700 entries 11 chunks leave 16 candidates each, then three tiles of 64, then one."""
    plan = plan_select(TINY, 700, 8)
    assert plan.chunks * 16 > TINY.block
    assert plan.fold == TINY.list_fold
    kinds = ["random", "equal", "mostly nothing", "ascending"]
    _case(kinds, [700, 699, 640, 70], 8, 700, seed=1).check(TINY)


def test_a_row_of_a_large_capacity_with_few_visible_entries_takes_the_short_way() -> None:
    for visible in (0, 1, 8, 9, 31, 32, 33):
        _case(["random"], [visible], 8, 700, seed=visible).check(TINY)


def test_a_tokens_picks_do_not_depend_on_its_batch() -> None:
    kinds = sorted(KINDS)
    together = _case(kinds, [150] * len(kinds), 7, 150, seed=3)
    picked = together.run(TINY)
    for t in range(0, len(kinds), SLOTS):  # these read the pages of slot 0, as a token alone does
        assert Case(together.scores_TN[t : t + 1], [150], 7).run(TINY) == [picked[t]]


def test_without_picks_or_tokens_nothing_happens() -> None:
    empty = Case(torch.empty(0, 9), [], 3)
    assert empty.run(TINY) == []
    assert Case(torch.zeros(2, 9), [9, 4], 0).run(TINY) == [[], []]


def test_too_little_scratch_is_said() -> None:
    case = _case(["random"], [9000], 512, 9000, seed=0)
    rows = PagedRows(block_table=case.table().to(DEVICE), rows_per_page=PER_PAGE, base=BASE)
    output = SelectOutput(
        stream=IndexStream(_ints([0]), _ints([0]), 512, final=False),
        scratch=_ints([0] * 100),
        lane_TK=_ints([0]).expand(1, 512),
        rows=rows,
    )
    inputs = ScoreInputs(
        view=KVView(torch.empty(0, 1), 0, PlainRows(torch.float32, 1)), keys=rows,
        slot_T=_ints([0]), num_visible_T=_ints([9000]), max_entries=9000, query_lengths=(1,),
        request_slots_B=_ints([0]), tile_tokens=1,
    )  # fmt: skip
    with pytest.raises(KernelError, match="scratch 100 int32 lanes, 2048 needed for 512 picks"):
        TritonSelect().select(case.scores_TN.to(DEVICE), inputs, output, first_token=0)


@pytest.mark.parametrize("topk", [1, 7, 511, 512, 1000, 1024])
def test_the_scratch_of_a_forward_holds_the_lists_of_every_capacity(topk: int) -> None:
    tiles = SelectTiles()
    for width in (1, 2048, 4096, 4097, 8191, 16384, 16385, 32768, 100001, 262144, 10**6):
        lists = plan_select(tiles, width, topk).chunks
        need = lists * 4 * topk if lists else topk
        assert all(select_scratch(t * width, t, topk) >= t * need for t in (1, 2, 63))
