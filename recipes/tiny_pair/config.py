"""The sizes that the recipe can train: `full` is what the package ships, `toy` is for the tests."""

from __future__ import annotations

from dataclasses import dataclass, field

from loop import Plan


@dataclass(frozen=True)
class SamplePlan:
    """How much the target writes for the drafter to learn from."""

    batches: int
    batch_size: int
    max_new_tokens: int
    temperatures: tuple[float, ...] = (1.0, 1.0, 1.0, 0.0, 0.7)  # a batch draws one of these
    shares: dict[str, float] = field(
        default_factory=lambda: {"gsm8k": 0.5, "python": 0.24, "speeches": 0.13, "shakespeare": 0.13}
    )


@dataclass(frozen=True)
class Size:
    """Shapes of both models, and how long each is trained."""

    vocab_size: int
    context: int
    python_chars: int
    target: dict
    drafter: dict
    target_plan: Plan
    samples: SamplePlan
    drafter_plan: Plan
    further_samples: SamplePlan
    further_plan: Plan  # of the draft model, by further.py
    held_out_prompts: int  # of each source, in the evaluation
    held_out_tokens: int  # that the target writes on each of them


SIZES = {
    # Deep and thin: on a CPU a pass of a model this small costs by the layer, so that twelve layers are worth two.
    "full": Size(
        vocab_size=4096,
        context=2048,
        python_chars=9_000_000,
        target={
            "hidden_size": 256,
            "intermediate_size": 704,
            "num_hidden_layers": 12,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 64,
        },
        drafter={
            "hidden_size": 192,
            "intermediate_size": 384,
            "num_hidden_layers": 2,
            "num_attention_heads": 3,
            "num_key_value_heads": 1,
            "head_dim": 64,
        },
        target_plan=Plan(
            minutes=86,
            # Most questions with their answers fit 256 tokens; longer rows come last, when they are worth their price.
            lengths=((0.0, 256), (0.45, 384), (0.8, 512), (0.93, 1024), (0.97, 2048)),
        ),
        samples=SamplePlan(batches=40, batch_size=128, max_new_tokens=160),
        drafter_plan=Plan(minutes=22, lengths=((0.0, 256), (0.9, 512), (0.96, 1024)), accumulate=2, decay_from=0.4),
        further_samples=SamplePlan(batches=96, batch_size=192, max_new_tokens=160),
        # Half of the first training's learning rates: the weights are to be kept, as far as they are right.
        further_plan=Plan(
            minutes=45,
            lengths=((0.0, 256), (0.95, 512)),
            accumulate=2,
            muon_lr=0.01,
            adam_lr=1.5e-3,
            decay_from=0.2,
        ),
        held_out_prompts=48,
        held_out_tokens=128,
    ),
    "toy": Size(
        vocab_size=400,
        context=256,
        python_chars=100_000,
        target={
            "hidden_size": 128,
            "intermediate_size": 256,
            "num_hidden_layers": 4,
            "num_attention_heads": 2,
            "num_key_value_heads": 1,
            "head_dim": 64,
        },
        drafter={
            "hidden_size": 64,
            "intermediate_size": 96,
            "num_hidden_layers": 1,
            "num_attention_heads": 1,
            "num_key_value_heads": 1,
            "head_dim": 64,
        },
        target_plan=Plan(steps=30, lengths=((0.0, 32), (0.5, 64)), micro_tokens=256, accumulate=2),
        samples=SamplePlan(batches=4, batch_size=4, max_new_tokens=16),
        drafter_plan=Plan(steps=12, lengths=((0.0, 32),), micro_tokens=256, accumulate=1),
        further_samples=SamplePlan(batches=3, batch_size=4, max_new_tokens=16),
        further_plan=Plan(steps=6, lengths=((0.0, 32),), micro_tokens=256, accumulate=1),
        held_out_prompts=2,
        held_out_tokens=16,
    ),
}
