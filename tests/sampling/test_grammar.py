"""Grammars: their values, what is refused, and which tokens they allow."""

from __future__ import annotations

import math
import random
import re

import numpy as np
import pytest
import torch

from byte_table import ByteTable
from byte_tokenizer import byte_tokenizer
from foretoken import Engine, Grammar, GrammarLimits, SamplingParams, load
from foretoken.drafters import PromptLookup
from foretoken.errors import GrammarError, ParameterError
from foretoken.limits import Limits
from foretoken.sampling import GrammarCompiler, GrammarMatcher, mask_logits
from tiny import tiny_llama
from tiny_tokenizers import byte_bpe, sentencepiece, with_tokens

PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "age": {"type": "integer"}},
    "required": ["name", "age"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def tokenizer():
    return byte_tokenizer()


@pytest.fixture(scope="module")
def compiler(tokenizer):
    return GrammarCompiler(tokenizer, 259, (258,), "tiny")


def ids(mask: np.ndarray) -> set[int]:
    return set(np.flatnonzero(np.unpackbits(mask, bitorder="little")).tolist())


def consume(matcher: GrammarMatcher, tokens: list[int]) -> None:
    for token in tokens:
        assert matcher.advance(token)


def test_equal_grammars_are_equal_values():
    first, second = Grammar.json_schema(PERSON), Grammar.json_schema(dict(PERSON))
    assert first == second
    assert hash(first) == hash(second)
    assert Grammar.json_schema('{"type": "string"}') == Grammar.json_schema({"type": "string"})
    assert Grammar.regex("a") != Grammar.lark("a")
    assert hash(SamplingParams(grammar=first)) == hash(SamplingParams(grammar=second))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Grammar.regex(""), "regex is '': give a string"),
        (lambda: Grammar.regex(3), "regex is 3: give a string"),
        (lambda: Grammar.lark(None), "Lark grammar is None: give a string"),
        (lambda: Grammar.choice([]), "choice is \\[\\]: give a list of strings, one or more"),
        (lambda: Grammar.choice("yes"), "choice is 'yes': give a list"),
        (lambda: Grammar.choice(["yes", 1]), "choice has 1: give strings"),
        (lambda: Grammar.json_schema([1]), "JSON schema is \\[1\\]: give an object"),
        (lambda: Grammar.json_schema(False), "JSON schema is False: give an object"),
        (lambda: Grammar.json_schema("{"), "JSON schema '{' is not JSON"),
        (lambda: Grammar.json_schema("[" * 200_000), "is not JSON|open brackets"),
        (lambda: Grammar.json_schema({"const": math.nan}), "can't be written as JSON"),
        (lambda: Grammar.json_schema({"const": b"x"}), "can't be written as JSON"),
        (lambda: Grammar.regex("a\ud800"), "half a surrogate pair at character 1"),
        (lambda: Grammar.regex("aaaa", limits=GrammarLimits(source_bytes=3)), "has 4 bytes, and source_bytes allows 3"),
        (lambda: Grammar.regex("((a))", limits=GrammarLimits(depth=1)), "2 open brackets at once, and depth allows 1"),
        (lambda: Grammar.regex("a", limits=3), "limits is 3: give GrammarLimits"),
        (lambda: GrammarLimits(depth=0), "depth is 0: give an integer of at least 1"),
        (lambda: SamplingParams(grammar="[0-9]+"), "grammar is '\\[0-9\\]\\+': give a Grammar"),
    ],
)
def test_wrong_values_are_refused(make, message):
    with pytest.raises(ParameterError, match=message):
        make()


def test_a_schema_may_be_true():
    assert Grammar.json_schema(True) == Grammar.json_schema("true") == Grammar.json_schema({})


def test_values_at_the_limits_are_taken():
    assert Grammar.regex("aaa", limits=GrammarLimits(source_bytes=3)).source == "aaa"
    assert Grammar.regex("(a)(b)", limits=GrammarLimits(depth=1)).source == "(a)(b)"


