"""Checkpoints that `speculators` wrote give the logits that its own model gave; and it reads what is exported."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from test_head_drafting import BACKENDS

from foretoken.heads import Eagle3Head, kind_of, load_eagle3, save_eagle3
from foretoken.heads.running import make_runner
from tiny import tiny_llama

HERE = Path(__file__).parent
FLAGS = {
    "plain": [],
    "qwen3": ["qwen3", "norm_before_residual", "fc_norm"],
    "normed": ["norm_before_fc", "norm_output"],
}


def check(folder: Path) -> None:
    """The draft logits of a text, and of the steps that training takes from every slot."""
    assert kind_of(folder) == "eagle3"
    head = load_eagle3(folder, 4)
    facts = load_file(folder / "reference.safetensors")
    found = steps_of(head, facts["states"], facts["tokens"], len(facts["logits"]))
    for step, logits in enumerate(facts["logits"]):
        valid = logits.shape[0] - step
        assert (found[step][:valid] - logits[:valid]).abs().max() < 1e-4


def steps_of(head: Eagle3Head, states: torch.Tensor, tokens: torch.Tensor, steps: int) -> list[torch.Tensor]:
    """Logits ``[T, Vd]`` of each step: slots that see the text, and of later steps those of their own line alone."""
    size, kept = len(tokens), []

    def remember(keys, values):
        kept.append((keys, values))
        return torch.cat([one for one, _ in kept], dim=2), torch.cat([one for _, one in kept], dim=2)

    outputs = head.fuse(states)[None]
    mask, found = torch.ones(size, size, dtype=torch.bool).tril(), []
    for step in range(steps):
        shifted = torch.cat([tokens[step:], tokens.new_zeros(step)])[None]
        places = torch.arange(size)[None] + step
        outputs = head(head.embed_tokens(shifted), outputs, places, mask[None, None], remember)
        found.append(head.logits(outputs)[0])
        mask = torch.cat([mask, torch.eye(size, dtype=torch.bool)], dim=1)
    return found


@pytest.mark.parametrize("name", FLAGS)
def test_the_logits_are_those_of_speculators(name):
    check(HERE / "data" / name)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", FLAGS)
def test_so_are_those_of_a_draft(name, backend):
    folder = HERE / "data" / name
    head = load_eagle3(folder, 4)
    facts = load_file(folder / "reference.safetensors")
    runner = make_runner(head, head.embed_tokens.weight, backend)
    cache = runner.open()
    cache.select([-1])
    tokens, states = facts["tokens"], head.fuse(facts["states"])
    logits = runner.read(cache, [tokens[:6].tolist()], [states[:6]])
    assert (logits[0] - facts["logits"][0, 5]).abs().max() < 1e-4
    for step in (1, 2):
        one = torch.ones(1, dtype=torch.int64)
        logits = runner.score(cache, tokens[None, 5 + step : 6 + step], torch.tensor([[step - 2]]), one)
        assert (logits[0, 0] - facts["logits"][step, 5]).abs().max() < 1e-4


@pytest.mark.full
@pytest.mark.skipif(importlib.util.find_spec("speculators") is None, reason="speculators is not installed")
@pytest.mark.parametrize("name", FLAGS)
def test_fresh_checkpoints_of_speculators_and_what_it_makes_of_ours(name, tmp_path):
    script = [sys.executable, str(HERE / "speculators_reference.py"), str(tmp_path), *FLAGS[name]]
    subprocess.run(script, check=True)
    check(tmp_path)
    head = load_eagle3(tmp_path, 4)
    target = tmp_path / "target"  # where `speculators` looks for the rest
    tiny_llama(24, hidden_size=16, num_hidden_layers=4).save_pretrained(target)
    save_eagle3(head, tmp_path / "again", layout="speculators", target=str(target))
    from speculators.models.eagle3.core import Eagle3DraftModel

    theirs = Eagle3DraftModel.from_pretrained(tmp_path / "again").state_dict()
    for name, value in head.state_dict().items():
        assert torch.equal(theirs[name.replace("midlayer.", "layers.0.")], value)
