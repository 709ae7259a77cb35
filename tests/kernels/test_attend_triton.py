"""The Triton attention kernel against float64, and bit against bit in deterministic mode.

Legend: T tokens, H heads, D head dim, K rows, P half the rope width.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence

import pytest
import torch
from attrs import evolve, frozen
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from dsv4.errors import KernelError
from dsv4.kernels.attend_plan_triton import EXACT, FEW, NARROW, WIDE, Plan, Tile, launches_of
from dsv4.kernels.attend_plan_triton import plan as plan_of
from dsv4.kernels.attend_triton import TritonAttention
from dsv4.metadata.plans import RopeTable, Source, Workspace
from dsv4.pool.base import KVView
from dsv4.pool.formats import PackedFp8Rows, PlainRows, RowFormat
from dsv4.testing.attention import expected, stream_of
from dsv4.testing.kernel_setup import NO_ROWS, ints
from dsv4.testing.memory import guarded, guarded_view, poisoned, same_bytes, strided
from dsv4.triton_launch import interpreting

TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 2e-2}
"""Of results of size about 1; bf16 rounds weights and results to 8 bits."""
NUM_ROWS = 90

Lists = list[list[int]]


def draw(
    seed: int, *shape: int, device: torch.device, dtype: torch.dtype = torch.float32
) -> Tensor:
    """Normal numbers, the same on every device."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(device, dtype)


def row_format(name: str, dim: int, rope: int) -> RowFormat:
    if name == "fp8":
        return PackedFp8Rows(dim, rope)
    return PlainRows({"fp32": torch.float32, "bf16": torch.bfloat16}[name], dim)


@frozen(eq=False)
class Rows:
    """A table whose even rows hold values and whose odd ones hold poison, behind and among guards."""

    view: KVView
    values_KD: Tensor
    """float64, of all rows; NaN where there is poison."""

    @classmethod
    def filled(cls, form: RowFormat, seed: int, device: torch.device) -> Rows:
        view = guarded_view(form, NUM_ROWS, device, spare_columns=64).view
        even_K = torch.arange(0, NUM_ROWS, 2, device=device)
        view.write(even_K, draw(seed, len(even_K), form.row_dim, device=device))
        values_KD = torch.full((NUM_ROWS, form.row_dim), torch.nan, dtype=torch.float64)
        values_KD[::2] = view.read(even_K).cpu().double()
        return cls(view, values_KD)

    def source(self, lists: Lists, fresh_TD: Tensor | None = None) -> Source:
        return Source(self.view, stream_of(lists, self.view.storage.device, spare=5), fresh_TD)

    def read(self, rows: Sequence[int], fresh_TD: Tensor | None) -> list[Tensor]:
        """Values of the indices that are rows."""
        fresh = [] if fresh_TD is None else list(fresh_TD.cpu().double())
        every = [*self.values_KD, *fresh]
        return [every[row] for row in rows if 0 <= row < len(every)]


def space_of(num_floats: int, device: torch.device) -> Workspace:
    """Scratch of NaN."""
    empty = torch.empty(0, device=device)
    partials = poisoned([num_floats], torch.float32, device)
    return Workspace(
        fresh_TD=None, scores=empty, pooled=empty, select=empty.int(), partials=partials
    )


