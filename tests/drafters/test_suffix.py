"""Suffix decoding: the automaton against counting by hand, what is proposed, and what requests share."""

from __future__ import annotations

import gc
from collections import defaultdict
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from batches import VOCAB_SIZE, batch_of, chain_of, paths_of, sequence_of
from foretoken.draft import Draft
from foretoken.drafters import Lookup, Suffix, get
from foretoken.drafters.automaton import ROOT, SuffixAutomaton
from foretoken.drafters.other_requests import SharedPosition
from foretoken.drafters.sharing import Participants
from foretoken.engine.engine import Engine
from foretoken.errors import ParameterError
from foretoken.models import load
from foretoken.sampling import SamplingParams
from tiny import tiny_llama, tiny_t5

GREEDY = SamplingParams(temperature=0.0, max_new_tokens=24, ignore_eos=True)

texts = st.lists(st.integers(0, 3), max_size=40)


class ByHand:
    """All substrings of some texts: how often each occurred, what followed it how often, and what followed it last."""

    def __init__(self) -> None:
        self.counts: dict = defaultdict(int)
        self.followers: dict = defaultdict(lambda: defaultdict(int))
        self.last: dict = defaultdict(dict)
        self.clock = 0

    def add(self, text: list[int]) -> None:
        """Count what ends with the last token."""
        self.clock += 1
        for start in range(len(text)):
            self.counts[tuple(text[start:])] += 1
            self.followers[tuple(text[start:-1])][text[-1]] += 1
            self.last[tuple(text[start:-1])][text[-1]] = self.clock

    def favourite(self, context: tuple[int, ...]) -> int:
        return max(
            self.followers[context],
            key=lambda token: (self.followers[context][token], self.last[context][token]),
        )

    def check(self, automaton: SuffixAutomaton, text: list[int], end: int) -> None:
        """Of all that the automaton knows, compare what concerns one text's suffixes, and some substrings."""
        for start in range(len(text)):
            state = ROOT
            for token in text[start:]:
                state = automaton.step(state, token)
            context = tuple(text[start:])
            assert automaton.count(state) == self.counts[context]
            assert dict((token, automaton.count(target)) for token, target in automaton.continuations(state)) == dict(
                self.followers[context]
            )
            if self.followers[context]:
                assert automaton.chain(state, 1) == [self.favourite(context)]
        longest = max((n for n in range(1, len(text) + 1) if self.followers[tuple(text[-n:])]), default=0)
        assert automaton.context(end)[1] == longest


@settings(max_examples=60, deadline=None, derandomize=True)
@given(texts)
def test_the_automaton_counts_as_one_would_by_hand(text):
    automaton, by_hand, end = SuffixAutomaton(), ByHand(), ROOT
    for n, token in enumerate(text, start=1):
        end = automaton.append(end, token)
        by_hand.add(text[:n])
        by_hand.check(automaton, text[:n], end)
    assert automaton.size == len(text)
    assert len(automaton) <= max(2, 2 * len(text))


@settings(max_examples=60, deadline=None, derandomize=True)
@given(st.lists(st.lists(st.integers(0, 2), max_size=14), max_size=4), st.randoms(use_true_random=False))
def test_an_automaton_of_several_texts_that_grow_in_turns(given, random):
    automaton, by_hand = SuffixAutomaton(), ByHand()
    ends, lengths = [ROOT] * len(given), [0] * len(given)
    turns = [number for number, text in enumerate(given) for _ in text]
    random.shuffle(turns)
    for number in turns:
        lengths[number] += 1
        text = given[number][: lengths[number]]
        ends[number] = automaton.append(ends[number], text[-1])
        by_hand.add(text)
        for text, end, length in zip(given, ends, lengths, strict=True):
            by_hand.check(automaton, text[:length], end)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(texts, texts)
def test_another_text_is_followed_by_its_longest_known_suffix(text, other):
    automaton, end = SuffixAutomaton(), ROOT
    for token in text:
        end = automaton.append(end, token)
    known = {tuple(text[i:j]) for i in range(len(text)) for j in range(i, len(text) + 1)} | {()}
    state = match = 0
    for n, token in enumerate(other, start=1):
        state, match = automaton.follow(state, match, token)
        assert match == max(size for size in range(n + 1) if tuple(other[n - size : n]) in known)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(texts, st.integers(0, 12))
