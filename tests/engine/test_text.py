"""Stop strings and streaming against a brute-force search of the whole text."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from dsv4.engine.text import TextStream


class Pieces:
    """Decodes token i to the i-th piece; the last one only shows at the end, like a cut character."""

    def __init__(self, pieces: list[str], tail: str = "") -> None:
        self.pieces, self.tail = pieces, tail

    def push(self, token_id: int) -> str:
        return self.pieces[token_id]

    def flush(self) -> str:
        return self.tail


ALPHABET = st.text(alphabet="ab", max_size=4)


@given(
    st.lists(ALPHABET, max_size=8),
    ALPHABET,
    st.lists(st.text(alphabet="ab", min_size=1, max_size=4), max_size=3),
)
def test_text_ends_before_the_first_stop_and_streams_only_what_is_final(
    pieces: list[str], tail: str, stop: list[str]
) -> None:
    stream, streamed, whole = TextStream(Pieces(pieces, tail), tuple(stop)), "", ""
    for token_id, piece in enumerate(pieces):
        whole += piece
        stopped = stream.push(token_id)
        assert stopped == any(s in whole for s in stop)
        streamed += stream.take()
        if stopped:
            break
    else:
        stream.finish()
        whole += tail
    cut = min((whole.find(s) for s in stop if s in whole), default=len(whole))
    assert stream.text == whole[:cut]
    assert streamed + stream.take() == whole[:cut]
    assert whole[:cut].startswith(streamed)


def test_text_without_stop_strings_streams_at_once() -> None:
    stream = TextStream(Pieces(["x", "yz"]))
    stream.push(0)
    assert stream.take() == "x"
    stream.push(1)
    assert (stream.take(), stream.take()) == ("yz", "")


def test_only_the_tail_that_may_become_a_stop_is_kept_back() -> None:
    stream = TextStream(Pieces(["one E", "N", "T END"]), ("END",))
    stream.push(0)
    assert stream.take() == "one "
    stream.push(1)
    assert stream.take() == ""
    assert stream.push(2)
    assert (stream.take(), stream.text) == ("ENT ", "one ENT ")


def test_without_a_decoder_there_is_no_text() -> None:
    stream = TextStream(None)
    assert not stream.push(3)
    stream.finish()
    assert (stream.take(), stream.text) == ("", "")
