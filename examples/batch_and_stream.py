"""Several prompts in one batch, each with its own parameters; then one output as it comes.

python examples/batch_and_stream.py
"""

import foretoken
from foretoken import Engine, SamplingParams

target, drafter = foretoken.tiny_pair()
engine = Engine(target, drafter, max_batch_size=8)

prompts = ["def add(a, b):", "To be, or not to be", [{"role": "user", "content": "What is 3 times 4?"}]]
params = [SamplingParams(temperature=temperature, seed=7, max_new_tokens=24) for temperature in (0, 0.7, 1)]
for prompt, completion in zip(prompts, engine.generate(prompts, params), strict=True):
    print(f"{prompt!r} -> {completion.text!r}")

for event in engine.stream("def fibonacci(n):", SamplingParams(temperature=0, max_new_tokens=40)):
    print(event.text, end="", flush=True)  # the tokens of one round
print()