def test_a_tree_holds_what_followed_before(text, limit):
    automaton, end = SuffixAutomaton(), ROOT
    for token in text:
        end = automaton.append(end, token)
    state, match = automaton.context(end)
    tokens, parents = automaton.tree(state, match, limit)
    assert len(tokens) == len(parents) <= limit
    assert all(parent <= node for node, parent in enumerate(parents))
    assert len(set(zip(parents, tokens, strict=True))) == len(tokens)
    pairs = set(pairwise(text))
    root = text[-1] if text else -1
    assert all(((root, *tokens)[parent], token) in pairs for token, parent in zip(tokens, parents, strict=True))
    if match and limit:
        assert tokens[0] == automaton.chain(state, 1)[0]


def test_periodic_texts_take_no_more_time_than_others():
    automaton, end = SuffixAutomaton(), ROOT
    for _ in range(20_000):  # counting every suffix would take minutes
        end = automaton.append(end, 5)
    state, match = automaton.context(end)
    assert match == 19_999
    assert automaton.chain(state, 4) == automaton.tree(state, match, 4)[0] == [5, 5, 5, 5]


def test_the_longest_suffix_that_occurred_before_goes_on():
    # The last two tokens were followed by 9 twice and later, the last three by 4 once.
    drafter, sequence = Suffix(), sequence_of([1, 2, 3, 4, 8, 2, 3, 9, 7, 2, 3, 9, 6, 1, 2, 3])
    assert chain_of(drafter, sequence, 3) == [4, 8, 2]
    assert drafter.matches[sequence] == 3


def test_of_several_continuations_the_most_frequent_one_and_of_those_the_latest():
    assert chain_of(Suffix(), sequence_of([1, 4, 1, 5, 1, 4, 1, 6, 1]), 1) == [4]
    assert chain_of(Suffix(), sequence_of([1, 4, 1, 5, 1]), 1) == [5]


def test_a_longer_match_drafts_more():
    text = list(range(20))
    for match, limit, growth, wanted in ((1, 16, 4.0, 4), (2, 16, 4.0, 8), (9, 10, 4.0, 10), (3, 16, 1.0, 3)):
        drafted = chain_of(Suffix(growth=growth), sequence_of([*text, 30, *text[:match]]), limit)
        assert drafted == list(range(match, match + wanted))
    assert chain_of(Suffix(growth=0.1), sequence_of([1, 2, 1])) == [2]


def test_a_period_goes_on_beyond_the_texts_end():
    assert chain_of(Suffix(), sequence_of([1, 2, 3] * 3), 7) == [1, 2, 3, 1, 2, 3, 1]


def test_nothing_is_drafted_where_nothing_is_known_or_wanted():
    drafter = Suffix()
    new, old = sequence_of([1, 2, 3]), sequence_of([1, 2, 1])
    draft = drafter.propose(batch_of(new, old, old, trees=True), [4, 0, 4])
    assert draft.counts.tolist() == [0, 0, 4]
    assert drafter.matches[new] == 0


def test_a_tree_holds_the_alternatives_by_their_counts():
    sequence = sequence_of([1, 2, 3, 7, 1, 2, 3, 8, 1, 2, 4, 9, 1, 2])
    paths = paths_of(Suffix(), sequence, 8)
    assert paths[0] == [3]
    assert [3, 8] in paths
    assert [3, 7] in paths
    assert [4, 9] in paths
    assert len(paths) == 8


def test_of_many_continuations_the_likeliest_is_drafted_for_what_it_is_worth():
    # Twenty tokens followed 1, the 2 twice.
    text = [token for follower in (2, *range(2, 22)) for token in (1, follower)]
    paths = paths_of(Suffix(), sequence_of([*text, 1]), 4)
    assert paths[0] == [2]
    assert all(path[0] == 2 for path in paths)
    # After (30, 1) came 5. What is left of this context goes to the shorter one, where 2 is one of many.
    paths = paths_of(Suffix(growth=20), sequence_of([*text, 30, 1, 5, 30, 1]), 40)
    assert [path[0] for path in paths if len(path) == 1] == [5]


def test_shorter_contexts_have_a_say_below_the_root():
    # 5 followed (1, 2) once; 6 followed (9, 2), and so 2, three times.
    paths = paths_of(Suffix(growth=20), sequence_of([1, 2, 5, *[9, 2, 6] * 3, 1, 2]), 24)
    assert paths[0] == [5]
    assert [6] in paths


