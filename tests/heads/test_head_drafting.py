"""Heads as drafters: which state predicts which token, rows that come and go, long texts, what can't be drafted."""

from __future__ import annotations

from functools import cache

import numpy as np
import pytest
import torch

from foretoken import load
from foretoken.drafters import Cascade, Eagle3, Medusa, PromptLookup, get
from foretoken.drafters.draft_model import DraftModel
from foretoken.drafters.early_exit import EarlyExit
from foretoken.engine.engine import Engine
from foretoken.engine.settings import measurement_key
from foretoken.errors import ModelError, ParameterError
from foretoken.heads import running, save_eagle3, save_medusa
from foretoken.models.native import loader
from foretoken.models.native.loader import openvino_refusal
from foretoken.sampling import SamplingParams
from tiny import DEVICE, tiny_gpt2, tiny_llama, tiny_t5
from tiny_heads import hidden_states, slow_eagle3, tiny_eagle3, tiny_medusa

GREEDY = SamplingParams(temperature=0.0, max_new_tokens=40, ignore_eos=True)
SAMPLED = SamplingParams(temperature=1.0, max_new_tokens=12, ignore_eos=True, seed=5)
BACKENDS = ["torch", "openvino"] if openvino_refusal(torch.float32, torch.device("cpu")) is None else ["torch"]
PROMPTS = [[1, 2, 3], [4, 5], list(range(20)), [7]]


@cache
def openvino_target():
    return load(tiny_llama(seed=1), runner="native", backend="openvino")


@cache
def openvino_drafter(kind: str, draft_vocab_size: int | None = None):
    """One for all engines: it takes long to compile, and its state is by sequence."""
    if kind == "eagle3":
        head = tiny_eagle3(tiny_llama(seed=1), draft_vocab_size=draft_vocab_size)
        return Eagle3(head, openvino_target(), backend="openvino")
    if kind == "draft-model":
        return DraftModel(load(tiny_llama(seed=2), runner="native", backend="openvino"))
    return EarlyExit(openvino_target(), 1)


def watched(drafter):
    """The drafter, and a list of what it is asked and proposes from now on: texts, and the drafts."""
    seen = []

    def watching(batch, limits):
        draft = type(drafter).propose(drafter, batch, limits)
        seen.append(([list(sequence.tokens) for sequence in batch.sequences], draft))
        return draft

    drafter.propose = watching
    return drafter, seen


def softmax(logits: np.ndarray) -> np.ndarray:
    shifted = np.exp(logits - logits.max(-1, keepdims=True))
    return shifted / shifted.sum(-1, keepdims=True)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("draft_vocab_size", [None, 20])
def test_the_distributions_of_an_eagle3_chain_are_those_of_the_slow_reference(backend, draft_vocab_size):
    model = tiny_llama(seed=1)
    head = tiny_eagle3(model, draft_vocab_size=draft_vocab_size)
    tokens = head.draft_tokens().numpy()
    target = load(model)
    drafter, seen = watched(Eagle3(head, target, backend=backend))
    Engine(target, drafter, "token", 3).generate([1, 2, 3, 4], SAMPLED)
    compared = 0
    for (sequence,), draft in seen:
        count = int(draft.counts[0])
        if count == 0:
            continue
        drafted = draft.tokens[0, :count].tolist()
        slow = softmax(slow_eagle3(head, model, sequence, drafted[:-1]))
        found = draft.probs[0, :count].double().numpy()
        assert np.abs(found[:, tokens] - slow).max() < 1e-5
        assert np.delete(found, tokens, axis=1).sum() == 0.0
        compared += count
    assert compared > 12


@pytest.mark.grid
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_tree_of_eagle3_has_the_distributions_of_the_slow_reference_at_every_node(backend):
    model = tiny_llama(seed=1)
    head, target = tiny_eagle3(model), load(model)
    drafter, seen = watched(Eagle3(head, target, "static", backend))
    Engine(target, drafter, "traversal", 12).generate([1, 2, 3, 4], SAMPLED)
    branching = 0
    for (sequence,), draft in seen[:4]:
        count, parents = int(draft.counts[0]), draft.parents[0].tolist()
        for node in sorted(set(parents[:count])):
            path, at = [], node
            while at:
                path.insert(0, int(draft.tokens[0, at - 1]))
                at = parents[at - 1]
            slow = softmax(slow_eagle3(head, model, sequence, path))[-1]
            assert np.abs(draft.probs[0, node].double().numpy() - slow).max() < 1e-5
            branching += parents[:count].count(node) > 1
    assert branching


