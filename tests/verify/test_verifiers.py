"""Verifiers on batches: against their plain definitions, in float32, on extreme input; and the lossy ones' output."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from foretoken.draft import Draft
from foretoken.errors import ParameterError
from foretoken.sampling import draw
from foretoken.verify import LenientVerifier, TypicalVerifier, decide, get, is_coupled, names
from foretoken.verify.exact import all_drafts, round_distribution
from foretoken.verify.fast import shortcut
from foretoken.verify.token import TokenVerifier
from verify.plain import DEFINITIONS

MODES = ("chosen", "with replacement", "without replacement")


def random_distributions(*shape, generator, zeros=0.3):
    weights = torch.rand(shape, generator=generator, dtype=torch.float64)
    weights *= torch.rand(shape, generator=generator) > zeros
    keep = torch.randint(shape[-1], (*shape[:-1], 1), generator=generator)
    weights = weights.scatter(-1, keep, 0.5)
    return weights / weights.sum(-1, keepdim=True)


def random_batch(mode, *, branching, rows=24, width=7, vocab_size=9, seed=0):
    """Rows of all shapes and lengths, an empty one among them; siblings as drawn in that mode."""
    generator = torch.Generator().manual_seed(seed)
    p = random_distributions(rows, width + 1, vocab_size, generator=generator)
    q = random_distributions(rows, width, vocab_size, generator=generator)
    # Some nodes where p and q are equal or nearly so: the edge cases of every formula.
    q[:6] = p[:6, :width]
    q[6:9] = (p[6:9, :width] + 1e-7 * q[6:9]) / (1 + 1e-7)
    counts = torch.randint(0, width + 1, (rows,), generator=generator)
    counts[0], counts[1] = 0, width
    tokens, parents = torch.zeros((2, rows, width), dtype=torch.int64)
    for b in range(rows):
        left = q[b].clone()
        for i in range(int(counts[b])):
            weights = torch.ones(1)
            while weights.sum() == 0 or weights[0] == 1:
                parent = int(torch.randint(i + 1, (), generator=generator)) if branching else i
                weights = left[parent] if mode != "with replacement" else q[b, parent]
                if weights.sum() > 0:
                    break
            token = int(torch.multinomial(weights, 1, generator=generator))
            left[parent, token] = 0
            tokens[b, i], parents[b, i] = token, parent
        if not branching:
            parents[b] = torch.arange(width)
    probs = None if mode == "chosen" else q
    return Draft(tokens, parents, counts, probs, mode == "with replacement", is_chain=not branching), p


def cases():
    for name in DEFINITIONS:
        for mode in MODES:
            yield name, mode, False
            if get(name).trees and (name != "kseq" or mode == "with replacement"):
                yield name, mode, True


@pytest.mark.parametrize(("name", "mode", "branching"), cases())
def test_batched_equals_plain(name, mode, branching):
    for seed in range(4):
        draft, p = random_batch(mode, branching=branching, seed=seed)
        verifier = get(name)
        stop = verifier.stop_probs(draft, p)
        probs = [verifier.next_probs(draft, p, torch.full_like(draft.counts, node)) for node in range(draft.width + 1)]
        # The search for rho stops early: that lowers the acceptance rate slightly and does not affect exactness.
        tolerance = 1e-4 if name == "kseq" else 1e-10
        for b, n in enumerate(draft.counts.tolist()):
            q = None if draft.probs is None else draft.probs[b].tolist()
            want_stop, want_probs = DEFINITIONS[name](
                draft.tokens[b, :n].tolist(), draft.parents[b, :n].tolist(), p[b].tolist(), q, draft.replacement
            )
            assert stop[b].tolist() == pytest.approx(want_stop + [0] * (draft.width - n), abs=tolerance)
            for node in range(n + 1):
                if want_stop[node] > 1e-4:  # with next to no residual mass, rounding dominates in both
                    assert probs[node][b].tolist() == pytest.approx(want_probs[node], abs=tolerance)


@pytest.mark.parametrize(("name", "mode", "branching"), cases())
def test_rows_do_not_affect_each_other(name, mode, branching):
    draft, p = random_batch(mode, branching=branching, seed=5)
    verifier = get(name)
    stop = verifier.stop_probs(draft, p)
    node = stop.argmax(1)
    following = verifier.next_probs(draft, p, node)
    for b in range(draft.batch_size):
        row = slice(b, b + 1)
        probs = None if draft.probs is None else draft.probs[row]
        alone = replace(
            draft, tokens=draft.tokens[row], parents=draft.parents[row], counts=draft.counts[row], probs=probs
        )
        assert torch.allclose(verifier.stop_probs(alone, p[row]), stop[row], atol=1e-12)
        assert torch.allclose(verifier.next_probs(alone, p[row], node[row]), following[row], atol=1e-12)


@pytest.mark.parametrize(("name", "mode", "branching"), cases())
def test_float32_is_close_to_float64(name, mode, branching):
    draft, p = random_batch(mode, branching=branching, seed=6)
    single = replace(draft, probs=None if draft.probs is None else draft.probs.float())
    verifier = get(name)
    stop = verifier.stop_probs(single, p.float())
    assert stop.dtype == torch.float32
    assert (stop.sum(1) - 1).abs().max() < 1e-5
    # Rows whose p and q differ by 1e-7 are ill-posed in float32: there only the sums above can hold.
    sound = torch.arange(draft.batch_size) >= 9
    assert torch.allclose(stop.double()[sound], verifier.stop_probs(draft, p)[sound], atol=2e-5)
    following = verifier.next_probs(single, p.float(), torch.zeros_like(draft.counts))
    assert following.dtype == torch.float32
    assert torch.allclose(following.sum(1), torch.ones(draft.batch_size), atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", [n for n in names() if n != "coupled"])
def test_never_nan(name, dtype):
    """p and q one-hot, equal, disjoint or subnormal: both functions return distributions, whatever the node."""
    tiny = torch.finfo(dtype).tiny
    pool = torch.tensor(
        [[1, 0, 0, 0], [0, 1, 0, 0], [0.5, 0.5, 0, 0], [0, 0, 0.5, 0.5], [1, tiny, tiny / 4, 0], [0.25] * 4],
        dtype=dtype,
    )
    combinations = torch.cartesian_prod(
        torch.arange(6), torch.arange(6), torch.arange(6), torch.arange(4), torch.arange(4)
    )
    p = pool[combinations[:, [0, 1, 2]]]
    q = pool[combinations[:, [1, 2]]]
    tokens = combinations[:, 3:]
    verifier = get(name)
    for probs in (q, None):
        drafts = [Draft.chain(tokens, probs=probs), Draft.chain(tokens, torch.zeros(len(tokens)).long(), probs)]
        if verifier.trees and (name != "kseq" or probs is not None):
            parents = torch.zeros_like(tokens)
            counts = torch.full((len(tokens),), 2)
            drafts.append(Draft(tokens, parents, counts, probs, replacement=True))
            if name != "kseq":
                drafts.append(Draft(tokens, parents, counts, probs, replacement=False))
        for draft in drafts:
            stop = verifier.stop_probs(draft, p)
            assert torch.isfinite(stop).all()
            assert (stop >= 0).all()
            assert torch.allclose(stop.sum(1), torch.ones_like(stop[:, 0]), atol=1e-5)
            for node in range(3):
                following = verifier.next_probs(draft, p, torch.full_like(draft.counts, node))
                assert torch.isfinite(following).all()
                assert torch.allclose(following.sum(1), torch.ones_like(following[:, 0]), atol=1e-5)


@pytest.mark.parametrize("name", ["token", "block", "lenient", "ensemble", "token-unadjusted"])
def test_chains_only_verifiers_refuse_trees(name):
    draft, p = random_batch("chosen", branching=True)
    with pytest.raises(ParameterError, match=r"takes chains.*Draft\.chain"):
        get(name).stop_probs(draft, p)
    with pytest.raises(ParameterError, match="takes chains"):
        get(name).next_probs(draft, p, draft.counts)


@pytest.mark.parametrize(
    ("mode", "how"), [("chosen", "chosen by rule"), ("without replacement", "without replacement")]
)
def test_kseq_refuses_siblings_that_are_not_independent(mode, how):
    draft, p = random_batch(mode, branching=True)
    with pytest.raises(ParameterError, match=how):
        get("kseq").stop_probs(draft, p)
    with pytest.raises(ParameterError, match=how):
        get("kseq").next_probs(draft, p, draft.counts)


def test_names_and_get():
    assert names()[:6] == ("token", "block", "tree", "traversal", "kseq", "coupled")
    lossless = [get(name).lossless for name in names()]
    assert lossless == sorted(lossless, reverse=True)
    for name in names():
        verifier = get(name)
        assert verifier.name == name
        assert get(verifier) is verifier
        assert verifier.citation
        assert verifier.lossless or "LOSSY" in verifier.summary


def test_get_with_parameters():
    assert get("lenient:0.8").leniency == 0.8
    assert get("lenient:0.8") is get("lenient:0.8")  # rows of one verifier are verified together
    assert get("ensemble:0.25").weight == 0.25
    assert (get("typical:0.2,0.5").threshold, get("typical:0.2,0.5").entropy_factor) == (0.2, 0.5)
    for wrong, message in {
        "best": "unknown verifier 'best': choose one of token, ",
        "block:2": "takes no parameters",
        "lenient:2": "up to 1: got 2",
        "lenient:nan": "up to 1: got nan",
        "ensemble:0": "above 0",
        "typical:0": "above 0",
        "lenient:much": "can't read parameters 'much'",
        "lenient:": "can't read parameters",
        "lenient:0.5,0.5": "can't read parameters",
    }.items():
        with pytest.raises(ParameterError, match=message):
            get(wrong)


def one_position(seed):
    generator = torch.Generator().manual_seed(seed)
    return random_distributions(5, generator=generator), random_distributions(5, generator=generator)


def output_probs(verifier, p, q):
    """The distribution of the first token of a round with one draft token."""
    drafts = all_drafts((0,), [q])
    return round_distribution(verifier, drafts, [p, torch.full((5, 5), 0.2, dtype=torch.float64)]).sum(1)


def distance(p, q):
    return (p - q).abs().sum().item() / 2


@pytest.mark.parametrize("leniency", [0.2, 0.7])
def test_lenient_has_the_distribution_and_distance_it_states(leniency):
    for seed in range(10):
        p, q = one_position(seed)
        out = output_probs(LenientVerifier(leniency), p, q)
        accepted = torch.minimum(q, p / leniency)
        rest = (p - q).clamp(min=0)
        want = accepted + (1 - accepted.sum()) * rest / rest.sum().clamp(min=1e-300)
        assert torch.allclose(out, want, atol=1e-12)
        assert distance(out, p) == pytest.approx(distance(p, q) - (q - p / leniency).clamp(min=0).sum().item())
        assert distance(out, p) <= min(1 - leniency, distance(p, q)) + 1e-12
        assert (out <= p / leniency + 1e-12).all()


@pytest.mark.parametrize("weight", [0.3, 0.8])
def test_ensemble_has_the_mixtures_distribution(weight):
    for seed in range(10):
        p, q = one_position(seed)
        out = output_probs(get(f"ensemble:{weight}"), p, q)
        assert torch.allclose(out, weight * p + (1 - weight) * q, atol=1e-12)
        assert distance(out, p) == pytest.approx((1 - weight) * distance(p, q))


def test_typical_has_the_distribution_and_distance_it_states():
    for seed in range(10):
        p, q = one_position(seed)
        verifier = TypicalVerifier()
        out = output_probs(verifier, p, q)
        bar = min(0.09, 0.3 * torch.special.entr(p).sum().neg().exp().item())
        passing = q * (p > bar)
        share = passing.sum()
        assert torch.allclose(out, passing + (1 - share) * p, atol=1e-12)
        if share > 0:
            assert distance(out, p) == pytest.approx((share * distance(passing / share, p)).item())
        assert distance(out, p) < 1 - bar


def test_typical_takes_the_deepest_branch_that_passes():
    tokens, parents = torch.tensor([[0, 1, 2]]), torch.tensor([[0, 0, 2]])
    p = torch.tensor([[[0.4, 0.6, 0], [1, 0, 0], [0, 0.5, 0.5], [0.2, 0.3, 0.5]]])
    draft = Draft(tokens, parents, torch.tensor([3]))
    assert get("typical").stop_probs(draft, p).tolist() == [[0, 0, 0, 1]]
    assert get("typical").next_probs(draft, p, torch.tensor([3])).tolist() == [pytest.approx([0.2, 0.3, 0.5])]


def test_decide_draws_node_and_token():
    draft = Draft.chain(torch.tensor([[1, 0], [1, 0]]))
    p = torch.tensor([[[0.25, 0.75], [0.5, 0.5], [0.0, 1.0]]]).expand(2, -1, -1)
    # Stop probabilities: 0.25, 0.375, 0.375.
    verdict = decide(get("token"), draft, p, torch.tensor([[0.2, 0.5], [0.7, 0.5]]))
    assert verdict.counts.tolist() == [0, 2]
    assert verdict.tokens.tolist() == [0, 1]
    assert verdict.path.tolist() == [[0, 0], [1, 2]]


@pytest.mark.parametrize("name", ["token", "block", "traversal"])
@pytest.mark.parametrize("mode", ["chosen", "with replacement"])
@pytest.mark.parametrize("alone", [False, True])
def test_the_shortcut_is_the_definition(name, mode, alone):
    """Same node and same next-token distribution, for uniforms all over [0, 1) and just beside every step."""
    verifier = get(name)
    for seed in range(2 if alone else 6):  # each row alone costs calls of its own
        draft, p = random_batch(mode, branching=False, seed=seed)
        rows = [slice(i, i + 1) for i in range(draft.batch_size)] if alone else [slice(None)]
        for part in rows:
            chains, probs = draft.part(part), p[part]
            stop = verifier.stop_probs(chains, probs)
            assert shortcut(verifier, chains, probs) is not None
            ends = stop.cumsum(-1)
            beside = [(ends[:, i] + d).clamp(0, 1 - 2**-53) for i in range(ends.shape[1]) for d in (-1e-9, 1e-9)]
            everywhere = [torch.full((len(stop),), i / 8, dtype=torch.float64) for i in range(8)]
            for u in [*beside, *everywhere]:
                if (ends - u[:, None]).abs().min() < 1e-10:
                    continue  # rounding decides
                nodes, weights = shortcut(verifier, chains, probs)(chains, probs, u.tolist())
                assert nodes == draw(stop, u).tolist()
                following = verifier.next_probs(chains, probs, torch.tensor(nodes))
                assert torch.allclose(weights / weights.sum(-1, keepdim=True), following, rtol=0, atol=1e-9)


@pytest.mark.parametrize("name", [name for name in names() if get(name).lossless and not is_coupled(get(name))])
def test_without_a_draft_every_lossless_verifier_draws_from_p_itself(name):
    p = torch.rand((3, 1, 50), generator=torch.Generator().manual_seed(0)).softmax(-1)
    u = torch.rand((3, 2), generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    verifier, draft = get(name), Draft.empty(3)
    verdict = decide(verifier, draft, p, u)
    node = draw(verifier.stop_probs(draft, p), u[:, 0])
    assert torch.equal(verdict.tokens, draw(verifier.next_probs(draft, p, node), u[:, 1]))
    assert verdict.path.shape == (3, 0)
    assert torch.equal(verdict.counts, node)


def test_the_shortcut_handles_other_vocabularies():
    """Draft tokens that the target has no score for, and q of larger and smaller vocabularies than the target's."""
    generator = torch.Generator().manual_seed(1)
    p = random_distributions(1, 4, 6, generator=generator)
    for size, tokens in ((8, [7, 2, 6]), (8, [2, 7, 1]), (4, [3, 0, 2])):
        q = torch.full((1, 3, size), 1 / size, dtype=torch.float64)
        for probs in (q, None):
            draft = Draft.chain(torch.tensor([tokens]), probs=probs)
            for name in ("token", "block", "traversal"):
                stop = get(name).stop_probs(draft, p)
                for u in torch.linspace(0.01, 0.99, 23, dtype=torch.float64):
                    nodes, weights = shortcut(get(name), draft, p)(draft, p, [float(u)])
                    assert nodes == draw(stop, u[None]).tolist()
                    following = get(name).next_probs(draft, p, torch.tensor(nodes))
                    assert torch.allclose(weights / weights.sum(), following, rtol=0, atol=1e-12)


