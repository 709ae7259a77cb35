"""Conformance of a CompressKernel.

Legend: T tokens, C channels of a projection, D channels of an entry, E closing windows, S fold segments, J fold steps.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence

import pytest
import torch
from torch import Tensor

from dsv4.config import LayerKind
from dsv4.kernels.base import CompressKernel, Rounding
from dsv4.testing import reference
from dsv4.testing.compress_bench import CompressBench, Variant
from dsv4.testing.kernel_setup import NO_ROWS, KernelSetup, within_a_step

CSA, HCA = LayerKind.CSA, LayerKind.HCA
VARIANTS = [
    Variant(kind=CSA, ratio=4, margin=1),
    Variant(kind=CSA, ratio=3, margin=4),
    Variant(kind=CSA, ratio=1, margin=2),
    Variant(kind=HCA, ratio=6, margin=1),
    Variant(kind=HCA, ratio=5, margin=12),
    Variant(kind=HCA, ratio=1, margin=3),
    Variant(kind=HCA, ratio=16, margin=5),
]
every_variant = pytest.mark.parametrize("variant", VARIANTS, ids=str)
STEP = {"fp32": 2.0**-3, "bf16": 2.0**-3, "fp8": 2.0**-3, "fp4": 0.5}


class CompressConformance(KernelSetup[CompressKernel]):
    """Subclass and give the fixture `kernel`."""

    def bench(
        self, kernel: CompressKernel, variant: Variant, device: torch.device, name: str = "fp32"
    ) -> CompressBench:
        return CompressBench(kernel, variant, device, format_name=name)

    def check_entries(self, bench: CompressBench, slot: int) -> None:
        """All closed entries of a slot against float64."""
        wanted = bench.expected_entries(slot)
        if wanted:
            self.close(bench.entries(slot), wanted, scale=5)

    @every_variant
    def test_1_an_entry_is_pooled_from_the_tokens_of_its_window(
        self, kernel: CompressKernel, device: torch.device, variant: Variant
    ) -> None:
        """1. Entries are the softmax pooling of their windows' tokens, channel by channel, against float64."""
        bench = self.bench(kernel, variant, device)
        source = random.Random(variant.ratio)
        for _ in range(8):
            sizes = {slot: source.choice([0, 1, 2, variant.ratio, 11]) for slot in (2, 0, 1)}
            bench.forward(sizes, padding=source.choice([0, 3]))
        for slot in range(3):
            self.check_entries(bench, slot)
        assert bench.intact()

    @every_variant
    def test_1_the_bits_of_an_entry_do_not_depend_on_how_its_tokens_arrived(
        self, kernel: CompressKernel, device: torch.device, variant: Variant
    ) -> None:
        """1. An entry is pooled in token order, so its bits do not depend on how its tokens arrived: one by one, in
        chunks, beside other requests, in verify forwards that are partly taken back."""
        total = 3 * variant.ratio + 7
        single = self.bench(kernel, variant, device)
        for _ in range(total):
            single.forward({0: 1})
        wanted = single.entries(0)
        assert not torch.isnan(wanted).any()
        for seed in range(4):
            bench, source = self.bench(kernel, variant, device), random.Random(seed)
            slot = (1, 0, 2, 1)[seed]
            bench.ids[slot] = list(single.ids[0])
            while bench.lengths[slot] < total:
                left = total - bench.lengths[slot]
                step = min(left, source.choice([1, 2, variant.ratio + 1, total][: 2 + seed]))
                beside = {2 - slot: source.randrange(5)} if slot != 1 else {}
                taken_back = source.randrange(step) if step <= variant.margin else 0
                bench.forward({slot: step, **beside}, keep={slot: step - taken_back})
            assert torch.equal(bench.entries(slot), wanted)

    @every_variant
    def test_1_gates_of_any_size_pool_without_overflow(
        self, kernel: CompressKernel, device: torch.device, variant: Variant
    ) -> None:
        """1. Gates of some hundreds, up and down: the maximum is taken out before the exponential."""
        bench = self.bench(kernel, variant, device)
        bench.compressor.ape_MC.mul_(150)
        for _ in range(2 * variant.ratio + 3):
            bench.forward({0: 1, 1: 2})
        self.check_entries(bench, 0)
        self.check_entries(bench, 1)

    @every_variant
    def test_2_state_is_written_after_it_was_read(
        self, kernel: CompressKernel, device: torch.device, variant: Variant
    ) -> None:
        """2. Own tokens come from `projected`, older ones from the state; state is written after it was read: chunks
        whose tokens take the very rows that their first window still needs."""
        bench = self.bench(kernel, variant, device)
        clash = 0
        for _ in range(6):
            bench.forward({0: 2 * variant.ratio + variant.margin, 2: variant.margin})
            clash += len(bench.read_rows & bench.written_rows)
        if variant.kind is CSA and variant.ratio > 1:
            assert clash, "the chunks do not reach round the ring"
        self.check_entries(bench, 0)
        self.check_entries(bench, 2)

    @pytest.mark.parametrize("name", ["fp32", "bf16", "fp8"])
    @pytest.mark.parametrize("variant", [VARIANTS[0], VARIANTS[3]], ids=str)
    def test_3_entries_are_rounded_and_stored_in_the_row_format(
        self, kernel: CompressKernel, device: torch.device, variant: Variant, name: str
    ) -> None:
        """3. Entries are normed, rotated at ratio * entry, rounded to fp8, and stored in any row format."""
        bench = self.bench(kernel, variant, device, name)
        for _ in range(5):
            bench.forward({1: 7, 0: 1}, rounding=Rounding.FP8)
        dtype = torch.float32 if name == "fp32" else torch.bfloat16
        wanted = [
            reference.rounded(
                reference.as_dtype(entry, dtype), Rounding.FP8, rope_dim=bench.compressor.rope_dim
            )
            for entry in bench.expected_entries(1)
        ]
        wanted_ED = torch.tensor(wanted, dtype=torch.float64)
        within_a_step(bench.entries(1), wanted_ED, step=STEP[name], share=0.05)

    @pytest.mark.parametrize("name", ["fp32", "bf16", "fp4"])
    def test_3_index_keys_are_rounded_and_stored_in_the_index_format(
        self, kernel: CompressKernel, device: torch.device, name: str
    ) -> None:
        """3. Index keys: Hadamard and fp4 per 32, stored in any index format that holds them."""
        bench = CompressBench(kernel, VARIANTS[0], device, format_name=name, dim=64, indexer=True)
        for _ in range(5):
            bench.forward({1: 7, 0: 1}, rounding=Rounding.HADAMARD_FP4)
        dtype = torch.float32 if name == "fp32" else torch.bfloat16
        wanted = []
        for entry in bench.expected_entries(1):
            turned = reference.as_dtype(reference.hadamard(reference.as_dtype(entry, dtype)), dtype)
            wanted.append(
                reference.block_rounded(turned, block=32, codes=reference.E2M1, floor=6 * 2.0**-126)
            )
        wanted_ED = torch.tensor(wanted, dtype=torch.float64)
        within_a_step(bench.entries(1), wanted_ED, step=STEP["fp4"], share=0.05)

    @every_variant
    def test_3_entries_are_written_only_where_their_loc_is_a_row(
        self, kernel: CompressKernel, device: torch.device, variant: Variant
    ) -> None:
        """3. Entries are written only where their loc is a row: not at -1, INT_MIN, R, INT_MAX; lanes that close
        nothing write nothing."""
        for bad in (*NO_ROWS, "R"):
            bench = self.bench(kernel, variant, device)
            row = bench.table.view.num_rows if bad == "R" else int(bad)
            before = bench.table.rows()
            bench.forward({0: 3 * variant.ratio, 1: 2}, spare_lanes=4, entry_locs=lambda _: row)  # noqa: B023
            assert bench.table.changed(before) == []
            bench.forward({1: variant.ratio - 1}, spare_lanes=4)
            assert bench.table.changed(before) == bench.rows_of(1, bench.closed(1, of=2))

    @every_variant
    def test_4_running_a_forward_twice_changes_nothing(
        self, kernel: CompressKernel, device: torch.device, variant: Variant
    ) -> None:
        """4. Running a forward of at most D tokens a slot twice changes nothing: bytes of entries, state and
        accumulators."""
        bench = self.bench(kernel, variant, device)
        for sizes in _forwards(variant):
            if max(sizes.values()) > variant.margin:  # a chunk's tokens take rows that it has read
                bench.forward(sizes)
                continue
            bench.forward(sizes, keep=dict.fromkeys(sizes, 0))
            once = bench.memory()
            bench.forward(sizes, keep=dict.fromkeys(sizes, 0))
            assert _equal(once, bench.memory())
            bench.forward(sizes)
            assert _equal(once, bench.memory())

    def test_4_a_forward_without_tokens_changes_nothing(
        self, kernel: CompressKernel, device: torch.device
    ) -> None:
        """4. Idle requests and padding alone: no byte changes."""
        for variant in VARIANTS[:1] + VARIANTS[3:4]:
            bench = self.bench(kernel, variant, device)
            bench.forward({0: 9})
            before = bench.memory()
            bench.forward({0: 0, 2: 0}, padding=3)
            bench.forward({0: 0}, spare_lanes=2)
            assert _equal(before, bench.memory())


def _forwards(variant: Variant) -> Sequence[Mapping[int, int]]:
    """Decode, verify, chunks and idle slots."""
    return [
        {0: 2 * variant.ratio + 1, 1: 1},
        {0: 1, 1: variant.margin, 2: 0},
        {1: variant.ratio, 2: 1},
        {0: variant.margin, 2: 3 * variant.ratio + 2},
        {0: 1, 1: 1, 2: 1},
    ]


def _equal(a: Sequence[Tensor], b: Sequence[Tensor]) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))
