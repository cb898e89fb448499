"""The client of Anthropic, unmodified."""

import sys

from anthropic import Anthropic, BadRequestError, NotFoundError

url, model = sys.argv[1:]
client = Anthropic(base_url=url, api_key="key", max_retries=0)
fields = {"model": model, "max_tokens": 20, "system": "be brief", "extra_body": {"seed": 1}}
chat = [{"role": "user", "content": "the cat?"}]

whole = client.messages.create(messages=chat, **fields)
assert whole.role == "assistant"
assert whole.usage.output_tokens <= 20
assert whole.stop_reason in ("end_turn", "max_tokens")
text = whole.content[0].text

with client.messages.stream(messages=chat, **fields) as stream:
    assert "".join(stream.text_stream) == text
    final = stream.get_final_message()
assert final.usage.output_tokens == whole.usage.output_tokens
assert final.stop_reason == whole.stop_reason

stopped = client.messages.create(messages=chat, stop_sequences=[text[4:6]], **fields)
assert (stopped.stop_reason, stopped.stop_sequence) == ("stop_sequence", text[4:6])
assert stopped.content[0].text == text[: text.index(text[4:6])]

for wrong, kind, told in (
    ({"extra_body": {"temperature": -1}}, BadRequestError, "invalid_request_error"),
    ({"model": "other"}, NotFoundError, "not_found_error"),
):
    found = None
    try:
        client.messages.create(messages=chat, **{**fields, **wrong})
    except kind as error:
        found = error.body["error"]["type"]
    assert found == told
