"""A Llama checkpoint as a GGUF file, with the `gguf` package alone: neither torch nor transformers is needed."""

import json
import re
from pathlib import Path
from typing import Any

import gguf
import numpy as np

NORMAL, UNKNOWN, CONTROL, UNUSED = 1, 2, 3, 5  # token types, as llama.cpp numbers them

_BLOCK = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
_REST = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
_FILE_TYPES = {
    "float32": gguf.LlamaFileType.ALL_F32,
    "float16": gguf.LlamaFileType.MOSTLY_F16,
    "bfloat16": gguf.LlamaFileType.MOSTLY_BF16,
}
_NUMPY = {"F32": np.float32, "F16": np.float16, "BF16": np.uint16}


def convert(folder: Path, file: Path, dtype: str) -> None:
    """Write the checkpoint in `folder` to `file`, once.

    Args:
        folder: a Llama checkpoint without biases, in safetensors.
        file: where to.
        dtype: of the matrices: ``bfloat16``, ``float16`` or ``float32``.

    Raises:
        ValueError: the checkpoint is of another kind.
    """
    if file.exists():
        return
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if config.get("model_type") != "llama" or config.get("attention_bias") or config.get("mlp_bias"):
        raise ValueError(f"only Llama checkpoints without biases are converted, not {config.get('model_type')!r}")
    if rope.get("rope_type", "default") != "default":
        raise ValueError(f"rotary embeddings of type {rope['rope_type']!r} are not converted")
    file.parent.mkdir(parents=True, exist_ok=True)
    unfinished = file.with_suffix(".part")
    writer = gguf.GGUFWriter(unfinished, "llama")
    heads = config["num_attention_heads"]
    kv_heads = config.get("num_key_value_heads") or heads
    head_dim = config.get("head_dim") or config["hidden_size"] // heads
    writer.add_name(folder.name)
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(kv_heads)
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    writer.add_rope_dimension_count(head_dim)
    writer.add_rope_freq_base(rope.get("rope_theta") or config.get("rope_theta", 10000.0))
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_vocab_size(config["vocab_size"])
    writer.add_file_type(_FILE_TYPES[dtype])
    _add_tokenizer(writer, folder, config)
    for name, kind, values in _tensors(folder):
        new, matrix = _name(name), values.ndim == 2
        if new is None or (new == "output.weight" and config.get("tie_word_embeddings")):
            continue
        for part, count in (("attn_q.", heads), ("attn_k.", kv_heads)):
            if part in new:  # llama.cpp turns neighbouring coordinates, transformers those half a head apart
                values = values.reshape(count, 2, head_dim // 2, -1).swapaxes(1, 2).reshape(values.shape)
        stored, raw = _stored(values, kind, dtype if matrix else "float32")
        writer.add_tensor(new, stored, raw_dtype=raw)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    unfinished.rename(file)


def _name(name: str) -> str | None:
    stem, _, kind = name.rpartition(".")
    found = re.fullmatch(r"model\.layers\.(\d+)\.(.+)", stem)
    if found:
        return f"blk.{found[1]}.{_BLOCK[found[2]]}.{kind}" if found[2] in _BLOCK else None
    return f"{_REST[stem]}.{kind}"


def _tensors(folder: Path) -> Any:
    """Name, stored type and values of each tensor; bfloat16 ones as uint16, mapped, not read."""
    for file in sorted(folder.glob("*.safetensors")):
        with file.open("rb") as opened:
            length = int.from_bytes(opened.read(8), "little")
            header = json.loads(opened.read(length))
        data = np.memmap(file, np.uint8, "r", 8 + length)
        for name, entry in header.items():
            if name == "__metadata__":
                continue
            if entry["dtype"] not in _NUMPY:
                raise ValueError(f"{name} is stored as {entry['dtype']}: only {', '.join(_NUMPY)} are converted")
            start, end = entry["data_offsets"]
            yield name, entry["dtype"], data[start:end].view(_NUMPY[entry["dtype"]]).reshape(entry["shape"])


def _stored(values: Any, kind: str, dtype: str) -> tuple[Any, Any]:
    """The values as the file holds them, and the file's name for that."""
    if dtype == "bfloat16":
        if kind != "BF16":
            bits = values.astype(np.float32).view(np.uint32)
            values = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)  # to the nearest, ties to even
        # The writer takes the shape of types that numpy lacks from their bytes.
        return np.ascontiguousarray(values).view(np.uint8), gguf.GGMLQuantizationType.BF16
    if kind == "BF16":
        values = (values.astype(np.uint32) << 16).view(np.float32)
    return np.ascontiguousarray(values.astype(np.float16 if dtype == "float16" else np.float32)), None


def _add_tokenizer(writer: Any, folder: Path, config: dict[str, Any]) -> None:
    """A byte-level BPE tokenizer, padded to the embedding's rows; of others only the size, as prompts are token ids.

    Words without merges, as small worlds have them, are such a tokenizer, too: llama.cpp's server takes no model
    without tokens.
    """
    file = folder / "tokenizer.json"
    stored = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}
    model = stored.get("model", {})
    words = model.get("type") == "WordLevel"
    if not words and (model.get("type") != "BPE" or "byte_fallback" not in model or model["byte_fallback"]):
        writer.add_tokenizer_model("no_vocab")
        return
    size = config["vocab_size"]
    tokens, kinds = [f"[PAD{i}]" for i in range(size)], [UNUSED] * size
    for token, number in model["vocab"].items():
        tokens[number], kinds[number] = token, NORMAL
    for added in stored.get("added_tokens", ()):
        tokens[added["id"]], kinds[added["id"]] = added["content"], CONTROL if added["special"] else NORMAL
    merges = [merge if isinstance(merge, str) else " ".join(merge) for merge in model.get("merges", ())]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("default")  # its own way to split words has no name there
    writer.add_token_list(tokens)
    writer.add_token_types(kinds)
    writer.add_token_merges(merges or ["\u0120 \u0120"])  # the list must not be empty: spaces, which no word has
    for name, add in (("bos_token_id", writer.add_bos_token_id), ("eos_token_id", writer.add_eos_token_id)):
        number = config.get(name)
        if isinstance(number, list):
            number = number[0]
        if number is not None:
            add(number)
    writer.add_add_bos_token(False)
    template = folder / "chat_template.jinja"
    if template.exists():
        writer.add_chat_template(template.read_text(encoding="utf-8"))
