"""A file's own tokenizer against the transformers tokenizer that it was made of."""

from __future__ import annotations

import copy
import pickle
import subprocess
import sys

import numpy as np
import pytest

from byte_tokenizer import byte_tokenizer
from foretoken import Engine, Grammar, SamplingParams
from foretoken.drafters.vocabularies import Vocabulary, shared_tokens
from foretoken.engine.detokenizer import Detokenizer
from foretoken.errors import OutOfMemory, PromptError
from foretoken.models import gguf
from foretoken.models.gguf.entries import CONTROL, UNKNOWN
from foretoken.models.gguf.stack import call_with_stack
from foretoken.models.pairing import check_pair, difference
from foretoken.models.wrapping import wrap
from foretoken.sampling import GrammarCompiler
from models.gguf.gguf_files import write
from tiny import tiny_llama

TEXTS = ["hello", "the other the", "naïve café 🎉 日本", " \n\t x", "<end>", "a<end>b", ""]


def make():
    return tiny_llama(vocab_size=264)


@pytest.fixture(scope="module")
def theirs():
    tokenizer = byte_tokenizer()
    tokenizer.backend_tokenizer.pre_tokenizer.use_regex = True  # as llama.cpp's default splits words
    return tokenizer


@pytest.fixture
def model(load, theirs):
    return load("chatting", make, theirs)


@pytest.mark.parametrize("text", TEXTS)
def test_texts_round_trip_in_the_same_tokens(text, model, theirs):
    ours = model.tokenizer(text).input_ids
    assert ours == theirs(text).input_ids
    assert model.tokenizer.decode(ours) == text
    assert model.tokenizer.decode(ours, skip_special_tokens=True) == text.replace("<end>", "")


def test_a_stream_has_whole_characters_alone(model):
    text = "naïve café 🎉 日本語"
    detokenizer = Detokenizer(model.tokenizer)
    parts = [detokenizer.add(token) for token in model.tokenizer(text).input_ids]
    assert "".join(parts) + detokenizer.finish() == text
    assert not any("\ufffd" in part for part in parts)
    assert model.tokenizer.joins_bytes


def test_end_tokens_and_special_tokens_are_the_files(model, theirs):
    assert model.eos_token_ids == (theirs.eos_token_id,)
    assert model.tokenizer.eos_token_id == theirs.eos_token_id
    assert model.tokenizer.all_special_ids == theirs.all_special_ids
    assert model.tokenizer.unk_token_id is None


def test_the_vocabulary_is_the_other_ones_without_padding(model, theirs):
    assert model.tokenizer.get_vocab() == theirs.get_vocab()
    other = wrap(make(), theirs)
    assert difference(model, other) is None
    check_pair(model, other)
    ours, others = Vocabulary(model), Vocabulary(other)
    assert ours.surfaces == others.surfaces
    assert shared_tokens(ours, others) == {token: token for token in theirs.get_vocab().values()}


def test_the_chat_template_is_the_files_and_is_rendered_in_a_sandbox(model, theirs):
    messages = [{"role": "user", "content": "the"}]
    for options in ({}, {"add_generation_prompt": True}):
        ours = model.tokenizer.apply_chat_template(messages, tokenize=False, **options)
        assert ours == theirs.apply_chat_template(messages, tokenize=False, **options)
    found = model.tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=True)["input_ids"]
    assert found == theirs.apply_chat_template(messages, add_generation_prompt=True)["input_ids"]
    tokenizer = copy.deepcopy(model.tokenizer)
    tokenizer.chat_template = "{{ messages.__class__.__mro__ }}"
    with pytest.raises(Exception, match="unsafe"):
        tokenizer.apply_chat_template(messages)
    assert model.tokenizer.chat_template == theirs.chat_template  # a copy has its own


def test_another_process_gets_the_same_tokenizer(model):
    sent = copy.deepcopy(model.tokenizer)
    sent.chat_template = "{{ messages[0].content }}"
    made = pickle.loads(pickle.dumps(sent))
    assert [made(text).input_ids for text in TEXTS] == [sent(text).input_ids for text in TEXTS]
    assert (made.chat_template, made.name_or_path) == (sent.chat_template, sent.name_or_path)
    assert made.token_bytes() == sent.token_bytes()
    assert pickle.loads(pickle.dumps(made)).get_vocab() == sent.get_vocab()


def test_a_template_that_is_not_plain_is_rendered_as_transformers_does(model, theirs):
    ours, theirs = copy.deepcopy(model.tokenizer), copy.deepcopy(theirs)
    ours.chat_template = theirs.chat_template = "{{ eos_token }}{{ messages | tojson }}{{ tools }}{{ extra }}"
    messages, tools = [{"role": "user", "content": "é"}], [{"type": "function", "function": {"name": "f"}}]
    for options in ({}, {"tools": tools}, {"extra": 3}):
        expected = theirs.apply_chat_template(messages, tokenize=False, **options)
        assert ours.apply_chat_template(messages, tokenize=False, **options) == expected


def test_prompts_and_plain_chats_do_not_wait_for_transformers_to_be_imported(files, theirs):
    file = str(files("chatting", make, theirs)[1])
    program = f"""if True:
        import sys
        import foretoken
        engine = foretoken.Engine({file!r}, None, runner="gguf")
        engine.target.tokenizer.chat_template = "{{% set n = namespace(a=1) %}}{{{{ n.a }}}}{{{{ messages | tojson }}}}"
        params = foretoken.SamplingParams(max_new_tokens=1)
        for prompt in ("the", [{{"role": "user", "content": "the"}}]):
            engine.generate(prompt, params)
        sys.exit("transformers" in sys.modules)"""
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0


