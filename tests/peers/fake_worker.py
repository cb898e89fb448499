"""An engine that computes nothing: what it answers, and how long that took, follows from the request."""

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import foretoken_protocol as protocol

SECONDS = {"plain": 1.0, "draft-model": 0.5, "prompt-lookup": 0.8}
SLEEP = [sys.executable, "-c", "import time; time.sleep(600)"]
DEAF = [sys.executable, "-c", "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(600)"]


def hang():
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    while True:
        time.sleep(600)


def start_children():
    """One in the worker's session, one that ignores SIGTERM, one in a session of its own; and a temporary file."""
    children = [subprocess.Popen(SLEEP), subprocess.Popen(DEAF), subprocess.Popen(SLEEP, start_new_session=True)]
    with tempfile.NamedTemporaryFile(delete=False) as left:
        left.write(b"left behind")
    return {"children": ",".join(str(child.pid) for child in children), "file": left.name}


def make(options):
    behaviour = options["options"].get("behaviour", "good")
    versions = {"fake": "1.0"}
    if behaviour == "no start":
        raise RuntimeError("no such model")
    if behaviour == "die at start":
        print("out of disk", file=sys.stderr)
        os._exit(7)
    if behaviour.startswith("children"):
        versions.update(start_children())
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
        if behaviour == "die" or behaviour == f"die in {mode}":
            os._exit(3)
        if behaviour == "children, die":
            os.kill(os.getpid(), signal.SIGKILL)
        if behaviour == "late":
            # The answer comes as soon as somebody has given it up.
            Path(log).with_suffix(".asked").touch()
            while not Path(log).with_suffix(".now").exists():
                time.sleep(0.01)
        if behaviour in ("hang", "children, hang"):
            hang()
        if behaviour == "chatty":
            print("loading 100%")
        if behaviour == "rubbish":
            return []
        if behaviour == "no tokens":
            return {"seconds": 1.0}
        if behaviour == "short":
            count -= 1
        outputs = [[(prompt[0] + position) % 50 for position in range(count)] for prompt in prompts]
        if behaviour == "different" and mode != "plain":
            outputs[0][count // 2] = 77
        if behaviour == "sampled":
            outputs = [[seed % 8] * count for seed in request["seeds"]]
        ends = {}
        if behaviour == "ending" and request["ends"]:
            outputs = [output[:-1] for output in outputs]
            ends["end_tokens"] = [output[-1] for output in outputs]
        result = {**ends, "tokens": outputs, "seconds": SECONDS[mode] * count / 32, "rounds": count}
        if mode != "plain":
            result.update(rounds=count // 2, drafted=count * 2, accepted=count // 2)
            result.update(drafted_by_position=[count, count], accepted_by_position=[count // 2, count // 4])
            result["parts"] = {"drafter": 0.2 * count / 32, "target": 0.3 * count / 32}
        else:
            result["parts"] = {"target": 1.0 * count / 32}
        return result

    return versions, run


if __name__ == "__main__":
    if json.loads(sys.argv[1])["options"].get("behaviour") == "babble":
        print("hello", flush=True)
    protocol.serve(make)