def test_a_drafter_follows_the_text_between_calls():
    drafter, sequence = Suffix(), sequence_of([1, 2, 3])
    assert chain_of(drafter, sequence) == []
    sequence.tokens += [9, 1]
    assert chain_of(drafter, sequence, 2) == [2, 3]
    sequence.tokens += [2, 7, 1]
    assert chain_of(drafter, sequence, 2) == [2, 7]


def test_the_source_of_an_encoder_decoder_model_is_text_too_as_far_as_the_vocabulary_goes():
    sequence = sequence_of([0, 5], source=[4, 5, 6, 40, 7])
    assert chain_of(Suffix(), sequence, 4) == [6]
    sequence.tokens += [6]
    assert chain_of(Suffix(), sequence, 4, vocab_size=64) == [40, 7, 0, 5]
    wanted = Engine(tiny_t5(seed=1), None).generate([4, 5, 6, 7, 4, 5], GREEDY).token_ids
    for verifier in ("token", "traversal"):
        assert Engine(tiny_t5(seed=1), "suffix", verifier, 4).generate([4, 5, 6, 7, 4, 5], GREEDY).token_ids == wanted


def test_other_requests_texts_are_looked_at_where_that_is_wanted():
    first, second = [1, 2, 3, 4, 5, 6], [9, 2, 3]
    for drafter, wanted in ((Suffix(), []), (Suffix(100), [4, 5, 6]), (get("suffix:100"), [4, 5, 6])):
        chain_of(drafter, sequence_of(first))
        assert chain_of(drafter, sequence_of(second)) == wanted


def test_the_longer_match_is_taken():
    drafter = Suffix(100)
    chain_of(drafter, sequence_of([1, 2, 3, 4, 5]))
    assert chain_of(drafter, sequence_of([2, 3, 7, 8, 1, 2, 3]), 1) == [4]
    assert chain_of(drafter, sequence_of([6, 1, 2, 3, 7, 6, 1, 2, 3]), 1) == [7]


def test_what_is_shared_is_bounded_and_the_oldest_goes_first():
    drafter = Suffix(64)
    for number in range(100):
        start = 1_000 * number
        chain_of(drafter, sequence_of(range(start, start + 16)), vocab_size=200_000)
        shared = drafter._others
        assert shared._young.size + shared._old.size <= 64
    # Two texts fill a half, and the first look makes the oldest one go.
    for number, wanted in ((99, 1), (98, 1), (97, 0), (96, 0), (0, 0)):
        drafted = chain_of(drafter, sequence_of([1_000 * number + 3]), vocab_size=200_000)
        assert len(drafted[:1]) == wanted


def test_texts_that_run_while_the_oldest_are_forgotten():
    drafter, running = Suffix(40), [sequence_of([number + 1]) for number in range(3)]
    pattern = [4, 5, 6, 7, 8, 9]
    for turn in range(60):
        draft = drafter.propose(batch_of(*running), [3, 3, 3])
        assert (draft.tokens < VOCAB_SIZE).all()
        for sequence in running:
            sequence.tokens.append(pattern[turn % 6])
    assert draft.counts.tolist() == [3, 3, 3]
    newcomer = sequence_of([30, 5, 6])
    assert chain_of(drafter, newcomer, 2) == [7, 8]


@pytest.mark.parametrize("make", [Suffix, Lookup])
def test_an_interruption_leaves_no_broken_texts_of_other_requests(make, monkeypatch):
    def interrupted(automaton, length):
        automaton._links.append(ROOT)  # the first of several lists that grow
        raise KeyboardInterrupt

    drafter, text = make(100), [1, 2, 3, 1, 2, 4, 1, 2, 3, 5]
    chain_of(drafter, sequence_of(text))
    with monkeypatch.context() as patch:
        patch.setattr(SuffixAutomaton, "_add", interrupted)
        with pytest.raises(KeyboardInterrupt):
            drafter._others.append(SharedPosition(), 7)
    for _ in range(3):
        chain_of(drafter, sequence_of([*text, 6, 7, 8, 9]))
    assert chain_of(drafter, sequence_of([10, 6, 7]), 2) == [8, 9]


def test_what_a_request_said_is_not_told_to_another_with_the_same_coins():
    drafter = Suffix(100)
    chain_of(drafter, sequence_of([1, 2, 3, 4, 5, 6], temperature=1.0, seed=7))
    for params, wanted in (
        ({"temperature": 1.0, "seed": 7}, []),
        ({"temperature": 1.0, "seed": 8}, [4, 5, 6]),
        ({"temperature": 0.0, "seed": 7}, [4, 5, 6]),
    ):
        assert chain_of(drafter, sequence_of([9, 2, 3], **params)) == wanted


