"""httpx: bodies in parts, streams that are left, and connections that are kept."""

import json
import sys

import httpx

url, model = sys.argv[1:]
body = {"model": model, "prompt": "the cat", "max_tokens": 300, "ignore_eos": True, "seed": 1}

with httpx.Client(base_url=url) as client:
    for _ in range(3):  # over one connection
        assert client.get("/health").json() == {"status": "ok"}
    data = json.dumps({**body, "max_tokens": 5}).encode()
    parts = (data[at : at + 7] for at in range(0, len(data), 7))  # chunked
    answer = client.post("/v1/completions", content=parts, headers={"content-type": "application/json"})
    assert answer.json()["usage"]["completion_tokens"] == 5
    with client.stream("POST", "/v1/completions", json={**body, "stream": True}) as response:
        lines = response.iter_lines()
        assert next(lines).startswith("data: {")
    # Left in the middle: the row is free again.
    while 'vllm:num_requests_running{engine="0",model_name="tiny"} 0.0' not in client.get("/metrics").text:
        pass
    head = client.post("/v1/completions", content=b"{", headers={"content-type": "application/json"})
    assert head.status_code == 400
    assert head.json()["error"]["type"] == "invalid_request_error"
