from __future__ import annotations

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers.decoders import ByteFallback, Fuse, Sequence

from byte_tokenizer import byte_tokenizer
from foretoken.engine.detokenizer import Detokenizer, continuation
from foretoken.models.tokenizers import joins_bytes

TOKENIZER = byte_tokenizer()


def ids(text: str) -> list[int]:
    return list(TOKENIZER(text).input_ids)


def run(tokens: list[int], **options) -> tuple[list[str], Detokenizer]:
    detokenizer = Detokenizer(TOKENIZER, **options)
    parts = []
    for token in tokens:
        parts.append(detokenizer.add(token))
        if detokenizer.stopped:
            break
    parts.append(detokenizer.finish())
    return parts, detokenizer


@settings(derandomize=True, deadline=None, max_examples=60)
@given(st.text(max_size=20), st.text(max_size=5))
def test_parts_add_up_to_the_text(text, prompt):
    parts, detokenizer = run(ids(text), prompt=ids(prompt))
    assert "".join(parts) == detokenizer.text == text


@settings(derandomize=True, deadline=None, max_examples=60)
@given(st.text(alphabet="abé€", max_size=30), st.lists(st.text("abé€", min_size=1, max_size=3), max_size=3))
def test_stop_strings_end_the_text_where_a_search_finds_them(text, stop):
    parts, detokenizer = run(ids(text), stop=stop)
    # The token that completes a stop string ends the text; of several completed by it, the one that begins first cuts.
    ends = [text.find(s) + len(s) for s in stop if s in text]
    if not ends:
        assert "".join(parts) == text
        return
    seen = text[: min(ends)]
    cut = min(seen.find(s) for s in stop if s in seen)
    assert "".join(parts) == detokenizer.text == text[:cut]
    assert detokenizer.stopped


def test_characters_are_whole():
    tokens = ids("a€b")
    assert len(tokens) == 5
    parts, _ = run(tokens)
    assert parts == ["a", "", "", "€", "b", ""]


def test_broken_bytes_are_shown_in_the_end():
    parts, detokenizer = run(ids("a€")[:-1])
    assert "".join(parts) == detokenizer.text == "a\ufffd"


class FallsBackToBytes:
    """A token a byte, decoded as SentencePiece's byte fallback is: a run that is no UTF-8 has no characters at all."""

    def __init__(self) -> None:
        self._decoder = Sequence([ByteFallback(), Fuse()])

    def decode(self, tokens: list[int], **options: object) -> str:
        return str(self._decoder.decode([f"<0x{token:02X}>" for token in tokens]))


@pytest.mark.parametrize("cut", range(5))
def test_whole_outputs_have_the_characters_before_a_cut_one_as_streams_have(cut):
    tokenizer, text = FallsBackToBytes(), "ab世界😀"
    tokens = list(text.encode())[: len(text.encode()) - cut]
    growing = Detokenizer(tokenizer)
    streamed = "".join([*map(growing.add, tokens), growing.finish()])
    assert continuation(tokenizer, [], tokens) == streamed == growing.text
    assert streamed.rstrip("\ufffd") == (text[: 5 - (cut > 0)])


def test_whole_outputs_keep_what_a_tokenizer_finds_behind_broken_bytes():
    class Bytes:
        def decode(self, tokens: list[int], **options: object) -> str:
            return bytes(tokens).decode(errors="replace")

    for broken in range(10):
        for end in (b"fine", b"fine\xe4"):
            text = b"ok" + b"\xff" * broken + "世界".encode() + end
            assert continuation(Bytes(), [], list(text)) == text.decode(errors="replace")


class Counted:
    """A tokenizer that counts its decodings; `joins_bytes` says what it says."""

    def __init__(self, joins_bytes: bool) -> None:
        self.joins_bytes, self.decoded = joins_bytes, []

    def decode(self, tokens: list[int], **options: object) -> str:
        self.decoded.append(list(tokens))
        return str(TOKENIZER.decode(tokens, **options))


