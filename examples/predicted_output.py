"""A text is changed: most of the output is known before it is written, and drafts are copied from it.

python examples/predicted_output.py
"""

import foretoken
from foretoken import Engine, SamplingParams

target, _ = foretoken.tiny_pair()
engine = Engine(target)
params = SamplingParams(temperature=0, max_new_tokens=40)

prompt = "def area(width, height):\n"
written = engine.generate(prompt, params)  # stands for the text before the change
prediction = written.text.replace("width", "length", 1)

again = engine.generate(prompt, params, prediction=prediction)
assert again.token_ids == written.token_ids  # whatever is predicted, the output is the target's own
stats = again.stats
print(f"{stats.accepted_prediction} of {stats.drafted_prediction} predicted tokens accepted")
print(f"{stats.emitted} tokens in {stats.rounds} target passes, {written.stats.rounds} without the prediction")