def test_a_subclass_takes_no_shortcut():
    class Changed(TokenVerifier):
        def stop_probs(self, draft, target_probs):
            return super().stop_probs(draft, target_probs).flip(1)

    draft = Draft.chain(torch.tensor([[1]]))
    assert shortcut(Changed(), draft, torch.ones(1, 2, 2) / 2) is None
    assert shortcut(get("token"), Draft.empty(1), torch.ones(1, 1, 2) / 2) is None


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_kseq_accepts_nearly_everything_where_p_is_q(dtype):
    p = torch.rand((3, 1000), generator=torch.Generator().manual_seed(0), dtype=dtype).softmax(-1)
    tokens = torch.arange(8).expand(3, 8)
    draft = Draft(tokens, torch.zeros_like(tokens), torch.full((3,), 8), p[:, None].clone())
    stop = get("kseq").stop_probs(draft, p[:, None].expand(3, 9, 1000))
    assert (stop[:, 1] > 0.999).all()  # the first child is taken


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
@pytest.mark.parametrize(("name", "mode", "branching"), cases())
def test_a_gpu_gives_the_same(name, mode, branching):
    draft, p = random_batch(mode, branching=branching, seed=8)
    probs = None if draft.probs is None else draft.probs.cuda()
    there = replace(
        draft, tokens=draft.tokens.cuda(), parents=draft.parents.cuda(), counts=draft.counts.cuda(), probs=probs
    )
    verifier = get(name)
    stop = verifier.stop_probs(draft, p)
    assert torch.allclose(verifier.stop_probs(there, p.cuda()).cpu(), stop, atol=1e-9)
    node = stop.argmax(1)
    following = verifier.next_probs(there, p.cuda(), node.cuda()).cpu()
    assert torch.allclose(following, verifier.next_probs(draft, p, node), atol=1e-9)


