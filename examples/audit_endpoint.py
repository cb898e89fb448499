"""Does an OpenAI-compatible server sample from the distribution of the model that it serves?

    python examples/audit_endpoint.py --serve                      # try it on a little server started here
    python examples/audit_endpoint.py http://127.0.0.1:8000 MODEL  # MODEL: folder or hub id of what the server serves

The server must return token ids (vLLM: ``return_token_ids``), or logprobs with the tokens' texts.
"""

import argparse
import json
import tempfile
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer

from foretoken import Engine, SamplingParams
from foretoken.audit import AuditPlan, ReferenceModel, audit_model, make_worlds
from foretoken.audit.endpoint import EndpointSubject, prompts_of

PROMPTS = ["Once upon a time", "The history of the bicycle begins", "def fibonacci(n):\n", "Dear Sir or Madam,"]


def serve(world, verifier):
    """A completion server of a small world, on this machine alone; its address."""
    engine = Engine(world.target, world.drafter, verifier, 2)

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            self.answer({"data": [{"id": "tiny"}]})

        def do_POST(self):
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            seeds = range(body["seed"], body["seed"] + body["n"])
            options = {
                "temperature": body["temperature"],
                "top_p": body["top_p"],
                "max_new_tokens": body["max_tokens"],
            }
            params = [SamplingParams(seed=seed, **options) for seed in seeds]
            completions = engine.generate([body["prompt"]] * body["n"], params)
            self.answer({"choices": [{"text": "", "token_ids": one.token_ids} for one in completions]})

        def answer(self, data):
            payload = json.dumps(data).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(payload)))
            self.end_headers()
            self.wfile.write(payload)

        def log_message(self, *_):
            pass

    server = HTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    return f"http://127.0.0.1:{server.server_address[1]}"


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("url", nargs="?")
    parser.add_argument("target", nargs="?")
    parser.add_argument("--serve", action="store_true", help="audit a small server that this program starts")
    parser.add_argument("--verifier", default="token", help="with --serve; try token-unadjusted")
    parser.add_argument("--tv", type=float, default=0.1)
    arguments = parser.parse_args()
    plan = AuditPlan(tv=arguments.tv)
    if arguments.serve:
        with tempfile.TemporaryDirectory() as folder:
            (world,) = make_worlds(folder, [("stranger", SamplingParams())])
            subject = EndpointSubject(serve(world, arguments.verifier), samples_per_request=16, concurrency=1)
            reference = ReferenceModel(world.target)
            drafter = ReferenceModel(world.drafter)
            report = audit_model(subject, reference, world.prompts, SamplingParams(), plan, drafter_reference=drafter)
    else:
        from transformers import AutoModelForCausalLM, AutoTokenizer

        if not (arguments.url and arguments.target):
            parser.error("name the server's address and its model, or --serve")
        tokenizer = AutoTokenizer.from_pretrained(arguments.target)
        reference = ReferenceModel(AutoModelForCausalLM.from_pretrained(arguments.target))
        subject = EndpointSubject(arguments.url, tokenizer=tokenizer, end_token=tokenizer.eos_token_id)
        ends = tokenizer.eos_token_id
        report = audit_model(
            subject,
            reference,
            prompts_of(tokenizer, PROMPTS),
            SamplingParams(),
            plan,
            ends=() if ends is None else (ends,),
        )
    report.show()


if __name__ == "__main__":
    main()
