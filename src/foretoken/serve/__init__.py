"""The HTTP server: OpenAI's and Anthropic's APIs over an `AsyncEngine`. Needs the extra ``serve``."""

from foretoken.serve.app import create_app
from foretoken.serve.settings import ServeSettings

__all__ = ["ServeSettings", "create_app"]
