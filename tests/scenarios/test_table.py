"""Which of the 81 scenarios a test shows, and for the others (or parts of them) why none does."""

from __future__ import annotations

from tests.scenarios.catalogue import FOLDER, covered

CLASSES = {
    "A": (1, 2),
    "B": (3, 4, 5),
    "C": (6, 7, 8, 9, 10),
    "D": (11, 12, 13, 14),
    "E": (15, 16, 17, 18),
    "F": (19, 20, 21, 22),
    "G": (23, 24, 25),
    "H": (26, 27, 28, 29, 30, 31, 32),
    "I": (33, 34),
    "J": (35, 36, 37, 38, 39, 40),
    "K": (41, 42, 43),
    "L": (44, 45, 46),
    "M": (47, 48, 49),
    "N": (50, 51, 52, 53, 54),
    "O": (55, 56, 57, 58, 59),
    "P": (60, 61, 62),
    "Q": (63, 64, 65, 66),
    "R": (67, 68),
    "S": (69, 70, 71),
    "T": (72, 73),
    "U": (74, 75, 76, 77),
    "V": (78, 79),
    "W": (80,),
    "X": (81,),
}

NOT_COVERED = {
    13: "needs a prefix index that finds hits by itself; the package has none",
    30: "needs graph capture at the largest bucket and compute-sanitizer on a GPU",
    72: "needs a GPU: an asynchronous copy out of a pinned buffer that is rewritten",
    73: "needs a GPU: two streams that share one scratch",
    78: "needs tensor-parallel loading; the package has none",
}

PARTLY_COVERED = {
    4: "equality of two planners: there is one, in torch",
    26: "capture and replay need a GPU; the exchanged lengths run eagerly",
    25: "a list longer than its width cannot raise in a kernel; that no list is longer is shown on the plan",
    27: "a captured bucket needs a GPU; padding is compared eagerly",
    29: "capture needs a GPU; widths and forwards are shown for every capacity",
    32: "capture needs a GPU; a pool, batch or plan of nothing is refused",
    33: "on the address arithmetic of rows; kernels of a GPU have their own",
    34: "on the reference kernel; a hang can only occur on a GPU",
    45: "no selection is kept over forwards, so there is no stash to get wrong",
    69: "peak memory of the device needs a GPU; the declared scratch and the sets are shown",
    70: "the allocator's counter needs a GPU; buffers are shown to stay where they are",
    80: "by the torch kernels on a CPU",
}


def test_every_scenario_is_covered_or_has_a_reason() -> None:
    found = covered()
    every = {number for numbers in CLASSES.values() for number in numbers}
    assert every == set(range(1, 82))
    assert set(found) & set(NOT_COVERED) == set(), "covered, and yet a reason why not"
    assert set(found) | set(NOT_COVERED) == every
    assert set(PARTLY_COVERED) <= set(found)


def test_every_test_names_the_class_of_its_scenarios() -> None:
    for number, tests in covered().items():
        for letter, name in tests:
            assert number in CLASSES[letter], f"{name}: {number} is not of class {letter}"
            assert name.startswith(f"test_{letter.lower()}_"), f"{name} is in another class's file"


def test_every_test_of_a_class_file_stands_for_a_scenario() -> None:
    named = {name for tests in covered().values() for _, name in tests}
    for path in FOLDER.glob("test_?_*.py"):
        tests = [line for line in path.read_text().splitlines() if line.startswith("def test_")]
        for line in tests:
            name = line.removeprefix("def ").partition("(")[0]
            assert f"{path.name}::{name}" in named, f"{path.name}::{name} has no @scenario"
