"""One request, sampled, with what speculation did.

python examples/quickstart.py
"""

import foretoken
from foretoken import Engine, SamplingParams

target, drafter = foretoken.tiny_pair()  # the pair in the package; or paths, hub ids, loaded transformers models
engine = Engine(target, drafter)

completion = engine.generate("def add(a, b):", SamplingParams(temperature=0.8, top_p=0.95, seed=1, max_new_tokens=60))
print(completion.text)

stats = completion.stats
print(f"{stats.emitted} tokens in {stats.rounds} target passes: {stats.mean_acceptance_length:.2f} tokens a pass")
print(f"{stats.accepted} of {stats.drafted} draft tokens accepted; ended by {completion.finish_reason}")