@pytest.mark.grid
@pytest.mark.skipif("openvino" not in BACKENDS, reason="needs OpenVINO")
@pytest.mark.parametrize("quantize", ["int8", "w8a8"])
def test_a_rounded_head_is_close_to_the_head(quantize):
    model = tiny_llama(seed=1)
    head, target = tiny_eagle3(model), load(model)
    drafter, seen = watched(Eagle3(head, target, quantize=quantize))
    Engine(target, drafter, "token", 3).generate([1, 2, 3, 4], SAMPLED)
    drafts = [(sequence, draft) for (sequence,), draft in seen if draft.counts[0]]
    assert len(drafts) >= 3
    far = []
    for sequence, draft in drafts:
        count = int(draft.counts[0])
        slow = softmax(slow_eagle3(head, model, sequence, draft.tokens[0, : count - 1].tolist()))
        far.append(np.abs(draft.probs[0, :count].double().numpy() - slow).max())
    assert 1e-5 < max(far) < 0.03


@pytest.mark.skipif("openvino" not in BACKENDS, reason="needs OpenVINO")
def test_large_heads_are_rounded_unless_told_otherwise(tmp_path, monkeypatch):
    model = tiny_llama(seed=1)
    target = load(model)
    save_eagle3(tiny_eagle3(model), tmp_path)
    monkeypatch.setattr(loader, "multiplies_int8", lambda: True)

    def found(**options):
        return Engine(target, str(tmp_path), **options).drafter.quantize

    assert found() is None
    assert found(quantize="int8") == "int8"
    monkeypatch.setattr(loader, "_LEAST_ROUNDED", 0)
    assert found() == "w8a8"
    assert found(quantize=None) is None
    monkeypatch.setattr(loader, "multiplies_int8", lambda: False)
    assert found() is None


@pytest.mark.skipif("openvino" not in BACKENDS, reason="needs OpenVINO")
def test_a_rounded_head_has_costs_of_its_own():
    model = tiny_llama(seed=1)
    head, target = tiny_eagle3(model), load(model)
    drafters = [Eagle3(head, target, quantize=quantize) for quantize in (None, "w8a8", "w8a8")]
    first, second, third = (measurement_key(target, drafter) for drafter in drafters)
    assert first != second == third


def test_torch_runs_heads_as_they_are(monkeypatch):
    model = tiny_llama(seed=1)
    head, target = tiny_eagle3(model), load(model)
    with pytest.raises(ModelError, match=r"rounded to w8a8, which OpenVINO alone .*quantize=None"):
        Eagle3(head, target, backend="torch", quantize="w8a8")
    with pytest.raises(ModelError, match=r"'int3'.*use one of 'int8', 'w8a8'"):
        Eagle3(head, target, quantize="int3")
    with pytest.raises(ModelError, match=r"head's quantize is 'int4'.*use one of 'int8', 'w8a8'"):
        Eagle3(head, target, quantize="int4")
    assert Eagle3(head, target, backend="torch").quantize is None
    monkeypatch.setattr(running, "openvino_refusal", lambda *about: "it is not here")
    with pytest.warns(UserWarning, match=r"rounded to int8, .*it is not here.*runs as it is"):
        assert Eagle3(head, target, quantize="int8").quantize is None


def test_the_distributions_of_medusa_are_those_of_the_state_before_the_root():
    model = tiny_llama(seed=1)
    heads, target = tiny_medusa(model, num_heads=3, num_layers=2), load(model)
    drafter, seen = watched(Medusa(heads, target))
    Engine(target, drafter, "token", 5).generate([1, 2, 3, 4], SAMPLED)
    heads.cpu()
    assert max(draft.width for _, draft in seen) == 3
    for (sequence,), draft in seen:
        state = hidden_states(model, sequence)[-1][len(sequence) - 2]
        for number in range(int(draft.counts[0])):
            x = state
            for layer in list(heads[number])[:-1]:
                y = x @ layer.linear.weight.T + layer.linear.bias
                x = x + y * y.sigmoid()
            slow = (x @ heads[number][-1].weight.T).softmax(-1)
            assert torch.allclose(draft.probs[0, number], slow, atol=1e-6)


def test_a_tree_of_medusa_is_a_product_of_the_heads_best_tokens():
    model = tiny_llama(seed=1)
    heads, target = tiny_medusa(model), load(model)
    drafter, seen = watched(Medusa(heads, target, "dynamic"))
    Engine(target, drafter, "traversal", 12).generate([1, 2, 3, 4], GREEDY)
    heads.cpu()
    (sequence,), draft = seen[0]
    state = hidden_states(model, sequence)[-1][len(sequence) - 2]
    depths = draft.depths()[0, 1 : int(draft.counts[0]) + 1].tolist()
    for depth in set(depths):
        best = heads[depth - 1](state).topk(8).indices.tolist()
        assert {int(draft.tokens[0, i]) for i, one in enumerate(depths) if one == depth} <= set(best)
    assert len(set(depths)) > 1
    assert len(depths) == 12


