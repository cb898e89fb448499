"""Uniforms and shared noise: distributed as they should along every part of their key, and functions of it alone."""

import math

import pytest
import torch
from scipy import stats

from foretoken import randomness
from foretoken.randomness import Stream, fresh_seed, gumbel, gumbel_at, seed_tensor, uniforms

COUNT = 20_000
KEYS = ["positions", "streams", "seeds", "far positions", "bits of the seed"]


def along(key: str, offset: int = 0) -> torch.Tensor:
    """`COUNT` uniforms whose keys differ in one part only (another `offset`, another such family)."""
    steps, one = torch.arange(COUNT), torch.ones(COUNT, dtype=torch.int64)
    if key == "positions":
        return uniforms(torch.tensor([7 + offset]), steps[None], Stream.STOP)[0]
    if key == "streams":
        return uniforms(torch.tensor([7]), (one * 11 + offset)[None], Stream.DRAFT + steps)[0]
    if key == "seeds":
        return uniforms(steps, one * (5 + offset), Stream.NEXT)
    if key == "far positions":
        return uniforms(torch.tensor([7 + offset]), steps[None] * 2**32, Stream.STOP)[0]
    return uniforms(steps << 40, one * (5 + offset), Stream.NEXT)


@pytest.mark.parametrize("key", KEYS)
def test_uniform_along_each_part_of_the_key(key):
    for offset in range(3):
        u = along(key, offset)
        assert u.dtype == torch.float64
        assert u.min() >= 0
        assert u.max() < 1
        assert stats.kstest(u.numpy(), "uniform").pvalue > 1e-4
        assert stats.chisquare(torch.histc(u, 256, 0, 1).numpy()).pvalue > 1e-4
        # The low bits of the 53 too.
        low = (u * 2**53).to(torch.int64) & 255
        assert stats.chisquare(torch.bincount(low, minlength=256).numpy()).pvalue > 1e-4


@pytest.mark.parametrize("key", KEYS)
def test_neighbouring_keys_are_independent(key):
    families = [along(key, offset) for offset in range(2)]
    pairs = [(families[0], families[1]), *((u[:-lag], u[lag:]) for u in families for lag in (1, 2, 64))]
    for x, y in pairs:
        assert abs(torch.corrcoef(torch.stack([x, y]))[0, 1]) < 4.5 / math.sqrt(len(x))
        cells = (x * 16).long() * 16 + (y * 16).long()
        assert stats.chisquare(torch.bincount(cells, minlength=256).numpy()).pvalue > 1e-4


def test_streams_of_one_position_are_independent():
    positions = torch.arange(COUNT)[None]
    streams = [Stream.STOP, Stream.NEXT, Stream.DRAFT, Stream.DRAFT + 1, Stream.DRAFT + 2]
    drawn = torch.cat([uniforms(torch.tensor([3]), positions, stream) for stream in streams])
    off = torch.corrcoef(drawn) - torch.eye(len(streams))
    assert off.abs().max() < 4.5 / math.sqrt(COUNT)


def test_broadcast():
    seeds, positions = torch.tensor([3, 4]), torch.tensor([[5, 6, 7], [8, 9, 10]])
    streams = torch.tensor([Stream.STOP, Stream.NEXT, Stream.DRAFT + 4])
    together = uniforms(seeds, positions, streams)
    for b in range(2):
        for i in range(3):
            alone = uniforms(seeds[b : b + 1], positions[b, i : i + 1], int(streams[i]))
            assert together[b, i] == alone[0]
    flat = uniforms(seeds, positions[:, 0], Stream.STOP)
    assert torch.equal(flat, uniforms(seeds, positions, Stream.STOP)[:, 0])


@pytest.mark.parametrize("part", ["tokens", "positions", "seeds"])
def test_gumbel_along_each_part_of_the_key(part):
    zero = torch.zeros(1, dtype=torch.int64)
    steps = torch.arange(COUNT)
    for fixed in range(4):
        if part == "tokens":
            g = gumbel(zero + fixed, zero[None], COUNT)[0, 0]
        elif part == "positions":
            g = gumbel_at(zero, steps[None], torch.full((1, COUNT, 1), fixed))[0, :, 0]
        else:
            g = gumbel_at(steps, zero.expand(COUNT), torch.full((COUNT, 1), fixed))[:, 0]
        assert g.dtype == torch.float32
        assert g.isfinite().all()
        assert stats.kstest(g.numpy(), "gumbel_r").pvalue > 1e-4
        assert abs(g.mean() - 0.5772) < 0.05
        assert abs(g.var() - math.pi**2 / 6) < 0.1


