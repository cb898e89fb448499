"""A service in miniature: a line in, an output out, over TCP; all clients share one engine and are decoded together.

python examples/asyncio_service.py                        # serves three clients of its own, then ends
python examples/asyncio_service.py --port 8080            # serves until Ctrl-C; try: nc 127.0.0.1 8080
"""

import argparse
import asyncio
from contextlib import aclosing

import foretoken
from foretoken import AsyncEngine, Engine, SamplingParams
from foretoken.errors import ForetokenError


async def answer(engine: AsyncEngine, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Stream the output for one line. A client that hangs up ends its request, and no other one."""
    prompt = (await reader.readline()).decode().strip()
    try:
        async with aclosing(engine.stream(prompt, SamplingParams(temperature=0.8, max_new_tokens=32))) as events:
            async for event in events:
                writer.write(event.text.encode())
                await writer.drain()
    except ForetokenError as error:
        writer.write(f"error: {error}".encode())
    except ConnectionError:
        return
    writer.close()


async def ask(port: int, prompt: str) -> None:
    """One client."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(f"{prompt}\n".encode())
    print(f"{prompt!r} -> {(await reader.read()).decode()!r}")
    writer.close()


async def main() -> None:
    """Serve."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--port", type=int, help="serve on this port until Ctrl-C")
    port = parser.parse_args().port
    target, drafter = foretoken.tiny_pair()
    async with AsyncEngine(Engine(target, drafter, max_batch_size=8)) as engine:
        server = await asyncio.start_server(lambda r, w: answer(engine, r, w), "127.0.0.1", port or 0)
        async with server:
            if port:
                await server.serve_forever()
            prompts = ("def add(a, b):", "To be, or not to be", "Three spiders have")
            await asyncio.gather(*(ask(server.sockets[0].getsockname()[1], prompt) for prompt in prompts))


asyncio.run(main())
