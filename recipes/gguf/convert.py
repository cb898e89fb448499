"""Llama checkpoints as GGUF files, in the types that people download: F32, F16, BF16, Q8_0, Q4_K_M, Q4_0.

    python recipes/gguf/convert.py                                # the shipped pair, all types, into ./gguf
    python recipes/gguf/convert.py CHECKPOINT --out FOLDER --types BF16,Q4_K_M

Other architectures, and other types, are converted by llama.cpp's own convert_hf_to_gguf.py and llama-quantize.
"""

from __future__ import annotations

import argparse
import ctypes
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import gguf
import numpy as np

import foretoken
from foretoken.models.gguf.library import Library, library
from foretoken.peers import workers

sys.path.insert(0, str(Path(workers.__file__).parent))
import gguf_writer

UNROUNDED = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}
ROUNDED = ("Q8_0", "Q4_K_M", "Q4_0")
Type = gguf.GGMLQuantizationType
FILE_TYPES = {
    "Q8_0": gguf.LlamaFileType.MOSTLY_Q8_0,
    "Q4_K_M": gguf.LlamaFileType.MOSTLY_Q4_K_M,
    "Q4_0": gguf.LlamaFileType.MOSTLY_Q4_0,
}
NARROW = {Type.Q4_K: Type.Q5_0, Type.Q6_K: Type.Q8_0}
"""Types for rows that are no multiple of 256 numbers, as llama-quantize takes them."""


def type_of(name: str, scheme: str, layers: int, tied: bool) -> Type:
    """The type of a matrix, as llama-quantize chooses it.

    Args:
        name: of the tensor.
        scheme: one of `ROUNDED`.
        layers: of the model.
        tied: the embeddings are the output layer too.
    """
    if scheme == "Q8_0":
        return Type.Q8_0
    if name == "output.weight" or (name == "token_embd.weight" and tied):
        return Type.Q6_K
    if scheme == "Q4_0":
        return Type.Q4_0
    layer = re.match(r"blk\.(\d+)\.(attn_v|ffn_down)\.", name)
    if layer:  # the first eighth, the last eighth, and every third between them
        i, eighth = int(layer[1]), layers // 8
        if i < eighth or i >= 7 * layers // 8 or (i - eighth) % 3 == 2:
            return Type.Q6_K
    return Type.Q4_K


def quantize(calls: Library, values: np.ndarray, kind: Type) -> np.ndarray:
    """Rows of float32 numbers in another type: ``[rows, bytes]``."""
    block, size = gguf.GGML_QUANT_SIZES[kind]
    rows, width = values.shape
    values = np.ascontiguousarray(values, dtype=np.float32)
    out = np.empty((rows, width // block * size), dtype=np.uint8)
    function = calls.ggml_quantize_chunk
    function.restype = ctypes.c_size_t
    function.argtypes = (ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p, *3 * (ctypes.c_int64,), ctypes.c_void_p)
    written = function(int(kind), values.ctypes.data, out.ctypes.data, 0, rows, width, None)
    if written != out.nbytes:
        raise ValueError(f"{kind.name}: {written:,} bytes were written and not {out.nbytes:,}")
    return out


def round_file(source: Path, target: Path, scheme: str) -> None:
    """Write a float32 GGUF file with rounded matrices."""
    calls = library()
    reader = gguf.GGUFReader(source)
    fields: dict[str, Any] = {key: field for key, field in reader.fields.items() if not key.startswith("GGUF.")}
    architecture = fields.pop("general.architecture").contents()
    layers = fields[f"{architecture}.block_count"].contents()
    tied = not any(tensor.name == "output.weight" for tensor in reader.tensors)
    writer = gguf.GGUFWriter(target, architecture)
    for key, field in fields.items():
        if key != "general.file_type":
            item = field.types[-1] if len(field.types) > 1 else None
            writer.add_key_value(key, field.contents(), field.types[0], sub_type=item)
    writer.add_file_type(FILE_TYPES[scheme])
    for tensor in reader.tensors:
        values = np.array(tensor.data)
        if values.ndim != 2:
            writer.add_tensor(tensor.name, values)
            continue
        kind = type_of(tensor.name, scheme, layers, tied)
        if values.shape[1] % gguf.GGML_QUANT_SIZES[kind][0]:
            kind = NARROW[kind]
        writer.add_tensor(tensor.name, quantize(calls, values, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def convert(checkpoint: Path, out: Path, name: str, types: Sequence[str]) -> list[Path]:
    """The files of a checkpoint, those that are there already included."""
    out.mkdir(parents=True, exist_ok=True)
    made = []
    for kind in types:
        file = out / f"{name}-{kind}.gguf"
        made.append(file)
        if file.exists():
            continue
        if kind in UNROUNDED:
            gguf_writer.convert(checkpoint, file, UNROUNDED[kind])
            continue
        kept = "F32" in types or (out / f"{name}-F32.gguf").exists()
        (whole,) = convert(checkpoint, out, name, ["F32"])
        part = file.with_suffix(".part")
        round_file(whole, part, kind)
        part.rename(file)
        if not kept:
            whole.unlink()
    return made


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint", nargs="?", type=Path, help="a Llama checkpoint; default: the shipped pair")
    parser.add_argument("--out", type=Path, default=Path("gguf"))
    parser.add_argument("--types", default=",".join((*UNROUNDED, *ROUNDED)))
    given = parser.parse_args()
    types = given.types.split(",")
    unknown = [kind for kind in types if kind not in (*UNROUNDED, *ROUNDED)]
    if unknown:
        parser.error(f"type {unknown[0]!r} is unknown: choose from {', '.join((*UNROUNDED, *ROUNDED))}")
    shipped = foretoken.tiny_pair_path()
    checkpoints = [given.checkpoint] if given.checkpoint else [shipped / part for part in ("target", "drafter")]
    for checkpoint in checkpoints:
        for file in convert(checkpoint, given.out, checkpoint.name, types):
            print(f"{file}  {file.stat().st_size / 1e6:.1f} MB")


if __name__ == "__main__":
    main()
