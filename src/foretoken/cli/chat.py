"""A conversation with a model in this process."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from foretoken.cli import render
from foretoken.cli.checks import AUTO
from foretoken.cli.conversation import Command, Conversation, Message, parse, settings, written
from foretoken.cli.options import ModelOptions, OutputOptions, SamplingOptions
from foretoken.cli.respond import respond
from foretoken.cli.screen import Screen
from foretoken.cli.setup import check_can_chat, make_drafter, make_engine, note_unused_tree
from foretoken.engine.outputs import DecodeStats
from foretoken.errors import ParameterError, PromptError
from foretoken.sampling.params import CHECKPOINT_FIELDS

if TYPE_CHECKING:
    from foretoken.engine.engine import Engine
    from foretoken.models import LanguageModel


class Chat(Conversation):
    """The state of a conversation with a model in this process.

    Args:
        engine: decodes the answers.
        models: what `engine` was made of.
        sampling: how to sample.
        output: what to show.
        screen: where.
    """

    changeable = ("drafter", "tree", "verifier", "num_speculative_tokens")

    def __init__(
        self,
        engine: Engine,
        models: ModelOptions,
        sampling: SamplingOptions,
        output: OutputOptions,
        screen: Screen,
    ) -> None:
        check_can_chat(engine.target)
        super().__init__(sampling, screen, _defaults(sampling, engine.target))
        self._engine = engine
        self._models = models
        self._output = output
        self._answers: list[DecodeStats] = []
        own = {
            "drafter": Command("/drafter NAME|MODEL", "draft with another drafter", self.setter("drafter")),
            "tree": Command("/tree KIND|FILE", "draft trees, or chains (none)", self.setter("tree")),
            "verifier": Command("/verifier NAME", "verify by another rule", self.setter("verifier")),
            "num_speculative_tokens": Command(
                "/k N|auto", "draft at most N tokens a round", self.setter("num_speculative_tokens")
            ),
        }
        switches = {
            "compare": Command("/compare [on|off]", "also decode without speculation", self._switch("compare")),
            "trace": Command("/trace [on|off]", "show one round a line", self._switch("trace")),
            "probs": Command("/probs [on|off]", "show p and q in the trace", self._switch("probs")),
        }
        first = {name: self.commands.pop(name) for name in ("max_new_tokens", "set")}
        self.commands = {**own, **first, **switches, **self.commands}

    def ask(self, question: str) -> None:
        """See `Conversation`."""
        messages = self._fitting([*self.messages, {"role": "user", "content": question}])
        params = self.sampling.with_defaults(self._engine.target).params()
        answer = respond(self._engine, self.with_system(messages), params, self._output, self.screen)
        self.messages = [*messages, {"role": "assistant", "content": answer.text}]
        self._answers.append(answer.stats)
        self.interrupted = answer.interrupted

    def _fitting(self, messages: list[Message]) -> list[Message]:
        """The messages, without the oldest turns if the context is too short for all of them and an answer."""
        from foretoken.engine.prompts import encode

        target = self._engine.target
        max_tokens = target.max_length - min(self.sampling.max_new_tokens, target.max_length // 4)
        kept = messages
        while len(kept) > 2 and len(encode(target, self.with_system(kept))) > max_tokens:
            kept = kept[2:]
        size = len(encode(target, self.with_system(kept)))
        if size >= target.max_length:
            raise PromptError(
                f"the question has {size:,} tokens, {target.name} takes {target.max_length:,} with its answer: ask it "
                "in fewer words" + (", or shorten /system" if self.system else "")
            )
        if len(kept) < len(messages):
            turns = (len(messages) - len(kept)) // 2
            self.screen.note(
                f"the context of {target.max_length:,} tokens is full: forgot the oldest {turns} "
                f"{'turn' if turns == 1 else 'turns'}",
                style="yellow",
            )
        return kept

    def change(self, name: str, text: str) -> None:
        """See `Conversation`."""
        value = parse(name, text, settings(ModelOptions)[name])
        models = replace(self._models, **{name: value})
        target = self._engine.target
        remade = ("drafter", "tree")
        drafter = make_drafter(models, target, self.screen) if name in remade else self._engine.drafter
        self._engine = make_engine(models, target, drafter)
        self._models = models
        self.screen.note(f"{name} is now {written(value)}")
        if name in (*remade, "verifier"):
            note_unused_tree(models, self._engine, self.screen)

    def current(self, name: str) -> str:
        """See `Conversation`."""
        if name not in self.changeable:
            return super().current(name)
        value = getattr(self._models, name)
        if name == "verifier" and value in (None, AUTO):
            return f"{AUTO}: {self._engine.verifier.name}"
        if name == "drafter" and value is None:
            return f"{render.drafter_label(self._engine.drafter)} (default)"
        if name == "tree" and value is None:
            return "the drafter's own"
        return written(value)

    def _switch(self, name: str) -> Callable[[str], None]:
        def switch(argument: str) -> None:
            value = parse(name, argument, bool) if argument else not getattr(self._output, name)
            changes = {name: value}
            if name == "trace" and not value:
                changes["probs"] = False  # which would turn it on again
            self._output = replace(self._output, **changes)
            self.screen.note(f"{name} is now {'on' if value else 'off'}")

        return switch

    def check_system(self, text: str) -> None:
        """See `Conversation`."""
        tokenizer: Any = self._engine.target.tokenizer
        user = {"role": "user", "content": "?"}

        def written(role: str) -> str | None:
            try:
                return str(tokenizer.apply_chat_template([{"role": role, "content": text}, user], tokenize=False))
            except Exception:  # templates raise what they like
                return None

        as_system = written("system")
        if as_system is None or text not in as_system or as_system == written("user"):
            raise ParameterError(
                f"the chat template of {self._engine.target.name} has no system messages: say it in your question"
            )

    def reset(self, argument: str) -> None:
        """See `Conversation`."""
        super().reset(argument)
        self._answers = []

    def stats(self, argument: str) -> None:
        """See `Conversation`."""
        from foretoken.engine.prompts import encode

        if not self._answers:
            self.screen.note("no answers yet")
            return
        target = self._engine.target
        used = len(encode(target, self.with_system(self.messages)))
        total = DecodeStats.total(self._answers)
        count = len(self._answers)
        self.screen.note(
            f"{count} {'answer' if count == 1 else 'answers'} · {render.numbers(total)} · "
            f"{used:,} of {target.max_length:,} tokens of context used"
        )


def _defaults(sampling: SamplingOptions, target: LanguageModel) -> dict[str, str]:
    """How each parameter is shown that was not given, for which the target may have a value of its own."""
    params = sampling.with_defaults(target).params()
    told = {name: " (the model's)" for name in target.sampling_defaults}
    return {name: f"{getattr(params, name)}{told.get(name, '')}" for name in CHECKPOINT_FIELDS}
