"""``foretoken demo --web``: the shipped pair behind the server's page, on this machine alone."""

from __future__ import annotations

import webbrowser

from foretoken.cli.checks import AUTO, SHIPPED_DRAFTER
from foretoken.cli.options import ModelOptions
from foretoken.cli.screen import Screen
from foretoken.cli.serve import check_packages

HOST = "127.0.0.1"


def run_page(screen: Screen, port: int = 0, open_page: bool = True) -> bool:
    """Serve the page until a signal; see `foretoken.serve.lifecycle.serve` for what is returned.

    Args:
        screen: for messages.
        port: 0 takes a free one.
        open_page: in the browser.

    Raises:
        ForetokenError: a package is missing, or the port is taken.
    """
    check_packages()
    from foretoken.cli.setup import load_engine
    from foretoken.serve.app import create_app
    from foretoken.serve.lifecycle import listen, serve
    from foretoken.serve.settings import ServeSettings

    settings = ServeSettings(model="tiny-pair")
    with listen(HOST, port, settings.send_seconds) as listener:
        engine = load_engine(ModelOptions(drafter=f"{AUTO},{SHIPPED_DRAFTER}"), screen)
        engine.warm_up()
        app = create_app(engine, settings)
        address = f"http://{HOST}:{listener.getsockname()[1]}/"
        screen.note(f"The page is at {address}; Ctrl-C ends")
        # Connections wait in the listener's queue until the server takes them.
        if open_page and not webbrowser.open(address):
            screen.note("No browser could be opened: open that address in one.")
        return serve(app, listener, grace=1.0)