@pytest.mark.parametrize(("name", "meant"), [("tokn", "token"), ("traversl", "traversal"), ("lenent:0.5", "lenient")])
def test_a_misspelt_verifier_is_named(name, meant):
    with pytest.raises(ParameterError, match=f"did you mean '{meant}'"):
        get(name)


@pytest.mark.parametrize("name", ["token", "block", "traversal"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_probabilities_of_a_model_that_is_trained(name, dtype):
    logits = torch.randn(2, 3, 9, generator=torch.Generator().manual_seed(1), dtype=dtype)
    draft = Draft.chain(torch.tensor([[1, 2], [3, 4]]))
    wanted = decide(get(name), draft, logits.softmax(-1), [[0.3, 0.6]] * 2)
    found = decide(get(name), draft, logits.requires_grad_().softmax(-1), [[0.3, 0.6]] * 2)
    assert (found.accepted, found.following) == (wanted.accepted, wanted.following)


@pytest.mark.parametrize(
    ("function", "change", "words"),
    [
        ("stop_probs", lambda found: None, r"gave a NoneType: give a tensor of the shape \[1, 3\]"),
        ("stop_probs", lambda found: found[:, 1:], r"gave the shape \[1, 2\]: give a tensor of the shape \[1, 3\]"),
        ("next_probs", lambda found: found[0], r"gave the shape \[5\]: give a tensor of the shape \[1, 5\]"),
        ("stop_probs", lambda found: found * 0, "with the sum 0: give probabilities"),
        ("next_probs", lambda found: found * float("nan"), "of the class Own gave a row from .* with the sum nan"),
        ("next_probs", lambda found: found.log(), "a row from -"),
    ],
)
def test_what_a_verifier_of_ones_own_gives_has_to_be_probabilities(function, change, words):
    class Own(TokenVerifier):
        name = "own"

    setattr(Own, function, lambda self, *given: change(getattr(TokenVerifier, function)(self, *given)))
    draft, p = Draft.chain(torch.tensor([[1, 2]])), torch.full((1, 3, 5), 0.2)
    with pytest.raises(ParameterError, match=f"verifier 'own': {function} .*{words}"):
        decide(Own(), draft, p, [[0.3, 0.6]])