def test_a_long_run_of_one_kind_of_characters_is_split_within_the_stack(files, theirs):
    """The library calls itself for each character of a word, and would end the process."""
    file = str(files("chatting", make, theirs)[1])
    program = f"""if True:
        import sys
        from foretoken.models.gguf.handle import Handle
        from foretoken.models.gguf.library import library
        from foretoken.models.gguf.tokenizer import GgufTokenizer
        params = library().model_params()
        params.vocab_only = True
        handle = Handle(library(), library().llama_model_load_from_file({file.encode()!r}, params))
        tokenizer = GgufTokenizer(handle, "long", None)
        text = "1" * 60_000
        sys.exit(tokenizer.decode(tokenizer(text).input_ids) != text)"""
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0


def sentencepiece(path, bytes_too=256):
    """A Llama of a SentencePiece vocabulary: control tokens, bytes, and pieces with their scores."""
    module = tiny_llama(vocab_size=272)
    pieces = ["▁", "h", "e", "t", "▁t", "▁th", "▁the", "he", "."]
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(bytes_too)), *pieces]
    kinds = [2, 3, 3, *[6] * bytes_too, *[1] * len(pieces)]
    scores = [0.0] * (3 + bytes_too) + [-float(len(pieces) - len(piece)) for piece in pieces]
    padding = 272 - len(tokens)
    tokens += [f"[PAD{i}]" for i in range(padding)]

    def vocabulary(writer):
        writer.add_tokenizer_model("llama")
        writer.add_token_list(tokens)
        writer.add_token_types(kinds + [5] * padding)
        writer.add_token_scores(scores + [0.0] * padding)
        writer.add_bos_token_id(1)
        writer.add_eos_token_id(2)
        writer.add_unk_token_id(0)
        writer.add_add_bos_token(True)

    return gguf.load(write(module, path, vocabulary), "pieces")


def test_a_sentencepiece_vocabulary(tmp_path):
    model = sentencepiece(tmp_path / "pieces.gguf")
    tokenizer = model.tokenizer
    assert tokenizer("the the").input_ids == [1, 265, 265]
    assert tokenizer.convert_ids_to_tokens([1, 265]) == ["<s>", "▁the"]
    for text in ("the the.", "the é 日本", " the"):
        assert tokenizer.decode(tokenizer(text).input_ids, skip_special_tokens=True) == text
    vocabulary = Vocabulary(model)
    assert vocabulary.start == [1]
    assert vocabulary.surfaces[265] == b" the"
    assert vocabulary.surfaces[3 + 0xE9] == b"\xe9"
    assert vocabulary.surfaces[0:3] == [None] * 3
    assert vocabulary.surfaces[270] is None  # padding
    assert model.eos_token_ids == (2,)
    text = "the é日本 the."
    detokenizer = Detokenizer(tokenizer)
    parts = [detokenizer.add(token) for token in tokenizer(text).input_ids]
    assert "".join(parts) + detokenizer.finish() == text
    assert not tokenizer.joins_bytes  # the first token of a string loses its space


def test_what_the_library_would_end_the_process_for_is_refused_or_no_text(tmp_path, model):
    assert model.tokenizer.decode([-1, 264, 10**6]) == ""
    tokenizer = sentencepiece(tmp_path / "pieces.gguf", bytes_too=0).tokenizer
    assert tokenizer.decode(tokenizer("the</s>the.").input_ids, skip_special_tokens=True) == "the the."
    for text, character in (("the é", "'é'"), ("two", "'o'"), ("the\n", r"'\\n'")):
        with pytest.raises(PromptError, match=f"has no token for {character}, and none for its bytes: leave it out"):
            tokenizer(text)


def test_a_vocabulary_is_searched_once_for_the_tokens_of_a_kind(model):
    entries = model.tokenizer._entries
    assert entries.special == set(entries.having(CONTROL)) | set(entries.having(UNKNOWN))
    assert entries.having(CONTROL) is entries.having(CONTROL)


def test_a_stack_that_the_system_does_not_give_is_no_memory():
    with pytest.raises(OutOfMemory, match="a stack of 1 bytes"):  # refused for its size, as large ones are on Windows
        call_with_stack(1, list)
    assert call_with_stack(1 << 20, list) == []


def test_grammars_allow_the_same_tokens_as_with_the_other_tokenizer(model, theirs):
    ours = GrammarCompiler(model.tokenizer, model.vocab_size, model.eos_token_ids, "ours")
    others = GrammarCompiler(theirs, model.vocab_size, model.eos_token_ids, "theirs")
    for grammar in (
        Grammar.choice(["the other", "naïve 🎉"]),
        Grammar.regex("[a-z]+( [0-9]{2})?"),
        Grammar.json_object(),
    ):
        pair = [ours.matcher(grammar), others.matcher(grammar)]
        for _ in range(12):
            first, second = (np.unpackbits(one.allowed([], []), bitorder="little") for one in pair)
            size = min(len(first), len(second))
            assert (first[:size] == second[:size]).all()
            assert not first[size:].any()
            assert pair[0].forced(4) == pair[1].forced(4)
            token = int(np.flatnonzero(first)[0])
            if token in model.eos_token_ids or not all([one.advance(token) for one in pair]):
                break


def test_an_output_of_a_file_follows_a_grammar(model):
    params = SamplingParams(grammar=Grammar.regex("the [0-9]{3}"), seed=1, max_new_tokens=20)
    text = Engine(model, "prompt-lookup").generate("hello", params).text
    assert text.startswith("the ")
    assert text[4:].isdigit()
