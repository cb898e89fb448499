"""Why engines in the register fail their audits, as far as it is known: the lines at fault, and small reproductions."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class KnownFault:
    """A fault of an engine.

    Attributes:
        engine: as in the register.
        modes: parts of the modes' names, one of which must occur.
        title: what a reader sees first.
        text: Markdown.
    """

    engine: str
    modes: tuple[str, ...]
    title: str
    text: str

    def explains(self, engine: str, mode: str) -> bool:
        """Whether a failure in that mode is this fault's."""
        return engine == self.engine and any(part in mode for part in self.modes)


KNOWN_FAULTS = (
    KnownFault(
        "vLLM",
        ("no plug-in",),
        "vLLM 0.32.0 for CPUs: draft tokens get sampling parameters that nobody wrote",
        """`_expand_kernel_impl` in `vllm/utils/cpu_triton_utils.py` hands `_ensure_int64(output)` to its kernel. For a
tensor of floats that is a copy: the temperatures and top-p of the draft tokens are written into it, and it is dropped.
What the sampler reads is uninitialised memory.

With vLLM's Python:

    import torch
    from vllm.platforms import current_platform

    current_platform.import_kernels()
    from vllm.utils.cpu_triton_utils import _expand_kernel_impl

    output = torch.full((5,), -9.0)
    _expand_kernel_impl(output, torch.tensor([0.5, 0.9]), torch.tensor([2, 5], dtype=torch.int32), 0, 1)
    print(output)  # -9 five times, and not 0.5, 0.5, 0.9, 0.9, 0.9

Greedy decoding is not touched. [Foretoken's plug-in](vllm.md) replaces that function where it fails this test.""",
    ),
    KnownFault(
        "transformers",
        ("single-position",),
        "transformers 5.23.0, Gemma 4's assistant: q is not what the draft was drawn from",
        """`SinglePositionMultiTokenCandidateGenerator.get_candidates` (`generation/candidate_generator.py`) takes
`outputs.logits.argmax(dim=-1)` as the draft and returns `outputs.logits` as its logits. `_speculative_sampling` takes
their softmax as q, but the draft was certain: its q is 1 at one token. So the likeliest token of the assistant is
accepted too often. With a draft that is always token 0, q = (0.6, 0.4) and p = (0.5, 0.5), token 0 comes out with
probability 5/6:

```python
import torch
from transformers.generation.utils import _speculative_sampling

p, q = torch.tensor([0.5, 0.5]), torch.tensor([0.6, 0.4])
draft = torch.tensor([[0, 0]])
first = [
    int(_speculative_sampling(draft, q.log()[None, None], 1, p.log().repeat(1, 2, 1))[0][0, 0]) for _ in range(10_000)
]
print(first.count(0) / len(first))  # 0.83, and not 0.5
```

The draft's own distribution would be lossless: draw the token from the processed logits, as the other generators
do, or return logits that are infinite at the chosen token. (In 5.23.0 the text configuration of the assistant is also
refused when the model is made, since no layer of its own makes the keys that all of them share; the audit makes it all
the same.)""",
    ),
    KnownFault(
        "transformers",
        ("ensemble weight",),
        "transformers, `assistant_ensemble_weight`: lossy by design",
        """The option verifies against a mixture of target and assistant, and says so. The entry shows that the audit
notices.""",
    ),
    KnownFault(
        "OpenVINO GenAI",
        ("draft-model",),
        "OpenVINO GenAI 2026.4.1: a rejected draft is dealt with one round late",
        """Upstream's issue 4190 names `Sampler::sample_from_sequence_group` (`src/cpp/src/sampling/sampler.cpp`): with
sampling, the rejection of a draft token takes effect one iteration late, so that a word is dropped and what was
predicted behind it is kept. The audit agrees: greedy decoding is right, and with a single draft token a round sampling
is already wrong at the places behind a draft (`foretoken audit openvino --mode draft-model -k 1 --temperature 1`).
It is still so in the newest release.""",
    ),
    KnownFault(
        "llama.cpp",
        ("temperature after top-k and top-p",),
        "llama.cpp: its temperature comes after top-k and top-p",
        """No fault, but another claim: llama.cpp's chain of samplers filters first and applies the temperature to what
is left, where transformers, vLLM and Foretoken apply the temperature first. With filters and a temperature other than 1
the two are different distributions. The other entries of llama.cpp are at temperature 1 without filters, where both
agree.""",
    ),
)
