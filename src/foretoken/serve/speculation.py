"""How a request speculates: the fields of its body, within what the server's engine has."""

from __future__ import annotations

from typing import Any, Literal

from foretoken import verify
from foretoken.engine.settings import (
    DrafterNames,
    check_drafter_choice,
    check_num_speculative_tokens,
    check_tree_choice,
)
from foretoken.errors import ForetokenError, shown
from foretoken.serve.errors import ApiError
from foretoken.serve.strict import Strict


class Speculation(Strict):
    """How one request speculates.

    Attributes:
        drafter: one of the engine's, or ``none``, which leaves the prediction.
        num_speculative_tokens: most tokens drafted a round; 0 decodes plainly.
        tree: ``none`` for drafts that do not branch, or what the engine's drafter grows.
        verifier: a lossless verifier.
    """

    drafter: str | None = None
    num_speculative_tokens: Any = None
    tree: str | None = None
    verifier: str | None = None

    def settings(self, drafter: DrafterNames) -> dict[str, Any]:
        """As `Engine.submit` takes them.

        Args:
            drafter: the engine's.

        Raises:
            ApiError: the verifier is unknown, or would change the output's distribution; the engine has no such drafter
                or trees; the draft length is out of its range.
        """
        if self.verifier is not None:
            lossless = [name for name in verify.names() if verify.get(name).lossless]
            if self.verifier not in lossless:
                message = f"speculation.verifier is {shown(self.verifier)}: use a lossless one, {', '.join(lossless)}"
                raise ApiError(400, message, "speculation.verifier")
        name = "drafter"
        try:
            if self.drafter is not None:
                check_drafter_choice(self.drafter, drafter)
            name = "tree"
            if self.tree is not None:
                check_tree_choice(self.tree, drafter)
            name = "num_speculative_tokens"
            if self.num_speculative_tokens is not None:
                check_num_speculative_tokens(self.num_speculative_tokens)
        except ForetokenError as error:
            raise ApiError(400, f"speculation.{error}", f"speculation.{name}") from None
        return {name: value for name, value in self.model_dump().items() if value is not None}


class PredictedOutput(Strict):
    """What a request's output is expected to be, as in OpenAI's API.

    Attributes:
        content: a string, or parts of text.
    """

    type: Literal["content"]
    content: Any
