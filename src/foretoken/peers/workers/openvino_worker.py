"""OpenVINO GenAI. Options: quantize, and further properties of its pipeline.

The option ``quantize`` has NNCF round the target's weights, by one of `ROUNDINGS`.
"""

import hashlib
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

from protocol import (  # type: ignore[import-not-found]
    Result,
    Runner,
    cache_gib,
    clipped,
    serve,
    shaping,
    timed,
)

NO_TOKEN = 1 << 20
"""An end token that no model has: outputs are as long as requested."""
ROUNDINGS: dict[str, dict[str, Any]] = {
    "int8": {"bits": 8},
    "int4": {"bits": 4, "sym": False, "group_size": 128, "group_size_fallback": "adjust"},
    "int4_sym": {"bits": 4, "sym": True, "group_size": 64, "group_size_fallback": "adjust"},
}
"""By name: arguments of optimum-intel's ``OVWeightQuantizationConfig``. "int4" is what ``optimum-cli export openvino
--weight-format int4`` does, in smaller groups where 128 does not divide a width; "int4_sym" has the groups of
Foretoken's int4, which CPUs read faster. All give eight bits to the embeddings and the output layer."""
_PENALTIES = ("repetition_penalty", "presence_penalty", "frequency_penalty")


def make(options: dict[str, Any]) -> tuple[dict[str, str], Runner]:
    """A pipeline for each mode, made when it is first needed."""
    import numpy as np
    import openvino
    import openvino_genai as genai

    precision = {"float32": "f32", "bfloat16": "bf16", "float16": "f16"}[options["dtype"]]
    pipelines: dict[str, Any] = {}
    properties = dict(options["options"])
    quantize = properties.pop("quantize", None)
    if quantize is not None and quantize not in ROUNDINGS:
        raise ValueError(f"quantize={quantize}: choose one of {', '.join(ROUNDINGS)}")

    def folder(part: str) -> Path:
        source, rounding = Path(options[part]), quantize if part == "target" else None
        stamp = max(one.stat().st_mtime_ns for one in source.glob("*.safetensors"))
        described = " ".join([str(source.resolve()), str(stamp), options["dtype"], *([rounding] if rounding else [])])
        made = Path(options["cache"]) / "openvino" / hashlib.sha256(described.encode()).hexdigest()[:16]
        convert(source, made, options["dtype"], rounding)
        return made

    def pipeline(mode: str) -> Any:
        if mode not in pipelines:
            own = {"INFERENCE_PRECISION_HINT": precision, "INFERENCE_NUM_THREADS": options["threads"]}
            extra: dict[str, Any] = {**own, **properties}
            if mode == "draft-model":
                extra["draft_model"] = genai.draft_model(str(folder("drafter")), "CPU", **own)
            elif mode == "prompt-lookup":
                extra["prompt_lookup"] = True
            scheduler = genai.SchedulerConfig()
            scheduler.cache_size = cache_gib(options)
            scheduler.enable_prefix_caching = False  # prompts come again in every repeat
            scheduler.max_num_seqs = max(options["max_batch"], 1)
            pipelines[mode] = genai.ContinuousBatchingPipeline(str(folder("target")), scheduler, "CPU", extra)
        return pipelines[mode]

    def configured(request: dict[str, Any], params: dict[str, Any], seed: int | None) -> Any:
        config = genai.GenerationConfig()
        config.max_new_tokens = request["num_tokens"]
        config.ignore_eos = True
        config.eos_token_id = NO_TOKEN
        config.stop_token_ids = {NO_TOKEN}
        config.apply_chat_template = False
        if request["mode"] != "plain":
            config.num_assistant_tokens = request["k"]
        if request["mode"] == "prompt-lookup":
            config.max_ngram_size = 3
        config.do_sample = params["temperature"] > 0
        if config.do_sample:
            config.temperature, config.top_p = params["temperature"], params["top_p"]
            config.top_k = params["top_k"] or (1 << 62)
            if seed is not None:
                config.rng_seed = seed
        for name in _PENALTIES:
            setattr(config, name, params[name])
        return config

    def run(request: dict[str, Any]) -> Result:
        params = shaping(request, ("temperature", "top_k", "top_p", *_PENALTIES))
        mode, one, num_tokens = request["mode"], pipeline(request["mode"]), request["num_tokens"]
        configs = [configured(request, params, seed) for seed in request["seeds"] or [None] * len(request["prompts"])]
        inputs = [openvino.Tensor(np.array([prompt], dtype=np.int64)) for prompt in request["prompts"]]
        outputs, seconds = timed(lambda: one.generate(inputs, configs))
        outputs = sorted(outputs, key=lambda output: output.m_request_id)
        result: Result = {"tokens": [list(output.m_generation_ids[0]) for output in outputs], "seconds": seconds}
        if mode == "plain":
            return {**result, "rounds": num_tokens, "drafted": 0, "accepted": 0}
        # Its own counters of drafts leave out the last round; the tokens that each step added are certain.
        lengths = clipped(list(outputs[0].perf_metrics.raw_metrics.m_batch_sizes), num_tokens)
        if len(inputs) == 1 and lengths is not None:
            result.update(rounds=len(lengths), accepted=num_tokens - len(lengths), round_lengths=[lengths])
        return result

    return {"openvino-genai": genai.__version__}, run


def convert(source: Path, folder: Path, dtype: str, quantize: str | None) -> None:
    """Convert a Hugging Face checkpoint, once; `quantize` is one of `ROUNDINGS`, or None."""
    if (folder / "openvino_model.xml").exists():
        return
    import openvino
    import torch
    from openvino_tokenizers import convert_tokenizer
    from optimum.intel import OVModelForCausalLM, OVWeightQuantizationConfig
    from transformers import AutoTokenizer

    how = {"load_in_8bit": False}
    if quantize is not None:
        how = {"quantization_config": OVWeightQuantizationConfig(**ROUNDINGS[quantize])}
    model = OVModelForCausalLM.from_pretrained(source, export=True, torch_dtype=getattr(torch, dtype), **how)
    model.save_pretrained(folder)
    try:
        parts = convert_tokenizer(AutoTokenizer.from_pretrained(source), with_detokenizer=True)
    except Exception:  # it fails with whatever it fails; prompts are token ids, so that any tokenizer will do
        parts = convert_tokenizer(stand_in(), with_detokenizer=True)
    for part, name in zip(parts, ("openvino_tokenizer.xml", "openvino_detokenizer.xml"), strict=True):
        openvino.save_model(part, folder / name)


def stand_in() -> Any:
    """A placeholder tokenizer: the pipeline needs one even if prompts are token ids."""
    from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = {"[UNK]": 0, "[PAD]": 1, **{letter: 2 + i for i, letter in enumerate("abcdefgh")}}
    tokenizer = Tokenizer(models.WordPiece(vocabulary, unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer()
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="[UNK]", pad_token="[PAD]")


if __name__ == "__main__":
    serve(make)
