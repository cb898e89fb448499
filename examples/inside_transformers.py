"""Speculation inside transformers' `generate`: a batch, a stop string, and a stream.

python examples/inside_transformers.py
"""

from transformers import AutoModelForCausalLM, AutoTokenizer, TextStreamer

import foretoken

path = foretoken.tiny_pair_path()  # or any causal or encoder-decoder model
tokenizer = AutoTokenizer.from_pretrained(path / "target", padding_side="left")
tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
model = AutoModelForCausalLM.from_pretrained(path / "target")

speculate = foretoken.custom_generate(drafter=path / "drafter", seed=1, stop_strings=["\n\n"], tokenizer=tokenizer)
inputs = tokenizer(["def add(a, b):", "To be, or not"], return_tensors="pt", padding=True)
output = model.generate(**inputs, max_new_tokens=32, do_sample=True, top_p=0.9, custom_generate=speculate)
print(tokenizer.batch_decode(output, skip_special_tokens=True))

stream = foretoken.custom_generate(drafter="prompt-lookup", streamer=TextStreamer(tokenizer))
inputs = tokenizer("def fibonacci(n):", return_tensors="pt")
model.generate(**inputs, max_new_tokens=32, do_sample=False, custom_generate=stream)
