"""LangChain's ChatOpenAI, unmodified: one answer, streams, and many at once."""

import sys

from langchain_core.messages import HumanMessage, SystemMessage
from langchain_openai import ChatOpenAI, OpenAI

url, model = sys.argv[1:]
fields = {"model": model, "base_url": f"{url}/v1", "api_key": "key", "seed": 1, "max_retries": 0}
chat = ChatOpenAI(max_tokens=12, temperature=0.5, **fields)
messages = [SystemMessage("be brief"), HumanMessage("the cat?")]

whole = chat.invoke(messages)
assert whole.usage_metadata["output_tokens"] <= 12
assert whole.response_metadata["finish_reason"] in ("stop", "length")
assert "".join(chunk.content for chunk in chat.stream(messages)) == whole.content
many = chat.batch([[HumanMessage(f"number {index}?")] for index in range(8)])
assert len(many) == 8
stop = whole.content[3:5]
assert chat.bind(stop=[stop]).invoke(messages).content == whole.content[: whole.content.index(stop)]

completion = OpenAI(max_tokens=8, **fields)
assert "".join(completion.stream("the cat")) == completion.invoke("the cat")
