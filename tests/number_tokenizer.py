"""A tokenizer whose tokens are numbers separated by spaces, so that strings in tests are easy to read."""

from __future__ import annotations


class NumberTokenizer:
    """Tokens 0 … size - 1, with the part of transformers' tokenizer interface that an index uses."""

    def __init__(self, size: int, name: str = "numbers") -> None:
        self.name_or_path = name
        self._vocabulary = {str(number): number for number in range(size)}

    def get_vocab(self) -> dict[str, int]:
        return dict(self._vocabulary)

    def __call__(self, texts: list[str], add_special_tokens: bool = True) -> dict[str, list[list[int]]]:
        return {"input_ids": [[self._vocabulary[word] for word in text.split()] for text in texts]}

    def decode(self, tokens: list[int], **options: object) -> str:
        return " ".join(map(str, tokens))