@settings(derandomize=True, deadline=None, max_examples=200)
@given(
    st.lists(st.one_of(st.integers(0, 258), st.sampled_from(ids("é€😀the ab"))), max_size=40),
    st.lists(st.integers(0, 258), max_size=8),
    st.booleans(),
    st.sampled_from([(), ("he",), ("€", "b a")]),
)
@example([258, *ids("€ab")[1:]], ids("ab€")[:3], True, ())
@example([*ids("€")[:1] * 8, 258, *ids("€ab")[1:]], [], True, ())
def test_joined_strings_of_tokens_are_what_windows_of_them_are_decoded_to(tokens, prompt, skip_special, stop):
    """Invalid UTF-8, special tokens, and prompts that end inside a character among them."""
    joined, windows = (Detokenizer(Counted(joins), stop, prompt, skip_special) for joins in (True, False))
    for token in tokens:
        assert joined.add(token) == windows.add(token)
    assert joined.finish() == windows.finish()
    assert (joined.text, joined.stop_string) == (windows.text, windows.stop_string)


def test_tokens_of_whole_characters_are_decoded_once_by_all_that_share_a_tokenizer():
    tokenizer, text = Counted(joins_bytes=True), ids("abcabcthe the cab")
    for _ in range(3):
        detokenizer = Detokenizer(tokenizer)
        assert "".join([*map(detokenizer.add, text), detokenizer.finish()]) == "abcabcthe the cab"
    assert sorted(tokenizer.decoded) == sorted([token] for token in set(text))
    special = Detokenizer(tokenizer, skip_special=False)
    assert special.add(TOKENIZER.eos_token_id) == "<end>"
    assert Detokenizer(tokenizer).add(TOKENIZER.eos_token_id) == ""


def test_which_tokenizers_join_bytes():
    class Own(type(TOKENIZER)):
        def decode(self, *arguments: object, **options: object) -> str:
            return "x"

    pieces = byte_tokenizer()
    pieces.backend_tokenizer.decoder = Sequence([ByteFallback(), Fuse()])
    own = Own(tokenizer_object=TOKENIZER.backend_tokenizer)
    assert [joins_bytes(one) for one in (TOKENIZER, pieces, own, FallsBackToBytes())] == [True, False, False, False]
    changed, quick = byte_tokenizer(), Counted(joins_bytes=True)
    assert joins_bytes(changed)
    assert joins_bytes(quick)
    for one in (changed, quick):
        one.decode = lambda tokens, **options: "x"
        assert not joins_bytes(one)

    class PassesOn:
        def __getattr__(self, name: str) -> object:
            return getattr(Counted(joins_bytes=True), name)

        def decode(self, tokens: list[int], **options: object) -> str:
            return "x"

    assert PassesOn().joins_bytes
    assert not joins_bytes(PassesOn())


def test_a_tokenizer_without_a_hash_is_served():
    class Equal(Counted):
        def __eq__(self, other: object) -> bool:
            return isinstance(other, Equal)

    detokenizer = Detokenizer(Equal(joins_bytes=True))
    assert [detokenizer.add(token) for token in ids("ab")] == ["a", "b"]


def test_a_stop_string_may_end_inside_a_token():
    # "the" is one token; "xt" ends after its first letter.
    parts, detokenizer = run(ids("axthe"), stop=["xt"])
    assert parts[0] == "a"
    assert detokenizer.text == "a"
    assert detokenizer.stopped


def test_the_beginning_of_a_stop_string_is_held_back():
    detokenizer = Detokenizer(TOKENIZER, stop=["###"])
    assert [detokenizer.add(token) for token in ids("a##b")] == ["a", "", "", "##b"]


def test_special_tokens_have_no_text():
    assert "".join(run([*ids("ab"), TOKENIZER.eos_token_id])[0]) == "ab"


@pytest.mark.parametrize("stop", [(), ("zz",)])
def test_nothing_is_lost_when_the_text_ends_inside_a_held_part(stop):
    assert "".join(run(ids("az"), stop=stop)[0]) == "az"


def test_a_stop_string_before_an_unfinished_character_is_found_at_the_end():
    class Pieces:
        texts = (b"ab\xc3", b"\xa9")

        def decode(self, tokens, **options):
            return b"".join(self.texts[token] for token in tokens).decode("utf8", "replace")

    for check_stop, text in ((True, "a"), (False, "ab\ufffd")):
        detokenizer = Detokenizer(Pieces(), stop=["b"])
        assert detokenizer.add(0, check_stop) == ""
        assert detokenizer.finish(check_stop) == detokenizer.text == text
        assert detokenizer.stopped is check_stop