def make(kind: str, head, target, tree="none", backend="torch"):
    return Eagle3(head, target, tree, backend) if kind == "eagle3" else Medusa(head, target, tree)


@pytest.mark.parametrize(
    ("kind", "backend", "tree", "runner"),
    [
        ("eagle3", BACKENDS[-1], "none", "native"),
        ("eagle3", BACKENDS[-1], "dynamic", "hf"),
        ("eagle3", "torch", "none", "hf"),
        ("eagle3", "torch", "static", "native"),
        ("medusa", "torch", "none", "hf"),
        ("medusa", "torch", "dynamic", "native"),
    ],
)
def test_greedy_texts_are_the_targets_in_batches_that_rows_join_and_leave(kind, backend, tree, runner):
    model = tiny_llama(seed=1)
    target = load(model, runner=runner)
    head = tiny_eagle3(model, draft_vocab_size=20) if kind == "eagle3" else tiny_medusa(model)
    params = [SamplingParams(temperature=0.0, max_new_tokens=20 + 9 * i, ignore_eos=True) for i in range(len(PROMPTS))]
    plain = Engine(target, None).generate(PROMPTS, params)
    engine = Engine(target, make(kind, head, target, tree, backend), num_speculative_tokens=4, max_batch_size=2)
    drafted = engine.generate(PROMPTS, params)
    assert [one.token_ids for one in drafted] == [one.token_ids for one in plain]
    assert all(one.stats.drafted > 20 for one in drafted)


@pytest.mark.grid
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_rows_get_in_a_batch_what_they_get_alone(backend, temperature):
    model = tiny_llama(seed=1)
    target = load(model)
    drafter = Eagle3(tiny_eagle3(model), target, backend=backend)
    params = [
        SamplingParams(temperature=temperature, seed=seed, max_new_tokens=16, ignore_eos=True) for seed in range(4)
    ]

    def engine():
        return Engine(target, drafter, "block", 3)

    together = engine().generate(PROMPTS, params)
    alone = [engine().generate(prompt, one) for prompt, one in zip(PROMPTS, params, strict=True)]
    assert [one.token_ids for one in together] == [one.token_ids for one in alone]
    assert [one.stats.accepted for one in together] == [one.stats.accepted for one in alone]


@pytest.mark.parametrize("backend", BACKENDS)
def test_long_prompts_are_read_in_chunks(backend):
    model = tiny_llama(seed=1, max_position_embeddings=2048)
    head, target = tiny_eagle3(model), load(model)
    prompt = torch.randint(0, 32, (1100,), generator=torch.Generator().manual_seed(0)).tolist()
    drafter, seen = watched(Eagle3(head, target, backend=backend))
    Engine(target, drafter, "token", 3).generate([prompt, [1, 2]], SAMPLED)
    texts, draft = next(
        (texts, draft) for texts, draft in seen if len(texts) == 2 and len(texts[0]) > 1100 and draft.counts[0]
    )
    sequence = torch.tensor([texts[0]], device=DEVICE)
    with (
        torch.inference_mode()
    ):  # the whole sequence in one pass: its slots are those of a sequence that is read at once
        states = model(sequence, output_hidden_states=True).hidden_states
        features = torch.cat([states[layer][:, :-1] for layer in head.config.target_layers], dim=-1)
        embedded = model.get_input_embeddings()(sequence[:, 1:])
        outputs = head(embedded, head.fuse(features), torch.arange(sequence.shape[1] - 1, device=DEVICE)[None])
        probs = head.logits(outputs[0, -1]).softmax(-1).cpu()
    assert (draft.probs[0, 0] - probs).abs().max() < 1e-4


@pytest.mark.parametrize("backend", BACKENDS)
def test_text_that_was_written_without_drafts_is_caught_up_with(backend):
    model = tiny_llama(seed=1)
    head, target = tiny_eagle3(model), load(model)
    drafter, seen = watched(Eagle3(head, target, backend=backend))
    propose = drafter.propose

    def seldom(batch, limits):
        length = len(batch.sequences[0].tokens)
        return propose(batch, limits if length % 5 == 0 else [0] * len(limits))

    drafter.propose = seldom
    Engine(target, drafter, "token", 3).generate([1, 2, 3, 4], SAMPLED)
    drafts = [(sequence, draft) for (sequence,), draft in seen if draft.counts[0]]
    assert len(drafts) >= 2
    for sequence, draft in drafts:
        slow = softmax(slow_eagle3(head, model, sequence, draft.tokens[0, :-1].tolist()))
        assert np.abs(draft.probs[0].double().numpy() - slow).max() < 1e-5