def test_gumbel_of_neighbours_is_independent():
    g = gumbel(torch.arange(8), torch.arange(8).expand(8, 8), 4096)  # [seed, position, token]
    u = torch.exp(-torch.exp(-g.double()))
    # Any two rows, whatever their keys: 64 choose 2 correlations over 4,096 tokens each.
    off = torch.corrcoef(u.view(64, -1)) - torch.eye(64)
    assert off.abs().max() < 5.2 / math.sqrt(4096)
    # Any two tokens up to 64 apart, in one row.
    for lag in (1, 2, 3, 16, 64):
        x, y = u[..., lag:].flatten(), u[..., :-lag].flatten()
        assert abs(torch.corrcoef(torch.stack([x, y]))[0, 1]) < 4.5 / math.sqrt(len(x))
        cells = (x * 16).long().clamp(max=15) * 16 + (y * 16).long().clamp(max=15)
        assert stats.chisquare(torch.bincount(cells, minlength=256).numpy()).pvalue > 1e-4


def test_gumbel_argmax_draws_from_the_law():
    law = torch.tensor([0.5, 0.25, 0.15, 0.07, 0.03])
    g = gumbel(torch.tensor([9]), torch.arange(50_000)[None], 5)[0]
    counts = torch.bincount((law.log() + g).argmax(-1), minlength=5)
    assert stats.chisquare(counts.numpy(), (law * 50_000).numpy().astype("float64").round()).pvalue > 1e-4


def test_gumbel_tail():
    """The largest values come as often as they should: a Poisson process of unit rate, seen as exp(-g) times n."""
    positions = torch.arange(3000)[None]
    top = torch.cat([gumbel(torch.tensor([seed]), positions, 4096).flatten().topk(64)[0] for seed in range(2)])
    beyond = torch.exp(-top.double()) * 3000 * 4096
    assert stats.kstest((beyond[beyond < 40] / 40).numpy(), "uniform").pvalue > 1e-4


def test_gumbel_tail_gets_more_bits(monkeypatch):
    seed, positions = torch.tensor([5]), torch.arange(3000)[None]
    plain = gumbel(seed, positions, 4096)
    monkeypatch.setattr(randomness, "_TAIL", 2**14)  # one in 131,072 instead of one in 16 million
    finer = gumbel(seed, positions, 4096)
    changed = plain != finer
    assert 60 < changed.sum() < 130
    cells = torch.exp(-finer[changed].double()) * 2**31  # 1 wide
    assert (cells - torch.exp(-plain[changed].double()) * 2**31).abs().max() < 1.1
    assert stats.kstest((cells % 1).numpy(), "uniform").pvalue > 1e-4


def test_gumbel_of_a_token_is_the_same_in_any_vocabulary():
    seeds, positions = torch.tensor([1, 2**63 - 1]), torch.tensor([[0, 5], [100, 2**40]])
    wide = gumbel(seeds, positions, 1000)
    assert torch.equal(gumbel(seeds, positions, 77), wide[..., :77])
    ids = torch.tensor([[[3, 999, 0], [4, 4, 5]], [[10, 20, 30], [500, 1, 2]]])
    assert torch.equal(gumbel_at(seeds, positions, ids), wide.gather(-1, ids))


def test_a_row_gets_what_it_would_get_alone():
    seeds, positions = torch.arange(50) * 3, torch.arange(200).view(50, 4)
    together = gumbel(seeds, positions, 3000)
    for row in (0, 17, 49):
        alone = gumbel(seeds[row : row + 1], positions[row : row + 1, 1:2], 3000)
        assert torch.equal(together[row, 1], alone[0, 0])


def test_global_generator_is_untouched():
    torch.manual_seed(0)
    before = torch.get_rng_state()
    uniforms(torch.tensor([1]), torch.tensor([1]), Stream.STOP)
    gumbel(torch.tensor([1]), torch.tensor([1]), 100)
    fresh_seed()
    assert torch.equal(before, torch.get_rng_state())


def test_golden_values():
    """Outputs are a promise: one seed, one text, in every version. A change here is a breaking change."""
    seeds = seed_tensor([0, 1, 2**64 - 1])
    assert seeds.tolist() == [0, 1, -1]
    u = uniforms(seeds, torch.tensor([[0, 1], [2, 1000], [5, 2**31]]), Stream.STOP)
    assert u.flatten().tolist() == GOLDEN_UNIFORMS
    u = uniforms(seeds[:1], torch.tensor([3]), torch.tensor([Stream.NEXT, Stream.DRAFT, Stream.DRAFT + 7]))
    assert u.tolist() == GOLDEN_STREAMS
    g = gumbel_at(seeds, torch.tensor([0, 7, 2**31]), torch.tensor([[0, 1], [50, 128_255], [3, 4]]))
    assert g.flatten().tolist() == pytest.approx(GOLDEN_GUMBELS, abs=1e-5)


def test_fresh_seeds_differ():
    seeds = {fresh_seed() for _ in range(100)}
    assert len(seeds) == 100
    assert all(0 <= seed < 2**63 for seed in seeds)


GOLDEN_UNIFORMS = [
    0.13870941014555427,
    0.18383979100743952,
    0.3146207067215312,
    0.38741945842564274,
    0.07745216199530702,
    0.21295038876772587,
]
GOLDEN_STREAMS = [0.7290676101582249, 0.017100703398278627, 0.4272175961566659]
GOLDEN_GUMBELS = [-0.502201, -0.372155, 3.425516, 1.33695, 2.581854, -0.292392]
