"""The pair as others get it: two ordinary model folders in bfloat16, and the model card."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from transformers import GenerationConfig, LlamaForCausalLM

MAX_DRAFTER_SHARE = 0.15
MAX_BYTES = 40_000_000
TEMPERATURE = 0.5
"""What the target asks to be sampled at. Of 60 maths questions that it was not trained on, with answers of up to 200
tokens: of the equations it writes 3% are right at temperature 1, 11 to 14% at 0.5 to 0.8, 15% greedily; 59 answers end
at temperature 1, 56 at 0.4 to 0.7, and 46 greedily, where it repeats itself."""


def num_parameters(model: LlamaForCausalLM) -> int:
    """Parameters, tied embeddings counted once."""
    return sum(p.numel() for p in {id(p): p for p in model.parameters()}.values())


def export(target: LlamaForCausalLM, drafter: LlamaForCausalLM, tokenizer, report: dict, folder: Path) -> None:
    """Write `folder`/{target,drafter} and MODEL_CARD.md, and check what the package promises of them."""
    sizes = {"target": num_parameters(target), "drafter": num_parameters(drafter)}
    if sizes["drafter"] > MAX_DRAFTER_SHARE * sizes["target"]:
        raise ValueError(
            f"the drafter has {sizes['drafter']:,} parameters, over {MAX_DRAFTER_SHARE:.0%} of the target's"
        )
    for name, model in (("target", target), ("drafter", drafter)):
        wanted = {"do_sample": True, "temperature": TEMPERATURE} if name == "target" else {}
        model.generation_config = GenerationConfig(
            eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id, **wanted
        )
        save(model, tokenizer, folder / name)
    (folder / "MODEL_CARD.md").write_text(model_card(report, sizes), encoding="utf-8")
    total = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
    if total > MAX_BYTES:
        raise ValueError(f"the pair takes {total:,} bytes, over {MAX_BYTES:,}: choose smaller models")


def save(model: LlamaForCausalLM, tokenizer, folder: Path) -> None:
    """Write one model in bfloat16, with the tokenizer."""
    model.to(torch.bfloat16).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    make_portable(folder / "tokenizer_config.json")


def make_portable(path: Path) -> None:
    """Name the tokenizer's class and special tokens as transformers 4 does too, which other engines still use."""
    config = json.loads(path.read_text(encoding="utf-8"))
    for private in ("backend", "is_local", "local_files_only"):
        config.pop(private, None)
    config["tokenizer_class"] = "PreTrainedTokenizerFast"
    if "extra_special_tokens" in config:
        config["additional_special_tokens"] = config.pop("extra_special_tokens")
    path.write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def model_card(report: dict, sizes: dict[str, int]) -> str:
    """The card, every number of it from this run."""
    loss = "\n".join(
        f"| {name} | {report['train_tokens'][name]:,} | {by['target']:.3f} | {by['drafter']:.3f} |"
        for name, by in report["loss"].items()
    )
    lengths = "\n".join(
        f"| {name} | {by['greedy']['mean_acceptance_length']:.2f} | {by['greedy']['acceptance_rate']:.0%} "
        f"| {by['temperature 1']['mean_acceptance_length']:.2f} | {by['temperature 1']['acceptance_rate']:.0%} |"
        for name, by in report["acceptance"].items()
    )
    spent = {name: report[name] for name in ("target", "drafter")}
    example = report["example"].replace("<|", "\n<|").strip()
    return CARD.format(
        target_size=sizes["target"],
        drafter_size=sizes["drafter"],
        share=sizes["drafter"] / sizes["target"],
        target_tokens=spent["target"]["tokens"],
        target_minutes=spent["target"]["seconds"] / 60,
        drafter_tokens=spent["drafter"]["tokens"],
        drafter_minutes=spent["drafter"]["seconds"] / 60,
        sample_tokens=report["sample_tokens"],
        loss=loss,
        lengths=lengths,
        example=example,
    )


CARD = """\
# Model card: tiny pair

A target and a drafter for trying speculative decoding where no other model is at hand, offline and on a laptop. They
are small models, trained on a CPU in under two hours: they write text that looks like worked maths answers, Python or
old speeches, and they are **not to be trusted with any answer**.

| | target | drafter |
| --- | --- | --- |
| parameters (tied embeddings counted once) | {target_size:,} | {drafter_size:,} ({share:.1%} of the target) |
| architecture | Llama, 12 layers × 256, 4 heads of 64, 2 key-value heads \
| Llama, 2 layers × 192, 3 heads of 64, 1 key-value head |
| context | 2,048 | 2,048 |
| weights | bfloat16 safetensors | bfloat16 safetensors |
| training tokens | {target_tokens:,} | {drafter_tokens:,} |
| training time, 2 CPU cores | {target_minutes:.0f} minutes | {drafter_minutes:.0f} minutes |

Both use one tokenizer: byte-level BPE with 4,096 entries, digits one by one, any UTF-8 text makes the round trip. Its
chat template writes `<|user|>question<|assistant|>answer<|endoftext|>`.

## Data and licences

| text | origin | licence |
| --- | --- | --- |
| gsm8k | github.com/openai/grade-school-math, training split; calculator marks left out | MIT |
| python | sources of the Python standard library; where it leaves room, \
of click, rich, typer, jinja2, packaging, filelock, anyio, h11, \
huggingface_hub | PSF, MIT, BSD, Apache-2.0 |
| speeches | inaugural and State of the Union addresses (nltk_data) | public domain |
| shakespeare | tinyshakespeare (github.com/karpathy/char-rnn) | public domain text |

Held out and never trained on: the last 2% of the questions, of the speeches and of the plays, and every 50th Python
file. The weights have the licence of the project.

## Recipe

`python recipes/tiny_pair/train.py --data DIR --out DIR` does all of it. The target: next-token loss, Muon for the
matrices of the layers and AdamW for the rest, rows of 256 tokens growing to 2,048 at the end. The drafter: embeddings
begun from the principal components of the target's, then distilled with KL(p || q) + TV(p, q) on three parts of text
that the target wrote ({sample_tokens:,} tokens on training prompts; temperatures 1, 0.7 and greedy) and one part of
the original text.

## Held-out loss (nats a token)

| text | tokens to train on | target | drafter |
| --- | --- | --- | --- |
{loss}

## Acceptance on held-out prompts

Chains of 5 draft tokens, token-level rejection. Mean acceptance length: tokens emitted a target pass, the bonus or
residual token included. Rate: chance that one drafted token is accepted, along text that the target wrote.

| text | greedy: length | rate | temperature 1: length | rate |
| --- | --- | --- | --- | --- |
{lengths}

## A held-out question, answered greedily

```text
{example}
```
"""