def test_every_kind_of_target_shows_what_heads_need():
    for model in (tiny_gpt2(seed=1), tiny_t5(seed=1)):
        target = load(model)
        head = tiny_eagle3(model)
        plain = Engine(target, None).generate([PROMPTS[0], PROMPTS[2]], GREEDY)
        drafted = Engine(target, Eagle3(head, target), num_speculative_tokens=3).generate(
            [PROMPTS[0], PROMPTS[2]], GREEDY
        )
        assert [one.token_ids for one in drafted] == [one.token_ids for one in plain]
        assert drafted[0].stats.drafted > 20


def test_heads_take_part_in_a_cascade():
    model = tiny_llama(seed=1)
    target = load(model)
    heads = [Eagle3(tiny_eagle3(model), target), Medusa(tiny_medusa(model), target)]
    cascade = Cascade([PromptLookup(), *heads], costs=[0.0, 0.0, 0.0])  # so that the clock has no say
    assert cascade.hidden_layers == (0, 1, 2)
    params = SamplingParams(temperature=0.0, max_new_tokens=100, ignore_eos=True)
    plain = Engine(target, None).generate(PROMPTS, params)
    drafted = Engine(target, cascade, num_speculative_tokens=3).generate(PROMPTS, params)
    assert [one.token_ids for one in drafted] == [one.token_ids for one in plain]
    assert drafted[0].stats.drafted > 20
    assert Cascade([PromptLookup(), PromptLookup()]).hidden_layers == ()


def test_a_folder_of_a_head_is_a_drafter(tmp_path, monkeypatch):
    monkeypatch.setattr(running, "openvino_refusal", lambda *about: "compiling takes long")
    model = tiny_llama(seed=1)
    save_eagle3(tiny_eagle3(model), tmp_path / "eagle")
    save_medusa(tiny_medusa(model), tmp_path / "medusa")
    model.save_pretrained(tmp_path / "model")
    for form in (str(tmp_path / "eagle"), tmp_path / "eagle", f"eagle3:{tmp_path / 'eagle'}"):
        assert isinstance(Engine(model, form).drafter, Eagle3)
    for form in (str(tmp_path / "medusa"), f"medusa:{tmp_path / 'medusa'}"):
        assert isinstance(Engine(model, form).drafter, Medusa)
    assert isinstance(Engine(model, str(tmp_path / "model")).drafter, DraftModel)
    for form in (str(tmp_path / "medusa"), f"eagle3:{tmp_path / 'eagle'}"):
        engine = Engine(model, form, tree="static")
        assert engine.drafter.trees
        assert engine.verifier.name == "traversal"
    cascade = Engine(model, f"prompt-lookup,{tmp_path / 'eagle'}").drafter
    assert isinstance(cascade, Cascade)
    assert isinstance(cascade.drafters[1], Eagle3)
    with pytest.raises(ParameterError, match="'eagle3' needs to be told more: write eagle3:HEAD"):
        Engine(model, "eagle3")
    with pytest.raises(ModelError, match="there is no folder '/nowhere'"):
        Engine(model, "eagle3:/nowhere")
    with pytest.raises(ParameterError, match="is made of the target"):
        get(f"medusa:{tmp_path / 'medusa'}")


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"hidden_size": 64}, "hidden states of 32 numbers, and those of .* have 64"),
        ({"vocab_size": 40}, "vocabulary of 32 tokens, and that of .* has 40"),
        ({"num_hidden_layers": 3}, "target of 2 layers, and .* has 3"),
    ],
)
def test_heads_of_other_targets_are_refused(fields, message, tmp_path):
    model = tiny_llama(seed=1)
    save_eagle3(tiny_eagle3(model), tmp_path / "eagle")
    heads = tiny_medusa(model)
    save_medusa(heads, tmp_path / "medusa")
    other = tiny_llama(**fields)
    with pytest.raises(ModelError, match=message):
        Engine(other, str(tmp_path / "eagle"))
    if "num_hidden_layers" not in fields:
        with pytest.raises(ModelError, match=message):
            Engine(other, str(tmp_path / "medusa"))


