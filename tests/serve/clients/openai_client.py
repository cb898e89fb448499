"""The client of OpenAI, unmodified, with asyncio: completions, chat and responses, many at once."""

import asyncio
import sys

from openai import APITimeoutError, AsyncOpenAI

url, model = sys.argv[1:]


async def chat(client: AsyncOpenAI, seed: int) -> None:
    messages = [{"role": "user", "content": f"number {seed}?"}]
    fields = {"model": model, "messages": messages, "seed": seed, "max_tokens": 12}
    whole = await client.chat.completions.create(**fields)
    text = ""
    async for chunk in await client.chat.completions.create(**fields, stream=True):
        text += chunk.choices[0].delta.content or ""
    assert text == whole.choices[0].message.content
    raw = await client.chat.completions.with_raw_response.create(**fields)
    assert len(raw.headers["x-request-id"]) == 32


async def main() -> None:
    async with AsyncOpenAI(base_url=f"{url}/v1", api_key="key", max_retries=0) as client:
        await asyncio.gather(*(chat(client, seed) for seed in range(16)))
        response = await client.responses.create(model=model, input="the cat?", max_output_tokens=5)
        assert response.usage.output_tokens <= 5
        async with client.responses.stream(model=model, input="the cat?", max_output_tokens=5) as stream:
            kinds = [event.type async for event in stream]
        assert kinds[0] == "response.created"
        scored = await client.completions.create(model=model, prompt="the cat", max_tokens=1, logprobs=2)
        assert len(scored.choices[0].logprobs.tokens) == 1
        try:
            await client.with_options(timeout=1e-6).models.list()
        except APITimeoutError:
            pass
        else:
            raise AssertionError


asyncio.run(main())
