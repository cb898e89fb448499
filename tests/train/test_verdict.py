"""Whether a trained drafter is said to be worth using."""

import re

import numpy as np
import pytest

from foretoken.train.acceptance import K
from foretoken.train.samples import TargetSample
from foretoken.train.verdict import Verdict, lookup_lengths


@pytest.mark.parametrize(
    ("lengths", "lookup", "cost", "reason"),
    [
        ({"greedy": 3.0, "sampled": 2.0}, {"greedy": 1.5, "sampled": 1.2}, 0.1, None),
        ({"greedy": 3.0, "sampled": 1.1}, {"greedy": 1.5, "sampled": 1.2}, 0.1, None),  # one kind is enough
        ({"greedy": 1.5, "sampled": 1.2}, {"greedy": 1.6, "sampled": 1.2}, 0.1, "prompt-lookup.*greedy 1.60"),
        ({"greedy": 1.05, "sampled": 1.01}, {"greedy": 1.0, "sampled": 1.0}, 0.2, "1.05 tokens .* 20% as many weights"),
        ({"greedy": 1.0}, {"greedy": 1.0}, 0.0, "not worth using"),
    ],
)
def test_reasons(lengths, lookup, cost, reason):
    found = Verdict(lengths, lookup, cost).reason
    if reason is None:
        assert found is None
    else:
        assert found is not None
        assert re.search(reason, found)


def test_prompt_lookup_is_measured_as_a_decode_loop_would_run_it():
    period = TargetSample(np.array([4, 5, 6] * 9 + [4], dtype=np.int32), start=4, temperature=0.0, prompt=0)
    never = TargetSample(np.arange(20, dtype=np.int32), start=4, temperature=1.0, prompt=1)
    found = lookup_lengths([period, never], vocab_size=48)
    assert found == {"greedy": pytest.approx(24 / -(-24 // (K + 1))), "sampled": 1.0}
