"""OpenVINO GenAI as a subject. Options: target, drafter (folders of converted models), mode, k."""

import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

from protocol import Sampler, Speculation, serve  # type: ignore[import-not-found]

NO_TOKEN = 1 << 20
"""An end token that no model has: texts are to be as long as asked for."""


def convert(path: str, folder: Path) -> str:
    """Convert a Hugging Face checkpoint, once."""
    if not (folder / "openvino_model.xml").exists():
        import openvino
        from openvino_tokenizers import convert_tokenizer
        from optimum.intel import OVModelForCausalLM

        model = OVModelForCausalLM.from_pretrained(path, export=True, load_in_8bit=False)
        model.save_pretrained(folder)
        parts = convert_tokenizer(stand_in(), with_detokenizer=True)
        for part, name in zip(parts, ("openvino_tokenizer.xml", "openvino_detokenizer.xml"), strict=True):
            openvino.save_model(part, folder / name)
    return str(folder)


def stand_in() -> Any:
    """A tokenizer that the pipeline can hold: it wants one, and prompts are token ids."""
    from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = {"[UNK]": 0, "[PAD]": 1, **{letter: 2 + i for i, letter in enumerate("abcdefgh")}}
    tokenizer = Tokenizer(models.WordPiece(vocabulary, unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer()
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="[UNK]", pad_token="[PAD]")


def clipped(sizes: list[int], total: int) -> list[int] | None:
    """Tokens of each step, without those of the last ones that were more than wanted; None if they are too few."""
    rounds: list[int] = []
    for size in sizes:
        rounds.append(min(size, total - sum(rounds)))
        if sum(rounds) == total:
            return rounds
    return None


def make(options: dict[str, Any]) -> tuple[str, dict[str, str], Sampler, Speculation]:
    """A pipeline."""
    import numpy as np
    import openvino
    import openvino_genai as genai

    mode, k = options["mode"], options["k"]
    target = convert(options["target"], Path(options["target"]) / "openvino")
    extra: dict[str, Any] = {}
    if mode == "draft-model":
        drafter = convert(options["drafter"], Path(options["drafter"]) / "openvino")
        extra["draft_model"] = genai.draft_model(drafter, "CPU", INFERENCE_PRECISION_HINT="f32")
    elif mode == "prompt-lookup":
        extra["prompt_lookup"] = True
    scheduler = genai.SchedulerConfig()
    scheduler.cache_size = 1
    # Its own counter of drafts leaves out a text's last round, or there is none: only what was accepted is certain.
    counts: dict[str, int | None] = {"drafted": 0 if mode == "none" else None, "accepted": 0}
    pipeline = genai.LLMPipeline(target, "CPU", scheduler_config=scheduler, INFERENCE_PRECISION_HINT="f32", **extra)

    def sample(request: dict[str, Any]) -> list[dict[str, Any]]:
        params = request["params"]
        config = genai.GenerationConfig()
        config.max_new_tokens = request["num_tokens"]
        config.ignore_eos = True
        config.eos_token_id = NO_TOKEN
        config.stop_token_ids = {NO_TOKEN}
        config.apply_chat_template = False
        if mode != "none":
            config.num_assistant_tokens = k
        if mode == "prompt-lookup":
            config.max_ngram_size = 3
        config.do_sample = params["temperature"] > 0
        if config.do_sample:
            config.temperature = params["temperature"]
            config.top_p = params["top_p"]
            config.top_k = params["top_k"] or (1 << 62)
        config.repetition_penalty = params["repetition_penalty"]
        config.presence_penalty = params["presence_penalty"]
        config.frequency_penalty = params["frequency_penalty"]
        prompt = np.array([request["prompt"]], dtype=np.int64)
        inputs = genai.TokenizedInputs(openvino.Tensor(prompt), openvino.Tensor(np.ones_like(prompt)))
        results = []
        for seed in request["seeds"]:
            config.rng_seed = seed
            output = pipeline.generate(inputs, config)
            tokens = list(output.tokens[0])
            rounds = clipped(list(output.perf_metrics.raw_metrics.m_batch_sizes), len(tokens))
            if rounds:
                counts["accepted"] = (counts["accepted"] or 0) + len(tokens) - len(rounds)
            results.append({"tokens": tokens, "rounds": rounds, "top_logprobs": None})
        return results

    details = {"openvino-genai": genai.__version__, "mode": mode, "num_assistant_tokens": str(k)}
    return f"OpenVINO GenAI ({mode})", details, sample, lambda: counts


if __name__ == "__main__":
    serve(make)