def angles(tokens: int, rope: int, device: torch.device) -> RopeTable:
    angle_TP = draw(99, tokens, rope // 2, device=torch.device("cpu")).double()
    return RopeTable(angle_TP.cos().float().to(device), angle_TP.sin().float().to(device))


def rotated_back(x_THD: Tensor, rope: RopeTable) -> Tensor:
    """Inverse RoPE in complex float64."""
    width = 2 * rope.cos_TP.shape[-1]
    turn_TP = torch.complex(rope.cos_TP.cpu().double(), -rope.sin_TP.cpu().double())
    pairs = torch.view_as_complex(x_THD[..., -width:].unflatten(-1, (-1, 2)).contiguous())
    turned = torch.view_as_real(pairs * turn_TP[:, None]).flatten(-2)
    return torch.cat([x_THD[..., :-width], turned], -1)


def assert_close(actual: Tensor, wanted: Tensor, inputs: torch.dtype = torch.float32) -> None:
    """NaN is close to nothing; equal infinities are close."""
    limit = max(TOLERANCE[actual.dtype], TOLERANCE[inputs])
    actual = actual.detach().cpu().double()
    error = torch.where(actual == wanted, 0.0, (actual - wanted).abs())
    worst = error.max().item() if error.numel() else 0.0
    assert worst <= limit, f"error {worst:.3g} at {int(error.argmax())}"


def index_lists(source: random.Random, tokens: int, longest: int, num_fresh: int) -> Lists:
    """Ragged lists of rows that hold values, fresh rows among them, and of indices that are no row."""
    rows = [*range(0, NUM_ROWS, 2), *range(NUM_ROWS, NUM_ROWS + num_fresh)]
    wrong = [*NO_ROWS, NUM_ROWS + num_fresh, -NUM_ROWS]
    lists = []
    for _ in range(tokens):
        length = source.choice([0, 1, longest // 2, longest])
        share = source.choice([0.0, 0.2, 1.0])
        lists.append(
            [source.choice(wrong if source.random() < share else rows) for _ in range(length)]
        )
    return lists


@settings(deadline=None, max_examples=30)
@given(
    seed=st.integers(0, 2**16),
    name=st.sampled_from(["fp32", "bf16", "fp8"]),
    shape=st.sampled_from([(16, 4), (48, 16), (80, 16), (80, 64), (128, 64), (192, 64), (576, 64)]),
    heads=st.sampled_from([1, 3, 17, 40, 70]),
    tokens=st.integers(1, 3),
    q_dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    fresh=st.booleans(),
    tables=st.integers(1, 3),
    options=st.sets(st.sampled_from(["rope", "lse", "space", "deterministic", "strided", "fp32"])),
)
def test_ragged_lists_of_any_shape_and_format_give_what_float64_gives(
    device: torch.device, seed: int, name: str, shape: tuple[int, int], heads: int, tokens: int,
    q_dtype: torch.dtype, fresh: bool, tables: int, options: set[str],
) -> None:  # fmt: skip
    (dim, rope_dim), source = shape, random.Random(seed)
    form = row_format(name, dim, rope_dim)
    value_dtype = form.value_dtype
    fresh_TD = draw(seed, 4, dim, device=device, dtype=value_dtype) if fresh else None
    num_fresh = 4 if fresh else 0
    first = Rows.filled(form, seed, device)
    others = [first if source.random() < 0.5 else Rows.filled(form, i, device) for i in range(2)]
    parts = [(first, index_lists(source, tokens, 70, num_fresh), fresh_TD)]
    parts += [(table, index_lists(source, tokens, 40, 0), None) for table in others[: tables - 1]]
    q_THD = draw(seed + 1, tokens, heads, dim, device=device, dtype=q_dtype) / 4
    rope = angles(tokens, rope_dim, device) if "rope" in options else None
    space = space_of(tokens * heads * 8 * (dim + 2), device) if "space" in options else None
    if "strided" in options:
        q_THD = strided(q_THD)
    out_THD = poisoned(q_THD.shape, torch.float32 if "fp32" in options else q_dtype, device)
    if "strided" in options:
        out_THD = strided(out_THD)
    lse_TH = poisoned([tokens, heads], torch.float32, device) if "lse" in options else None
    sink_H = draw(seed + 2, heads, device=device)
    kernel = TritonAttention(deterministic="deterministic" in options)
    sources = [table.source(lists, own_TD) for table, lists, own_TD in parts]
    kernel.attend(
        q_THD,
        sources,
        sink_H,
        scale=0.3,
        out_THD=out_THD,
        lse_TH=lse_TH,
        rope=rope,
        workspace=space,
    )
    rows = [
        [row for table, lists, own_TD in parts for row in table.read(lists[t], own_TD)]
        for t in range(tokens)
    ]
    wanted_THD, wanted_TH = expected(q_THD, rows, sink_H, 0.3)
    assert_close(out_THD, wanted_THD if rope is None else rotated_back(wanted_THD, rope), q_dtype)
    if lse_TH is not None:
        assert_close(lse_TH, wanted_TH)


def attend(
    kernel: TritonAttention,
    q_THD: Tensor,
    sources: Sequence[Source],
    *,
    space: Workspace | None = None,
) -> tuple[Tensor, Tensor]:
    """Output and lse of outputs that were poison; the sinks are the same in every call."""
    tokens, heads, _ = q_THD.shape
    out_THD = poisoned(q_THD.shape, q_THD.dtype, q_THD.device)
    lse_TH = poisoned([tokens, heads], torch.float32, q_THD.device)
    kernel.attend(
        q_THD, sources, torch.linspace(-1, 2, heads, device=q_THD.device), scale=0.2, out_THD=out_THD,
        lse_TH=lse_TH, rope=angles(tokens, 16, q_THD.device), workspace=space,
    )  # fmt: skip
    return out_THD, lse_TH


def spread_lists(tokens: int, *lengths: int) -> Lists:
    """Lists of the given lengths over rows that hold values, one a token."""
    assert len(lengths) == tokens
    return [[(2 * (7 * t + i)) % NUM_ROWS for i in range(n)] for t, n in enumerate(lengths)]


@pytest.mark.usefixtures("no_bf16_arithmetic")
@pytest.mark.parametrize(
    ("name", "heads", "q_dtype", "tile", "parts"),
    [
        ("bf16", 40, torch.bfloat16, NARROW, 7),
        ("fp8", 3, torch.bfloat16, NARROW, 7),
        ("fp32", 17, torch.float32, EXACT, 13),
    ],
)
def test_split_rows_give_what_whole_ones_give_and_parts_without_rows_do_not_count(
    device: torch.device, name: str, heads: int, q_dtype: torch.dtype, tile: Tile, parts: int
) -> None:
    dim, kernel = 80, TritonAttention()
    table = Rows.filled(row_format(name, dim, 16), 1, device)
    # the last token has rows for the first parts alone
    sources = [
        table.source(spread_lists(3, 100, 0, 3)),
        table.source(spread_lists(3, 90, 0, 0)),
    ]
    q_THD = draw(2, 3, heads, dim, device=device, dtype=q_dtype)
    scratch = guarded([3 * heads * parts * (dim + 2)], torch.float32, device)
    space = evolve(space_of(0, device), partials=scratch.inner)
    if interpreting():
        assert plan_of(q_THD, launches_of(sources), scratch.inner) == Plan(
            tile, exact=q_dtype == torch.float32, parts=parts
        )
    split_THD, split_TH = attend(kernel, q_THD, sources, space=space)
    whole_THD, whole_TH = attend(kernel, q_THD, sources)
    assert_close(split_THD, whole_THD.cpu().double())
    assert_close(split_TH, whole_TH.cpu().double())
    assert bool((split_TH[1] == -math.inf).all())
    assert scratch.intact()


@pytest.mark.parametrize(("lengths", "tile"), [((150, 70), FEW), ((150, 70, 0, 33, 1, 64), WIDE)])
def test_rows_in_tiles_of_either_shape_give_the_same_split_and_whole(
    device: torch.device, lengths: tuple[int, ...], tile: Tile
) -> None:
    table, tokens = Rows.filled(row_format("bf16", 64, 16), 1, device), len(lengths)
    lists = spread_lists(tokens, *lengths)
    streams = [stream_of(lists, device, capacity=640) for _ in range(2)]
    sources = [Source(table.view, stream) for stream in streams]
    q_THD = draw(2, tokens, 40, 64, device=device, dtype=torch.bfloat16)
    space = space_of(tokens * 40 * 20 * 66, device)
    if interpreting():
        plan = plan_of(q_THD, launches_of(sources), space.partials)
        assert plan == Plan(tile, exact=False, parts=20)
    split_THD, split_TH = attend(TritonAttention(), q_THD, sources, space=space)
    whole_THD, whole_TH = attend(TritonAttention(), q_THD, sources)
    assert_close(split_THD, whole_THD.cpu().double())
    assert_close(split_TH, whole_TH.cpu().double())


@pytest.mark.usefixtures("no_bf16_arithmetic")
@pytest.mark.parametrize(("dim", "rope_dim", "heads"), [(512, 64, 40), (80, 16, 17)])
def test_deterministic_bits_do_not_depend_on_the_row_format_nor_on_where_a_row_lies(
    device: torch.device, dim: int, rope_dim: int, heads: int
) -> None:
    kernel, packed = TritonAttention(deterministic=True), PackedFp8Rows(dim, rope_dim)
    values_KD = packed.round(draw(3, NUM_ROWS, dim, device=device))
    every = torch.arange(NUM_ROWS, device=device)
    q_THD = draw(4, 2, heads, dim, device=device, dtype=torch.bfloat16)
    window, entries = spread_lists(2, 70, 65), spread_lists(2, 10, 0)
    # rows of the window that are also fresh rows: number 2 i is fresh row i
    chunk = [[NUM_ROWS + row // 2 if row < 40 else row for row in one] for one in window]
    fresh_TD = values_KD[:40:2].bfloat16()
    results = []
    for form in (PlainRows(torch.bfloat16, dim), packed):
        view = guarded_view(form, NUM_ROWS, device, spare_columns=64).view
        view.write(every, values_KD)
        for lists, own_TD in ((window, None), (chunk, fresh_TD)):
            first = Source(view, stream_of(lists, device), own_TD)
            results.append(attend(kernel, q_THD, [first, Source(view, stream_of(entries, device))]))
    for out_THD, lse_TH in results[1:]:
        assert same_bytes(out_THD, results[0][0])
        assert same_bytes(lse_TH, results[0][1])


@pytest.mark.parametrize("name", ["bf16", "fp8"])
def test_deterministic_bits_do_not_depend_on_other_tokens_nor_on_capacity(
    device: torch.device, name: str
) -> None:
    kernel = TritonAttention(deterministic=True)
    table = Rows.filled(row_format(name, 128, 64), 1, device)
    q_THD = draw(4, 5, 40, 128, device=device, dtype=torch.bfloat16)
    window, entries = spread_lists(5, 3, 65, 0, 128, 64), spread_lists(5, 9, 70, 1, 0, 200)
    space = space_of(5 * 40 * 8 * 130, device)
    rope = angles(5, 16, device)

    def run(picked: Sequence[int], capacity: int | None = None) -> Tensor:
        own_THD = q_THD[list(picked)]
        out_THD = poisoned(own_THD.shape, own_THD.dtype, device)
        sources = [
            Source(table.view, stream_of([lists[t] for t in picked], device, capacity=capacity))
            for lists in (window, entries)
        ]
        turns = RopeTable(rope.cos_TP[list(picked)], rope.sin_TP[list(picked)])
        kernel.attend(
            own_THD, sources, torch.zeros(40, device=device), scale=0.2, out_THD=out_THD,
            rope=turns, workspace=space,
        )  # fmt: skip
        return out_THD

    together = run(range(5))
    assert same_bytes(run([4, 1])[1], together[1])
    assert same_bytes(run([1])[0], together[1])
    assert same_bytes(run([1, 1, 3], capacity=500)[1], together[1])
    assert same_bytes(run([3], capacity=129)[0], together[3])


def test_sources_of_different_formats_share_one_softmax(device: torch.device) -> None:
    dim, rope = 80, 16
    forms = [
        row_format("fp32", dim, rope), PackedFp8Rows(dim, rope), PackedFp8Rows(dim, rope, plane_rows=2),
        row_format("bf16", dim, rope),
    ]  # fmt: skip
    tables = [Rows.filled(form, i, device) for i, form in enumerate(forms)]
    lists = [spread_lists(2, 20, 1), spread_lists(2, 0, 33), spread_lists(2, 7, 0), [[-1, 4], []]]
    q_THD, sink_H = draw(5, 2, 3, dim, device=device), draw(6, 3, device=device)
    for count in (1, 2, 3, 4):
        out_THD = poisoned(q_THD.shape, torch.float32, device)
        sources = [
            table.source(own) for table, own in zip(tables[:count], lists[:count], strict=True)
        ]
        TritonAttention().attend(q_THD, sources, sink_H, scale=0.1, out_THD=out_THD)
        rows = [
            [row for table, own in zip(tables, lists[:count], strict=False) for row in table.read(own[t], None)]
            for t in range(2)
        ]  # fmt: skip
        assert_close(out_THD, expected(q_THD, rows, sink_H, 0.1)[0])


@pytest.mark.parametrize("name", ["bf16", "fp8"])
def test_fresh_rows_of_another_dtype_than_the_tables_are_read_too(
    device: torch.device, name: str
) -> None:
    table = Rows.filled(row_format(name, 80, 16), 1, device)
    fresh_TD = draw(7, 3, 80, device=device)
    lists: Lists = [[NUM_ROWS + 2, 4], [NUM_ROWS + 3, NUM_ROWS], [0, 2]]
    q_THD, sink_H = draw(5, 3, 3, 80, device=device), draw(6, 3, device=device)
    out_THD = poisoned(q_THD.shape, torch.float32, device)
    TritonAttention().attend(
        q_THD, [table.source(lists, strided(fresh_TD))], sink_H, scale=0.1, out_THD=out_THD
    )
    rows = [table.read(own, fresh_TD) for own in lists]
    assert_close(out_THD, expected(q_THD, rows, sink_H, 0.1)[0])


@pytest.mark.parametrize("name", ["fp32", "bf16", "fp8"])
def test_a_table_without_rows_still_has_fresh_ones(device: torch.device, name: str) -> None:
    form = row_format(name, 80, 16)
    storage = poisoned(form.storage_shape(0), form.storage_dtype, device)
    fresh_TD = draw(7, 3, 80, device=device, dtype=form.value_dtype)
    lists: Lists = [[0, 2], [], [1, 3, -1]]
    q_THD, sink_H = draw(5, 3, 3, 80, device=device), draw(6, 3, device=device)
    out_THD = poisoned(q_THD.shape, torch.float32, device)
    source = Source(KVView(storage, 0, form), stream_of(lists, device), fresh_TD)
    TritonAttention().attend(q_THD, [source], sink_H, scale=0.1, out_THD=out_THD)
    rows = [[fresh_TD[row].cpu().double() for row in own if 0 <= row < 3] for own in lists]
    assert_close(out_THD, expected(q_THD, rows, sink_H, 0.1)[0])
    without = Source(KVView(storage, 0, form), stream_of(lists, device))
    TritonAttention().attend(q_THD, [without], sink_H, scale=0.1, out_THD=out_THD)
    assert torch.equal(out_THD, torch.zeros_like(out_THD))


def test_rows_behind_the_first_4_gib_are_found(device: torch.device) -> None:
    rows, stride, dim = 20, 1 << 27, 32
    # few pages of this memory are ever touched
    storage = torch.empty(rows * stride, dtype=torch.bfloat16, device=device)
    storage = storage.view(rows, stride)[:, :dim]
    values_KD = draw(8, rows, dim, device=device, dtype=torch.bfloat16)
    storage.copy_(values_KD)
    view = KVView(storage, rows, PlainRows(torch.bfloat16, dim))
    q_THD, sink_H = draw(5, 1, 3, dim, device=device), draw(6, 3, device=device)
    out_THD = poisoned(q_THD.shape, torch.float32, device)
    source = Source(view, stream_of([[19, 0, 17]], device))
    TritonAttention().attend(q_THD, [source], sink_H, scale=0.1, out_THD=out_THD)
    wanted = [[values_KD[row].cpu().double() for row in (19, 0, 17)]]
    assert_close(out_THD, expected(q_THD, wanted, sink_H, 0.1)[0])


@pytest.mark.parametrize("name", ["fp32", "bf16", "fp8"])
def test_indices_that_are_no_row_neither_read_nor_weigh_anything(
    device: torch.device, name: str
) -> None:
    """All rows but one are NaN, row 0 too; a tile of wrong indices lies in front of, between and behind right ones."""
    form = row_format(name, 80, 16)
    guard = guarded_view(form, 9, device)
    guard.view.write(ints([5], device), draw(1, 1, 80, device=device))
    row = guard.view.read(ints([5], device).long())[0].cpu().double()
    wrong = [*NO_ROWS, 9, -9, 2**30] * 15
    lists = [wrong, [*wrong, 5], [5, *wrong, 5], [*wrong, *wrong]]
    counts = [0, 1, 2, 0]
    q_THD, sink_H = draw(5, 4, 3, 80, device=device), draw(6, 3, device=device)
    for q in (q_THD, q_THD.bfloat16()):
        out_THD, lse_TH = (
            poisoned(q.shape, q.dtype, device),
            poisoned([4, 3], torch.float32, device),
        )
        source = Source(guard.view, stream_of(lists, device))
        TritonAttention().attend(q, [source], sink_H, scale=0.1, out_THD=out_THD, lse_TH=lse_TH)
        wanted_THD, wanted_TH = expected(q, [[row] * n for n in counts], sink_H, 0.1)
        assert_close(out_THD, wanted_THD)
        assert_close(lse_TH, wanted_TH)
    assert guard.memory.intact()


@pytest.mark.parametrize(
    ("tokens", "heads", "window", "entries", "floats", "tile", "parts"),
    [
        (1, 64, 128, 512, 10**9, NARROW, 20),
        (1, 64, 128, 1024, 10**9, FEW, 18),
        (1, 128, 128, 1024, 10**9, FEW, 12),
        (1, 128, 128, 8192, 10**9, WIDE, 44),
        (4, 64, 128, 512, 10**9, FEW, 7),
        (8, 64, 128, 64, 10**9, FEW, 3),
        (8, 64, 128, 512, 10**9, FEW, 4),
        (8, 64, 128, 1024, 10**9, WIDE, 9),
        (16, 64, 128, 512, 10**9, WIDE, 5),
        (32, 64, 128, 0, 10**9, FEW, 1),
        (32, 64, 128, 64, 10**9, FEW, 1),
        (32, 64, 128, 512, 10**9, WIDE, 4),
        (64, 64, 128, 0, 10**9, WIDE, 1),
        (64, 64, 128, 64, 10**9, WIDE, 1),
        (64, 64, 128, 512, 10**9, WIDE, 2),
        (128, 64, 128, 512, 10**9, WIDE, 1),
        (8, 64, 128, 512, 8 * 64 * 514 * 3, FEW, 3),
        (8, 64, 128, 512, 0, FEW, 1),
        (4096, 64, 128, 512, 10**9, WIDE, 1),
    ],
)
def test_capacities_choose_the_tiles_and_parts_that_were_the_fastest_on_an_h200(
    tokens: int, heads: int, window: int, entries: int, floats: int, tile: Tile, parts: int
) -> None:
    if not interpreting():
        pytest.skip("another GPU may have other processors")
    device = torch.device("cpu")
    view = KVView(torch.empty(1, 512, dtype=torch.bfloat16), 1, PlainRows(torch.bfloat16, 512))
    q_THD = torch.empty(1, 1, 512, dtype=torch.bfloat16).expand(tokens, heads, 512)
    sources = [Source(view, stream_of([], device, capacity=n)) for n in (window, entries)]
    scratch = torch.empty(1).expand(floats)
    assert plan_of(q_THD, launches_of(sources), scratch) == Plan(tile, exact=False, parts=parts)
    assert plan_of(q_THD, launches_of(sources), None).parts == 1


def test_a_scale_that_would_turn_the_mask_around_is_refused(device: torch.device) -> None:
    table = Rows.filled(row_format("fp32", 16, 4), 1, device)
    q_THD = draw(5, 1, 1, 16, device=device)
    with pytest.raises(KernelError, match="scale -1"):
        TritonAttention().attend(
            q_THD, [table.source([[0]])], torch.zeros(1, device=device), scale=-1.0, out_THD=q_THD
        )
    assert not torch.isnan(q_THD).any()
