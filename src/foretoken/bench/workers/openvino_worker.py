"""OpenVINO GenAI as an engine. Options: further properties of its pipeline."""

import hashlib
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

from protocol import Result, Runner, cache_gib, serve, timed  # type: ignore[import-not-found]

NO_TOKEN = 1 << 20
"""An end token that no model has: texts are to be as long as asked for."""


def make(options: dict[str, Any]) -> tuple[dict[str, str], Runner]:
    """A pipeline for each mode, made when it is first needed."""
    import numpy as np
    import openvino
    import openvino_genai as genai

    precision = {"float32": "f32", "bfloat16": "bf16", "float16": "f16"}[options["dtype"]]
    pipelines: dict[str, Any] = {}

    def folder(part: str) -> Path:
        source = Path(options[part])
        stamp = max(one.stat().st_mtime_ns for one in source.glob("*.safetensors"))
        told = f"{source.resolve()} {stamp} {options['dtype']}"
        made = Path(options["cache"]) / "openvino" / hashlib.sha256(told.encode()).hexdigest()[:16]
        convert(source, made, options["dtype"])
        return made

    def pipeline(mode: str) -> Any:
        if mode not in pipelines:
            own = {"INFERENCE_PRECISION_HINT": precision, "INFERENCE_NUM_THREADS": options["threads"]}
            extra: dict[str, Any] = {**own, **options["options"]}
            if mode == "draft-model":
                extra["draft_model"] = genai.draft_model(str(folder("drafter")), "CPU", **own)
            elif mode == "prompt-lookup":
                extra["prompt_lookup"] = True
            scheduler = genai.SchedulerConfig()
            scheduler.cache_size = cache_gib(options)
            scheduler.enable_prefix_caching = False  # prompts are measured more than once
            scheduler.max_num_seqs = max(options["max_batch"], 1)
            pipelines[mode] = genai.ContinuousBatchingPipeline(str(folder("target")), scheduler, "CPU", extra)
        return pipelines[mode]

    def run(request: dict[str, Any]) -> Result:
        mode, one = request["mode"], pipeline(request["mode"])
        configs = []
        for place in range(len(request["prompts"])):
            config = genai.GenerationConfig()
            config.max_new_tokens = request["num_tokens"]
            config.ignore_eos = True
            config.eos_token_id = NO_TOKEN
            config.stop_token_ids = {NO_TOKEN}
            config.apply_chat_template = False
            if mode != "plain":
                config.num_assistant_tokens = request["k"]
            if mode == "prompt-lookup":
                config.max_ngram_size = 3
            config.do_sample = request["temperature"] > 0
            if config.do_sample:
                config.temperature = request["temperature"]
                config.top_p, config.top_k = 1.0, 1 << 62
                config.rng_seed = request["seed"] + place
            configs.append(config)
        inputs = [openvino.Tensor(np.array([prompt], dtype=np.int64)) for prompt in request["prompts"]]
        outputs, seconds = timed(lambda: one.generate(inputs, configs))
        outputs = sorted(outputs, key=lambda output: output.m_request_id)
        result: dict[str, Any] = {"tokens": [list(output.m_generation_ids[0]) for output in outputs]}
        # Sizes of the steps; the last one may hold tokens behind the end.
        steps = list(outputs[0].perf_metrics.raw_metrics.m_batch_sizes)
        result.update(seconds=seconds)
        if mode == "plain":
            result["rounds"] = request["num_tokens"]
        elif len(inputs) == 1 and sum(steps) >= request["num_tokens"]:
            result.update(rounds=len(steps), accepted=request["num_tokens"] - len(steps))
        return result

    return {"openvino-genai": genai.__version__}, run


def convert(source: Path, folder: Path, dtype: str) -> None:
    """Convert a Hugging Face checkpoint, once."""
    if (folder / "openvino_model.xml").exists():
        return
    import openvino
    import torch
    from openvino_tokenizers import convert_tokenizer
    from optimum.intel import OVModelForCausalLM
    from transformers import AutoTokenizer

    model = OVModelForCausalLM.from_pretrained(
        source, export=True, load_in_8bit=False, torch_dtype=getattr(torch, dtype)
    )
    model.save_pretrained(folder)
    parts = convert_tokenizer(AutoTokenizer.from_pretrained(source), with_detokenizer=True)
    for part, name in zip(parts, ("openvino_tokenizer.xml", "openvino_detokenizer.xml"), strict=True):
        openvino.save_model(part, folder / name)


if __name__ == "__main__":
    serve(make)