@pytest.mark.parametrize(
    ("grammar", "message"),
    [
        (Grammar.regex("(a"), "regex '\\(a' can't be followed \\(unclosed group\\)"),
        (Grammar.regex("(?=a)b"), "look-around"),
        (Grammar.lark("start: x"), 'unknown name: "x"'),
        (Grammar.lark("nothing"), "Lark grammar 'nothing' can't be followed"),
        (Grammar.json_schema({"type": "foo"}), "Invalid type: foo"),
        (Grammar.json_schema({"not": {"type": "string"}}), "Unimplemented keys"),
        (Grammar.json_schema({"$ref": "http://localhost/x"}), "http://localhost/x"),
        (Grammar.json_schema({"type": "array", "minItems": 3, "maxItems": 2}), "minItems \\(3\\)"),
        (
            Grammar.regex("(((((.{0,20}){0,20}){0,20}){0,20}){0,20}x|y)*z", limits=GrammarLimits(compile_fuel=1)),
            "grammar\\) too big",
        ),
        (
            Grammar.json_schema({"enum": [f"v{i}" for i in range(50)]}, limits=GrammarLimits(grammar_size=1)),
            "raise its GrammarLimits",
        ),
        (
            Grammar.json_schema(
                {"allOf": [{"oneOf": [{"properties": {f"p{i}{j}": {} for j in range(20)}} for i in range(20)]}] * 4}
            ),
            "schema too large",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else value.kind,
)
def test_grammars_that_cant_be_compiled_are_refused(compiler, grammar, message):
    with pytest.raises(ParameterError, match=message):
        compiler.matcher(grammar)


def test_a_target_without_a_usable_tokenizer_is_named():
    with pytest.raises(ParameterError, match="tiny was loaded without a tokenizer"):
        GrammarCompiler(None, 8, (0,), "tiny").matcher(Grammar.regex("a"))
    with pytest.raises(ParameterError, match="a int, whose tokens have no known bytes"):
        GrammarCompiler(3, 8, (0,), "tiny").matcher(Grammar.regex("a"))


def test_a_limit_that_is_exceeded_on_the_way_ends_the_request():
    target = load(tiny_llama(vocab_size=259), tokenizer=byte_tokenizer())
    limits = GrammarLimits(step_items=60)
    grammar = Grammar.lark('start: x*\nx: "a" y | "a" z\ny: "b"? y?\nz: "b"? z? y?', limits=limits)
    a, b = byte_tokenizer().encode("ab")
    params = SamplingParams(grammar=grammar, max_new_tokens=60, temperature=0, logit_bias={a: 20, b: 40})
    with pytest.raises(ParameterError, match=r"exceeds a limit .*: simplify it, or raise its GrammarLimits"):
        Engine(target, None).generate([1, 2], params)


def test_bans_that_leave_nothing_end_the_request_with_an_error():
    target = load(tiny_llama(vocab_size=259), tokenizer=byte_tokenizer())
    tokens = byte_tokenizer().encode("ab")
    params = SamplingParams(grammar=Grammar.regex("ab"), logit_bias={tokens[1]: -math.inf})
    for drafter in (None, target):
        with pytest.raises(ParameterError, match=r"after . tokens of output the regex 'ab' allows no token"):
            Engine(target, drafter, num_speculative_tokens=3).generate([1, 2], params)


def test_the_output_ends_with_the_grammar(tokenizer):
    target = load(tiny_llama(vocab_size=259, eos_token_id=258), tokenizer=tokenizer)
    for options in ({}, {"ignore_eos": True}, {"min_new_tokens": 8}):
        for drafter in (None, target):
            engine = Engine(target, drafter, num_speculative_tokens=4)
            params = SamplingParams(grammar=Grammar.choice(["the end", "the other"]), seed=3, **options)
            completion = engine.generate("x", params)
            assert completion.text in ("the end", "the other")
            assert completion.finish_reason == "stop"
    # Where it may end and may go on, an end token ends it; a stop string and the longest length do as ever.
    digits = Grammar.regex("[0-9]+")
    found = [Engine(target).generate("x", SamplingParams(grammar=digits, seed=seed)) for seed in range(20)]
    assert all(one.text.isdigit() and one.finish_reason == "stop" for one in found)
    long = Engine(target).generate("x", SamplingParams(grammar=digits, seed=0, min_new_tokens=30, max_new_tokens=30))
    assert (len(long.text), long.finish_reason) == (30, "length")
    stopped = Engine(target).generate(
        "x", SamplingParams(grammar=digits, seed=0, min_new_tokens=5, stop=["1", "2", "3", "4", "5"], max_new_tokens=90)
    )
    assert stopped.finish_reason == "stop"


@pytest.mark.parametrize("padded", [4, 9])
def test_a_model_without_end_tokens_ends_with_the_grammar(padded):
    target = load(tiny_llama(vocab_size=padded), tokenizer=ByteTable([b"a", b"b", b"ab", b"c"]))
    params = [SamplingParams(grammar=Grammar.regex("[ab]{2}c?"), max_new_tokens=3, seed=seed) for seed in range(30)]
    found = Engine(target, None).generate([[1]] * 30, params)
    assert {one.text for one in found} <= {"aac", "abc", "bac", "bbc"}
    assert {one.text[1:] for one in found} == {"ac", "bc"}
    assert all(token < 4 for one in found for token in one.token_ids)


@pytest.mark.parametrize("special", [False, True])
@pytest.mark.parametrize("make", [byte_bpe, sentencepiece])
def test_names_of_tokens_may_be_part_of_the_text(make, special):
    """A token <tool_call> is the text of its name to many tokenizers; where it is special, its name has to be spelt."""
    tokenizer = with_tokens(make(), "<tool_call>", special=special)
    end, added = tokenizer.eos_token_id, tokenizer.convert_tokens_to_ids("<tool_call>")
    target = load(tiny_llama(vocab_size=len(tokenizer) + 5, eos_token_id=end), tokenizer=tokenizer)
    for source in ("<tool_call>\n[0-9]</s>", "[ab]<tool_call>"):
        params = SamplingParams(grammar=Grammar.regex(source), temperature=0)
        plain, drafted = (Engine(target, drafter).generate("the", params) for drafter in (None, "prompt-lookup"))
        assert re.fullmatch(source, plain.text)
        assert plain.token_ids == drafted.token_ids
        assert (added in plain.token_ids) is not special
        assert plain.token_ids.count(end) == 0
    matcher = GrammarCompiler(tokenizer, len(tokenizer), (end,), "tiny").matcher(Grammar.regex("[a-z<>_]+"))
    assert (added in ids(matcher.allowed([], [])[0])) is not special


@pytest.mark.parametrize("special", [False, True])
def test_a_lark_grammar_may_name_tokens(special):
    """Outside of its strings, expressions and comments."""
    tokenizer = with_tokens(byte_bpe(), "<think>", special=special)
    think = tokenizer.convert_tokens_to_ids("<think>")
    source = 'start: <think> "\\"<think>" /a<think>\\/b\n<think>/ end // <think>"\nend: "<think>" # "\n'
    compiler = GrammarCompiler(tokenizer, len(tokenizer), (tokenizer.eos_token_id,), "tiny")
    matcher = compiler.matcher(Grammar.lark(source))
    tokens = []
    while not matcher.finished:
        (token,) = np.flatnonzero(np.unpackbits(matcher.allowed([], [])[0], bitorder="little")).tolist()
        consume(matcher, [token])
        tokens.append(token)
    assert tokens[0] == think
    assert tokens.count(think) == (1 if special else 5)
    assert b"".join(map(compiler.token_bytes, tokens)) == b'<think>"<think>a<think>/b\n<think><think>'


@pytest.mark.parametrize("mark", ['"', "/"])
def test_a_lark_grammar_that_closes_nothing_is_refused_at_once(mark):
    """Not in a time that grows with the square of its length, in which no other request would go on: minutes."""
    tokenizer = byte_bpe()
    compiler = GrammarCompiler(tokenizer, len(tokenizer), (tokenizer.eos_token_id,), "tiny")
    with pytest.raises(GrammarError, match="lexer error"):
        compiler.matcher(Grammar.lark(f"start: {mark}" + f"\\{mark}" * 400_000))


def test_of_a_long_text_that_must_follow_the_beginning_alone_is_tokenized_for_each_token():
    """Else each token takes as long as the whole text, and the text a time that grows with the square of its length."""
    asked = []

    class Counting(ByteTable):
        def encode_bytes(self, text: bytes) -> list[int]:
            asked.append(len(text))
            return super().encode_bytes(text)

    compiler = GrammarCompiler(Counting([b"a", b"b", b"ab", b"c"]), 4, (), "tiny")
    matcher = compiler.matcher(Grammar.choice(["abc" * 600]))
    for token in [2, 3] * 600:
        assert ids(matcher.allowed([], [])[0]) == {token}
        consume(matcher, [token])
    assert matcher.finished
    assert max(asked) <= 1024


def test_a_tokenizer_that_puts_a_space_before_a_text_is_used_without_it():
    class Spaced(ByteTable):
        def encode_bytes(self, text: bytes) -> list[int]:
            return super().encode_bytes(b" " + text)

    tokens = [b"", b"a", b"b", b" ", b"ab", b" a", b"c"]
    matcher = GrammarCompiler(Spaced(tokens), len(tokens), (0,), "tiny").matcher(Grammar.regex("abc[ac]"))
    assert matcher.forced(9) == [4, 6]


def test_logprobs_are_those_of_the_unmasked_model(tokenizer):
    target = load(tiny_llama(vocab_size=259, eos_token_id=258), tokenizer=tokenizer)
    params = SamplingParams(grammar=Grammar.choice(["yes", "no"]), logprobs=1, temperature=0)
    entry = Engine(target, None).generate("x", params).logprobs[0]
    plain = Engine(target, None).generate("x", SamplingParams(logprobs=1, temperature=0, max_new_tokens=1)).logprobs[0]
    assert entry.top == plain.top
    assert entry.logprob < plain.logprob


def test_masks_of_a_tree_are_those_of_its_paths(compiler, tokenizer):
    """Each node's mask is the one of a fresh matcher that took in its path, wherever the walk was before."""
    generator = random.Random(0)
    for grammar in (Grammar.json_schema(PERSON), Grammar.regex("(the|[a-z]{2,5})( [0-9]+)*"), Grammar.json_object()):
        for _ in range(15):
            matcher = compiler.matcher(grammar)
            output = []
            for _ in range(generator.randrange(12)):
                allowed = sorted(ids(matcher.allowed([], [])[0]) - {258})
                if matcher.finished or not allowed:
                    break
                output.append(generator.choice(allowed))
                consume(matcher, output[-1:])
            tokens, parents = draft(generator, matcher)
            masks = matcher.allowed(tokens, parents)
            assert (matcher.allowed(tokens, parents) == masks).all()
            for node in range(len(tokens) + 1):
                fresh = compiler.matcher(grammar)
                consume(fresh, output)
                path = path_to(node, tokens, parents)
                inside = True
                for token in path:
                    inside = inside and token in ids(fresh.allowed([], [])[0])
                    inside = inside and fresh.advance(token) and not fresh.finished
                expected = fresh.allowed([], [])[0] if inside else np.full_like(masks[node], 0xFF)
                assert (masks[node] == expected).all()


def draft(generator: random.Random, matcher: GrammarMatcher) -> tuple[list[int], list[int]]:
    """A random tree, most of whose tokens are allowed, its nodes in an order that is not depth first."""
    tokens, parents = [], []
    for node in range(generator.randrange(1, 9)):
        parent = generator.randrange(node + 1)
        masks = matcher.allowed(tokens, parents)
        allowed = sorted(ids(masks[parent]))
        tokens.append(generator.choice(allowed) if generator.random() < 0.9 else generator.randrange(259))
        parents.append(parent)
    return tokens, parents


def path_to(node: int, tokens: list[int], parents: list[int]) -> list[int]:
    return [] if node == 0 else [*path_to(parents[node - 1], tokens, parents), tokens[node - 1]]


def test_a_matcher_refuses_what_the_grammar_forbids_and_stays_where_it_is(compiler, tokenizer):
    matcher = compiler.matcher(Grammar.regex("[ab]c"))
    a, b, c = tokenizer.encode("abc")
    assert not matcher.advance(c)
    assert not matcher.advance(100_000)
    assert ids(matcher.allowed([], [])[0]) == {a, b}
    consume(matcher, [b, c])
    assert matcher.finished
    assert not matcher.advance(a)


def test_only_rows_with_a_grammar_are_masked(compiler, tokenizer):
    logits = torch.randn(3, 3, 300, generator=torch.Generator().manual_seed(0))
    a, b = tokenizer.encode("ab")
    tokens = torch.tensor([[a, b], [5, 6], [b, 0]])
    parents = torch.tensor([[0, 1], [0, 1], [0, 1]])
    matchers = [compiler.matcher(Grammar.regex("[ab]b?[0-3]?")), None, compiler.matcher(Grammar.regex("[ab]c"))]
    masked = mask_logits(logits, matchers, tokens, parents, torch.tensor([2, 2, 1]))
    assert torch.equal(masked[1], logits[1])
    found = [[set(node.isfinite().nonzero().squeeze(-1).tolist()) for node in row] for row in masked]
    digits = set(tokenizer.encode("0123"))
    assert found[0] == [{a, b}, {b, 258} | digits, digits | {258}]
    assert found[2][:2] == [{a, b}, set(tokenizer.encode("c"))]
    kept = masked.isfinite()
    assert torch.equal(masked[kept], logits[kept])


def test_a_vocabulary_smaller_than_the_tokenizers(tokenizer):
    compiler = GrammarCompiler(tokenizer, 258, (), "tiny")
    logits = torch.zeros(1, 1, 258)
    matcher = compiler.matcher(Grammar.regex("[0-9]+"))
    none = torch.zeros((1, 0), dtype=torch.int64)
    masked = mask_logits(logits, [matcher], none, none, torch.tensor([0]))
    assert masked.isfinite().sum() == 10


def test_grammars_are_compiled_once_and_requests_do_not_share_their_place(compiler, tokenizer):
    first, second = (compiler.matcher(Grammar.regex("[ab]c")) for _ in range(2))
    a = tokenizer.encode("a")
    consume(first, a)
    assert ids(second.allowed([], [])[0]) == set(tokenizer.encode("ab"))


def test_forced_tokens_come_before_the_drafters_own_in_one_round(tokenizer):
    """Of "the end" every token is forced; the target as its own drafter adds as many as it may."""
    target = load(tiny_llama(vocab_size=259, eos_token_id=258), tokenizer=tokenizer)
    forced = len(tokenizer.encode("the end"))
    a, b = tokenizer.encode("ab")
    params = SamplingParams(
        grammar=Grammar.regex("the end[ab]{8}"), logit_bias={a: 40, b: 40}, seed=1, max_new_tokens=forced + 7
    )
    for drafter, rounds in ((target, [forced + 4, 3]), (None, [1] * (forced + 7)), ("prompt-lookup", [forced + 1])):
        engine = Engine(target, drafter, num_speculative_tokens=3)
        events = list(engine.stream("x", params))
        assert [len(event.pieces) for event in events][: len(rounds)] == rounds
        assert events[-1].completion.text.startswith("the end")
        assert events[-1].completion.finish_reason == "length"


def test_seconds_of_rounds_with_forced_tokens_are_not_told_to_drafters(tokenizer):
    """They are those of a wider pass than the one that the drafter, or the policy, knows of."""

    class Watched(PromptLookup):
        def observe_seconds(self, seconds):
            told.append(seconds is not None)

    told: list[bool] = []
    target = load(tiny_llama(vocab_size=259, eos_token_id=258), tokenizer=tokenizer)
    params = SamplingParams(grammar=Grammar.regex("[ab]the end[ab]{2}"), temperature=0)
    rounds = [len(e.pieces) for e in Engine(target, Watched(), num_speculative_tokens=1).stream("x", params)]
    assert rounds[1] > len(tokenizer.encode("the end"))
    assert told[:3] == [True, False, True]


def test_no_tokens_are_forced_beyond_the_length_or_the_limit(compiler, tokenizer):
    matcher = compiler.matcher(Grammar.regex("the end[ab]"))
    tokens = tokenizer.encode("the end")
    assert matcher.forced(100) == tokens
    assert matcher.forced(2) == tokens[:2]
    assert matcher.forced(0) == []
    consume(matcher, tokens)
    assert matcher.forced(100) == []
    target = load(tiny_llama(vocab_size=259, eos_token_id=258), tokenizer=tokenizer)
    params = SamplingParams(grammar=Grammar.regex("the end[ab]"), max_new_tokens=3)
    completion = Engine(target, "prompt-lookup").generate("x", params)
    assert (completion.token_ids, completion.finish_reason) == (tokens[:3], "length")
    limits = Limits(forced_tokens=2)
    events = list(Engine(target, "prompt-lookup", num_speculative_tokens=1, limits=limits).stream("x", params))
    assert [len(event.pieces) for event in events] == [3]
