"""An engine that computes nothing: what it answers, and how long that took, follows from the request."""

import json
import os
import sys
import time
from pathlib import Path

import foretoken_protocol as protocol

SECONDS = {"plain": 1.0, "draft-model": 0.5, "prompt-lookup": 0.8}


def make(options):
    behaviour = options["options"].get("behaviour", "good")
    if behaviour == "no start":
        raise RuntimeError("no such model")
    if behaviour == "die at start":
        print("the cat is on the keyboard", file=sys.stderr)
        os._exit(7)
    log = options["options"].get("log")

    def run(request):
        mode, prompts, count = request["mode"], request["prompts"], request["num_tokens"]
        if log:
            with Path(log).open("a") as opened:
                opened.write(f"{mode} {count}\n")
        if behaviour == "can't":
            raise protocol.Unsupported("it has no such mode")
        if behaviour == "broken" and count > 16:
            raise ValueError("shapes differ")
        if behaviour == "die":
            os._exit(3)
        if behaviour == "slow":
            time.sleep(60)
        if behaviour == "chatty":
            print("loading 100%")
        if behaviour == "short":
            count -= 1
        texts = [[(prompt[0] + place) % 50 for place in range(count)] for prompt in prompts]
        if behaviour == "different" and mode != "plain":
            texts[0][count // 2] = 77
        result = {"tokens": texts, "seconds": SECONDS[mode] * count / 32, "rounds": count}
        if mode != "plain":
            result.update(rounds=count // 2, drafted=count * 2, accepted=count // 2)
            result.update(drafted_by_position=[count, count], accepted_by_position=[count // 2, count // 4])
            result["parts"] = {"drafter": 0.2 * count / 32, "target": 0.3 * count / 32}
        else:
            result["parts"] = {"target": 1.0 * count / 32}
        return result

    return {"fake": "1.0"}, run


if __name__ == "__main__":
    if json.loads(sys.argv[1])["options"].get("behaviour") == "babble":
        print("hello", flush=True)
    protocol.serve(make)
