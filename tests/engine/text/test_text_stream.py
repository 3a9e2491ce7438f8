"""However tokens arrive, the pieces join to the decoded text, cut before the first stop string."""

import codecs

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import decoders, models

from engine.text.byte_level import _ALPHABET
from engine.text.stream import TextStream
from engine.text.tokenizer import Tokenizer


def _tokenizer() -> Tokenizer:
    """One token per byte, some of several characters, an end token (256) and some words."""
    words = [
        "<end>",
        *("".join(map({b: c for c, b in _ALPHABET.items()}.get, w)) for w in (b"ab", b"abc", b"\xc3\xa9b")),
    ]
    entries = {**_ALPHABET, **{w: 256 + i for i, w in enumerate(words)}}
    backend = tokenizers.Tokenizer(models.BPE(entries, []))
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<end>"])
    return Tokenizer(backend, stop_token_ids=[256])


TOKENIZER = _tokenizer()
IDS = st.lists(st.sampled_from([*b"abcd ", 256, 257, 258, 259, *"é🎉".encode(), 0xFF]), max_size=30)
STOPS = st.lists(st.text("abcdé\ufffd", min_size=1, max_size=4), max_size=4)


def _cut(text: str, stops: list[str]) -> str:
    """The definition: walk along the text; the first character that completes a stop string ends it before the longest
    of those completed."""
    for end in range(len(text) + 1):
        completed = [stop for stop in stops if text[:end].endswith(stop)]
        if completed:
            return text[: end - max(map(len, completed))]
    return text


@st.composite
def _grouped(draw):
    ids = draw(IDS)
    borders = sorted(draw(st.lists(st.integers(0, len(ids)), max_size=6)))
    return [ids[a:b] for a, b in zip([0, *borders], [*borders, len(ids)], strict=True)]


@settings(max_examples=500)
@given(_grouped(), STOPS)
def test_pieces_join_to_the_decoded_text_cut_at_the_first_stop(groups, stops):
    ids = [one for group in groups for one in group]
    stream = TextStream(TOKENIZER, stops)
    pieces = [stream.feed(group) for group in groups]
    assert "".join([*pieces, stream.finish()]) == _cut(TOKENIZER.decode(ids), stops)


@settings(max_examples=300)
@given(_grouped(), STOPS)
def test_the_token_count_ends_with_the_token_that_completed_the_stop(groups, stops):
    ids = [one for group in groups for one in group]
    stream = TextStream(TOKENIZER, stops)
    for group in groups:
        stream.feed(group)
    alone = TextStream(TOKENIZER, stops)
    for one in ids:
        if not alone.stopped:
            alone.feed([one])
    assert (stream.tokens, stream.stopped) == (alone.tokens, alone.stopped)
    if not stream.stopped:
        assert stream.tokens == len(ids)


@settings(max_examples=300)
@given(_grouped(), STOPS, st.integers(0, 12))
def test_a_stop_string_that_comes_too_early_is_none(groups, stops, least):
    """The text ends where the first token behind the least number of them completes a stop string."""
    stream = TextStream(TOKENIZER, stops, least)
    text = "".join(map(stream.feed, groups)) + stream.finish()
    ids = [one for group in groups for one in group]
    decoder, known = codecs.getincrementaldecoder("utf-8")("replace"), ""
    for count, one in enumerate([*ids, None], start=1):
        spelled = decoder.decode(b"" if one is None else TOKENIZER.token_bytes(one), one is None)
        for char in spelled:
            known += char
            completed = [stop for stop in stops if known.endswith(stop)]
            if completed and min(count, len(ids)) > least:
                assert text == known[: len(known) - max(map(len, completed))]
                assert stream.stopped
                return
    assert (text, stream.stopped) == (known, False)


@given(st.text(min_size=1))
def test_no_piece_holds_half_a_character(text):
    stream = TextStream(TOKENIZER)
    pieces = [stream.feed([byte]) for byte in text.encode()]
    assert "".join(pieces) == text
    assert stream.finish() == ""


@given(_grouped(), STOPS)
def test_what_is_certain_is_not_held_back(groups, stops):
    stream = TextStream(TOKENIZER, stops)
    for group in groups:
        stream.feed(group)
    assert len(stream._held) < max(map(len, stops), default=1)


def test_an_unfinished_character_at_the_end_becomes_a_replacement():
    stream = TextStream(TOKENIZER)
    assert stream.feed("🎉".encode()[:3]) == ""
    assert stream.finish() == "\ufffd"


def test_end_tokens_are_counted_and_not_shown():
    stream = TextStream(TOKENIZER)
    assert stream.feed([97, 256]) == "a"
    assert stream.tokens == 2


@pytest.mark.parametrize("group", [1, 2, 3, 6])
def test_a_stop_string_across_tokens(group):
    ids = [97, 98, 99, 100, 97, 98]
    stream = TextStream(TOKENIZER, ["cda"])
    text = "".join(stream.feed(ids[at : at + group]) for at in range(0, len(ids), group))
    assert (text, stream.stopped, stream.tokens, stream.finish()) == ("ab", True, 5, "")