def test_a_head_that_wants_layers_which_the_target_lacks_is_refused():
    model = tiny_llama(seed=1)
    head = tiny_eagle3(model, target_layers=(0, 1, 7), target_num_layers=None)
    with pytest.raises(ModelError, match=r"wants the output of layer 7 .* 0 to 1"):
        Engine(model, Eagle3(head, load(model)))


def test_broken_scores_cut_drafts_short_and_leave_the_text_alone():
    model = tiny_llama(seed=1)
    target = load(model)
    plain = Engine(target, None).generate(PROMPTS[0], GREEDY)
    for drafter in (
        *(Eagle3(_broken(tiny_eagle3(model)), target, tree, one) for one in BACKENDS for tree in ("none", "static")),
        Medusa(_broken(tiny_medusa(model)), target),
    ):
        with pytest.warns(RuntimeWarning, match="NaN or infinity"):
            found = Engine(target, drafter, num_speculative_tokens=3).generate(PROMPTS[0], GREEDY)
        assert found.token_ids == plain.token_ids
        assert found.stats.drafted == 0


def _broken(head):
    for value in head.parameters():
        value.fill_(torch.nan)
    return head


@pytest.mark.grid
@pytest.mark.parametrize(
    ("kind", "draft_vocab_size"), [("eagle3", None), ("eagle3", 20), ("draft-model", None), ("early-exit", None)]
)
@pytest.mark.skipif("openvino" not in BACKENDS, reason="needs OpenVINO")
def test_how_a_row_is_drafted_for_does_not_depend_on_the_others(kind, draft_vocab_size):
    """One call and single steps draw different tokens with the same numbers; which it is, is the row's own affair."""

    def engine():
        drafter, seen = watched(openvino_drafter(kind, draft_vocab_size))
        return Engine(openvino_target(), drafter, "token", 4), seen

    def of(prompt, seen):
        """Its drafts: tokens, distributions, and whether these are in whole units, as those of one call are."""
        found = []
        for texts, draft in seen:
            for row, sequence in enumerate(texts):
                if sequence[: len(prompt)] == prompt and int(draft.counts[row]):
                    count = int(draft.counts[row])
                    probs = draft.probs[row, :count]
                    whole = bool((probs.double() * 2**24 % 1 == 0).all())
                    found.append((sequence, draft.tokens[row, :count].tolist(), probs, whole))
        return found

    plain = SamplingParams(seed=7, max_new_tokens=14, ignore_eos=True)
    others = [
        SamplingParams(temperature=0.0, max_new_tokens=10, ignore_eos=True),
        SamplingParams(seed=2, top_p=0.7, max_new_tokens=20, ignore_eos=True),
        SamplingParams(seed=3, repetition_penalty=1.3, max_new_tokens=8, ignore_eos=True),
    ]
    prompts = [[5, 3, 1], [9, 9, 4, 2], [8, 7], [11, 2, 6, 1, 4]]
    alone, seen_alone = engine()
    first = alone.generate(prompts[0], plain)
    together, seen_together = engine()
    texts = [one.token_ids for one in together.generate(prompts, [plain, *others])]
    assert texts[0] == first.token_ids
    for prompt, params, sequence in zip(prompts[1:], others, texts[1:], strict=True):
        assert engine()[0].generate(prompt, params).token_ids == sequence
    ours, theirs = of(prompts[0], seen_alone), of(prompts[0], seen_together)
    assert len(ours) > 3
    assert [one[:2] for one in ours] == [one[:2] for one in theirs]
    assert all(one[3] and other[3] for one, other in zip(ours, theirs, strict=True))
    assert all(torch.allclose(one[2], other[2], atol=1e-5) for one, other in zip(ours, theirs, strict=True))
    assert not all(one[3] for one in of(prompts[2], seen_together))


@pytest.mark.grid
@pytest.mark.skipif("openvino" not in BACKENDS, reason="needs OpenVINO")
@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("kind", ["eagle3", "draft-model", "early-exit"])
def test_drafts_of_one_token_in_batches_that_become_smaller(kind, temperature):
    def engine():
        return Engine(openvino_target(), openvino_drafter(kind), "token", 1, max_batch_size=3)

    params = [
        SamplingParams(temperature=temperature, seed=seed, max_new_tokens=count, ignore_eos=True)
        for seed, count in enumerate((3, 12, 7, 9))
    ]
    together = engine().generate(PROMPTS, params)
    alone = [engine().generate(prompt, one) for prompt, one in zip(PROMPTS, params, strict=True)]
    assert [one.token_ids for one in together] == [one.token_ids for one in alone]
