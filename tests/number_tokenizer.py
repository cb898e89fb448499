"""A tokenizer whose tokens are numbers with spaces between: texts that can be read off a test."""

from __future__ import annotations


class NumberTokenizer:
    """Tokens 0 … size - 1; what transformers' slow tokenizers do, as far as an index asks for it."""

    def __init__(self, size: int, name: str = "numbers") -> None:
        self.name_or_path = name
        self._vocabulary = {str(number): number for number in range(size)}

    def get_vocab(self) -> dict[str, int]:
        return dict(self._vocabulary)

    def __call__(self, texts: list[str], add_special_tokens: bool = True) -> dict[str, list[list[int]]]:
        return {"input_ids": [[self._vocabulary[word] for word in text.split()] for text in texts]}

    def decode(self, tokens: list[int], **options: object) -> str:
        return " ".join(map(str, tokens))