@pytest.mark.parametrize("verifier", ["token", "traversal", "coupled"])
def test_rows_get_in_a_batch_what_they_get_alone(verifier):
    prompts = [[1, 2, 3, 4, 1, 2], [5, 5, 5], [1, 9, 4, 7, 2]]
    params = [SamplingParams(seed=seed, temperature=0.5, max_new_tokens=20, ignore_eos=True) for seed in range(3)]
    engine = Engine(tiny_llama(seed=1), "suffix", verifier, 4)
    together = engine.generate(prompts, params)
    alone = [engine.generate(prompt, one) for prompt, one in zip(prompts, params, strict=True)]
    assert [one.token_ids for one in together] == [one.token_ids for one in alone]


def test_memory_goes_with_the_requests():
    drafter = Suffix()
    engine = Engine(tiny_llama(seed=1), drafter, "token", 4, reuse_prefixes=False)
    engine.generate([[1, 2, 3]] * 3, GREEDY)
    gc.collect()
    assert len(drafter._histories) == len(drafter.matches) == 0


def test_in_a_cascade_it_drafts_chains():
    params = SamplingParams(temperature=0.0, max_new_tokens=100, ignore_eos=True)  # time to find out what things cost
    wanted = Engine(tiny_llama(seed=1), None).generate([1, 2, 3, 1, 2], params).token_ids
    engine = Engine(tiny_llama(seed=1), "suffix,recycling,lookahead", num_speculative_tokens=4)
    completion = engine.generate([1, 2, 3, 1, 2], params)
    assert completion.token_ids == wanted
    assert completion.stats.accepted > 0


@pytest.mark.parametrize("drafter", ["suffix", "recycling", "lookahead"])
def test_targets_that_score_chains_alone_get_chains(drafter):
    target = load(tiny_llama(seed=1))
    target.supports_trees = False
    wanted = Engine(tiny_llama(seed=1), None).generate([1, 2, 3, 1, 2], GREEDY).token_ids
    assert Engine(target, drafter, "traversal", 8).generate([1, 2, 3, 1, 2], GREEDY).token_ids == wanted


def test_drafters_of_trees_do_not_go_with_targets_that_score_chains_alone():
    class Stubborn(Suffix):
        def propose(self, batch, limits):
            return Draft.from_lists([[1, 2]], parents=[[0, 0]])

    target = load(tiny_llama(seed=1))
    target.supports_trees = False
    with pytest.raises(ParameterError, match="scores chains alone, and 'suffix' drafts trees"):
        Engine(target, Stubborn(), "traversal", 8).generate([1, 2, 3], GREEDY)


def test_drafts_from_lists_are_chains_where_no_row_branches():
    chains = Draft.from_lists([[4, 5], []], parents=[[0, 1], []])
    assert chains.is_chain
    trees = Draft.from_lists([[4, 5, 6], [7]], parents=[[0, 0, 1], [0]])
    assert not trees.is_chain
    assert trees.counts.tolist() == [3, 1]
    assert trees.parents.tolist() == [[0, 0, 1], [0, 1, 2]]


def test_bad_options():
    with pytest.raises(ParameterError, match=r"global_tokens is -1.*use 0 to keep requests apart"):
        Suffix(-1)
    with pytest.raises(ParameterError, match=r"growth is 0.*use 6"):
        Suffix(growth=0)
    with pytest.raises(ParameterError, match="global_tokens is 'many'"):
        Engine(tiny_llama(), "suffix:many")
    with pytest.raises(ParameterError, match="write suffix:GLOBAL_TOKENS"):
        Engine(tiny_llama(), "suffix:")


def test_requests_that_name_no_seed_leave_nothing_behind():
    """Theirs are new ones each time, one for every request that a server ever had."""
    apart = Participants()
    for seed in range(100):
        sequence = sequence_of([1, 2, 3], temperature=1.0)
        sequence.seed = seed
        assert apart.takes_part(batch_of(sequence), 0)
    assert apart._first == {}
    named = [sequence_of([1, 2, 3], temperature=1.0, seed=7) for _ in range(2)]
    assert [apart.takes_part(batch_of(*named), row) for row in range(2)] == [True, False]
    assert len(apart._first) == 1
