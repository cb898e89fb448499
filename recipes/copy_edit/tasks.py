"""Tasks to token rows: whole tasks, packed in the order of their numbers, the loss on answers alone."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from data import IGNORE

from foretoken.workloads.copy_edit import Task, task


def encode(tokenizer, one: Task) -> tuple[list[int], list[int]]:
    """Token ids of the prompt, in the chat template, and of the answer, closed by the end-of-text token."""
    message = [{"role": "user", "content": one.prompt}]
    prompt = tokenizer.apply_chat_template(message, add_generation_prompt=True, tokenize=True, return_dict=True)
    answer = tokenizer(one.answer + tokenizer.eos_token, add_special_tokens=False)
    return list(prompt["input_ids"]), list(answer["input_ids"])


class TaskRows:
    """An endless stream of batches of training tasks; `state` is all that a restart needs.

    The `rows` argument of `loop.fit`. No task occurs twice: each is made from the next number.
    """

    def __init__(self, tokenizer) -> None:
        self.tokenizer = tokenizer
        self.state: dict[str, list[int]] = {"next": [0]}

    def batch(self, rows: int, length: int, pad: int) -> tuple[np.ndarray, np.ndarray]:
        """Token ids and labels [rows, length]; labels are not shifted, prompts and padding are `IGNORE`."""
        ids = np.full((rows, length), pad, dtype=np.int64)
        labels = np.full((rows, length), IGNORE, dtype=np.int64)
        for row in range(rows):
            end = 0
            for prompt, answer in self._fitting(length):
                start, middle, end = end, end + len(prompt), end + len(prompt) + len(answer)
                ids[row, start:end] = prompt + answer
                labels[row, middle:end] = answer
        return ids, labels

    def _fitting(self, length: int) -> Iterator[tuple[list[int], list[int]]]:
        """Tasks for one row: at least one, and then as many as come before one that does not fit."""
        room = length
        while True:
            number = self.state["next"][0]
            # Shorter tasks in shorter rows, in which they are learnt sooner.
            prompt, answer = encode(self.tokenizer, task(number, "training", (2, max(3, length // 48))))
            needed = len(prompt) + len(answer)
            if needed > room and room < length:
                return
            self.state["next"][0] = number + 1
            if needed <= room:
                yield prompt, answer
                room -= needed
