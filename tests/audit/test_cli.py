from __future__ import annotations

import json
from pathlib import Path

import pytest
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast
from typer.testing import CliRunner

from audit import test_endpoint as servers
from byte_tokenizer import byte_tokenizer
from foretoken.audit import AuditError
from foretoken.cli.app import app
from foretoken.cli.audit_run import load_drafter_reference, read_prompts, special_tokens
from foretoken.errors import PromptError

SAMPLERS = """
from audit.samplers import PlainSampler, leaning

def right(world):
    return PlainSampler(world)

def wrong(world):
    return PlainSampler(world, leaning)

def broken(world):
    return lambda prompt, count, num_tokens, params, seed: [[99] * num_tokens] * count
"""


@pytest.fixture(autouse=True)
def samplers(tmp_path, monkeypatch):
    (tmp_path / "my_samplers.py").write_text(SAMPLERS)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))


def run(*arguments):
    return CliRunner().invoke(app, ["audit", *arguments])


def test_pass_is_status_0(tmp_path):
    result = run("callable", "my_samplers:right", "--tv", "0.35", "--html", "report.html", "-t", "1.0")
    assert result.exit_code == 0, result.output
    assert "PASS" in result.stdout
    assert "<svg" in (tmp_path / "report.html").read_text()


def test_quick_is_coarser_and_shorter():
    """And it is said beforehand how much is to be done, on the other stream."""
    result = run("callable", "my_samplers:right", "--quick", "--json", "-t", "1.0")
    plan = json.loads(result.stdout)["plan"]
    assert (result.exit_code, plan["tv"], plan["max_seconds"]) == (0, 0.3, 120.0)
    assert "samples, 120 seconds at most" in result.stderr
    result = run(
        "callable", "my_samplers:right", "--quick", "--tv", "0.4", "--max-samples", "50", "--json", "-t", "1.0"
    )
    plan = json.loads(result.stdout)["plan"]
    assert (plan["tv"], plan["max_seconds"]) == (0.4, 120.0)


def test_thorough_is_finer():
    """The fault is found long before all is drawn; the time is foretold from the first samples."""
    result = run("callable", "my_samplers:wrong", "--thorough", "--json", "-t", "1.0")
    plan = json.loads(result.stdout)["plan"]
    assert (result.exit_code, plan["tv"], plan["max_seconds"], plan["max_samples"]) == (1, 0.03, 7200.0, 1_000_000)
    assert "at the speed of the first ones, about" in " ".join(result.stderr.split())


@pytest.mark.usefixtures("without_picture")
def test_fail_is_status_1():
    result = run("callable", "my_samplers:wrong", "--json", "-t", "1.0")
    assert result.exit_code == 1
    assert json.loads(result.stdout)["verdict"] == "FAIL"


def test_inconclusive_is_status_3():
    result = run("callable", "my_samplers:right", "--max-samples", "50", "-t", "1.0")
    assert result.exit_code == 3
    assert "INCONCLUSIVE" in result.stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["callable", "my_samplers:broken"], "holds the token 99"),
        (["callable", "my_samplers:absent"], "can't be imported"),
        (["callable", "my_samplers"], "MODULE:FUNCTION"),
        (["callable", ":"], "MODULE:FUNCTION"),
        (["callable", "my_samplers:__name__"], "name a function"),
        (["callable", "builtins:len"], "len failed, given a world: TypeError"),
        (["callable", "builtins:id"], "return a function that samples"),
        (["callable", "my_samplers:right", "--audit-seed", "-1"], "seed=-1"),
        (["callable", "my_samplers:right", "--max-seconds", "nan"], "max_seconds"),
        (["callable", "my_samplers:right", "--level", "2"], "level=2.0"),
        (["callable", "my_samplers:right", "--quick", "--thorough"], "choose one of them"),
        (["callable", "my_samplers:right", "--html", "no/such/report.html"], "can't write"),
        (["callable", "my_samplers:right", "-t", "-1"], "temperature is -1.0"),
        (["transformers", "--mode", "magic"], "unknown mode 'magic'"),
        (["transformers", "--option", "x"], "NAME=VALUE"),
        (["engine", "--verifier", "magic"], "unknown verifier"),
        (["vllm", "--python", "/no/such/python"], "can't be started"),
        (["endpoint", "http://127.0.0.1:9", "--target", "a", "--reference", "b"], "one of --world"),
        (["endpoint", "http://127.0.0.1:9", "--world", "nowhere"], "holds no world"),
        (["endpoint", "http://127.0.0.1:9", "--model", "m"], "--tokenizer"),
        (["endpoint", "http://127.0.0.1:x"], "'http://127.0.0.1:x' is no web address (Port could not be cast"),
        (["endpoint", "http://127.0.0.1:99999"], "is no web address (Port out of range 0-65535)"),
        (["endpoint", "http://127.0.0.1:0"], "is no web address (port 0 is none)"),
        (["endpoint", "http://[::1"], "'http://[::1' is no web address (Invalid IPv6 URL)"),
        (["endpoint", "http://"], "names no host"),
        (["endpoint", "http://a b/v1"], "has spaces or control characters"),
        (["endpoint", "http://a\tb/v1"], "has spaces or control characters"),
        (["endpoint", "http://127.0.0.1:9/v1\x00"], "has spaces or control characters"),
        (["endpoint", "http://127.0.0.1:9/?key=1"], "has a query"),
        (["endpoint", "ftp://127.0.0.1"], "starts with http:// or https://"),
        (["endpoint", "http://127.0.0.1:9", "--model", "m", "--timeout", "1e400"], "timeout inf: give seconds above 0"),
        (["endpoint", "http://127.0.0.1:9", "--model", "m", "--timeout", "nan"], "timeout nan"),
        (["endpoint", "http://127.0.0.1:9", "--model", "m", "--timeout", "0"], "timeout 0"),
        (["endpoint", "http://127.0.0.1:9", "--model", "m", "--concurrency", "0"], "concurrency 0: give a number"),
        (["endpoint", "http://127.0.0.1:9", "--field", "a=" + "[" * 100_000], "a is nested more than 32 levels deep"),
        (["endpoint", "http://127.0.0.1:9", "--field", "a=" + "[" * 33 + "]" * 33], "a is nested more than 32 levels"),
        (["endpoint", "http://127.0.0.1:9", "--field", "a=b"], "the value as JSON"),
        (["endpoint", "http://127.0.0.1:9", "--model", "m", "--field", "seed=5"], "a seed of its own"),
        (["make-world", "my_samplers.py"], "'my_samplers.py' (it is a file): name another folder"),
        (["make-world", "my_samplers.py/below"], "(Not a directory): name another folder"),
        (["make-world", "here", "--seed", "-1"], "seed=-1: give 0 or more"),
        (["make-world", "here", "-k", "0"], "num_speculative_tokens=0"),
        (["engine", "--target", "no/such/model"], "no/such/model: there is no such folder"),
        (["transformers", "--mode", "plain", "--target", "/nope"], "/nope: there is no such folder"),
        (
            ["engine", "--drafter", "suffix"],
            "--drafter is suffix, and small worlds have their own: give --target MODEL",
        ),
        (["transformers", "--num-tokens", "8"], "--num-tokens is 8, and small worlds have their own"),
        (["vllm", "--prompts", "p.txt"], "--prompts is p.txt, and small worlds have their own"),
        (["engine", "--target", "m", "--mode", "lookup"], "--mode is lookup, which is for small worlds: with --target"),
    ],
)
def test_bad_input_is_status_2(arguments, message):
    result = run(*arguments)
    assert result.exit_code == 2, result.output
    assert message in " ".join(result.stderr.split())
    assert result.stdout == ""  # nothing half-reported


def test_a_world_of_many_draft_tokens_is_made_at_once(tmp_path):
    result = run("make-world", "here", "-k", str(10**9))
    assert result.exit_code == 0, result.output


def test_prompts_are_the_lines_of_a_file(tmp_path):
    file, tokenizer = tmp_path / "prompts.txt", byte_tokenizer()
    file.write_bytes("\ufeffthe cat\r\na\u2028b\x0cc\n\nend".encode())
    texts = [tokenizer.decode(ids, skip_special_tokens=True) for ids in read_prompts(tokenizer, file)]
    assert texts == ["the cat", "a\u2028b\x0cc", "end"]
    with pytest.raises(PromptError, match=r"can't be read: No such file or directory$"):
        read_prompts(tokenizer, tmp_path / "none.txt")


def test_a_world_is_made_served_and_audited(tmp_path):
    result = run("make-world", "here", "--kind", "stranger")
    assert result.exit_code == 0
    (folder,) = (tmp_path / "here").iterdir()
    from foretoken.audit import load_world

    with servers.serving(servers.Server(load_world(folder))) as url:
        result = run("endpoint", url, "--world", str(folder), "--tv", "0.35", "--samples-per-request", "256")
        assert result.exit_code == 0, result.output
        result = run("endpoint", url, "--tokenizer", str(folder / "target"), "--prompts", "none.txt")
        assert result.exit_code == 2
        (tmp_path / "prompts.txt").write_text("a b c a b\nc d e f\n")
        options = ["--tokenizer", str(folder / "target"), "--prompts", "prompts.txt", "--samples-per-request", "64"]
        result = run("endpoint", url, *options, "--tv", "0.35", "--num-tokens", "16")
        assert result.exit_code == 0, result.output


def test_two_servers_that_name_tokens_by_their_text(tmp_path):
    from foretoken.audit import load_world

    assert run("make-world", "here").exit_code == 0
    (folder,) = (tmp_path / "here").iterdir()
    world = load_world(folder)
    (tmp_path / "prompts.txt").write_text("a b c a b\n")
    options = ["--tokenizer", world.target_path, "--prompts", "prompts.txt", "--samples-per-request", "64"]
    with (
        servers.serving(servers.Server(world, ids=False)) as url,
        servers.serving(servers.Server(world, ids=False)) as reference,
    ):
        result = run("endpoint", url, "--reference", reference, *options, "--max-samples", "40", "--num-tokens", "2")
        assert result.exit_code == 3, result.output  # the budget is small; it would be 2 if tokens could not be told


def test_a_world_under_another_claim_says_so(tmp_path):
    from foretoken.audit import load_world

    assert run("make-world", "here").exit_code == 0
    (folder,) = (tmp_path / "here").iterdir()
    with servers.serving(servers.Server(load_world(folder))) as url:
        options = ["--samples-per-request", "256", "--max-samples", "50", "--json", "-t", "0.8"]
        report = json.loads(run("endpoint", url, "--world", str(folder), *options).stdout)
    assert report["claim"].endswith("cousin · temperature 0.8")
    assert {finding["scope"] for finding in report["findings"]} >= {"cousin · temperature 0.8"}


def test_a_drafter_that_is_no_language_model_by_itself(tmp_path, capsys):
    """It may be any folder: its distribution makes an audit sharper, and is not needed."""
    assert load_drafter_reference(str(tmp_path)) is None
    said = " ".join(capsys.readouterr().err.split())
    assert f"goes on without the drafter's distribution, and so less sharply: {tmp_path} can't be loaded" in said
    result = run("make-world", "here")
    (folder,) = (tmp_path / "here").iterdir()
    assert result.exit_code == 0
    for file in (folder / "drafter").glob("*token*"):
        file.unlink()
    reference = load_drafter_reference(str(folder / "drafter"))
    assert reference is not None
    assert reference.vocab_size == 8


def test_an_end_token_that_is_not_marked_as_special(tmp_path):
    """The tokenizer names it all the same."""
    ids = Tokenizer(models.WordLevel({"a": 0, "</s>": 1}, unk_token="a"))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=ids)
    tokenizer._tokenizer.add_tokens(["</s>"])
    assert special_tokens(tokenizer) == ()
    tokenizer.eos_token = "</s>"
    assert 1 in special_tokens(tokenizer)


def test_a_proposer_that_is_none_is_refused_before_vllm_starts():
    result = CliRunner().invoke(app, ["audit", "vllm", "--proposer", "LookUp"])
    assert result.exit_code != 0
    assert "'LookUp'" in result.stderr
    assert "NgramStorage" in result.stderr


def test_a_proposer_of_vllm_gets_a_corpus_of_the_world(monkeypatch):
    given = []

    def starts(engine, target, drafter, mode, k, **how):
        given.append((engine, mode, how, Path(how["options"]["drafter"].partition(":")[2]).is_file()))
        raise AuditError("it is not there")

    monkeypatch.setattr("foretoken.audit.external.external_subject", starts)
    result = CliRunner().invoke(
        app, ["audit", "vllm", "--proposer", "Retrieval", "--batch", "16", "--option", "seed=3"]
    )
    assert "it is not there" in result.stderr
    ((engine, mode, how, indexed),) = given
    assert (engine, mode, how["batch"], indexed) == ("vllm-cpu", "prompt-lookup", 16, True)
    assert how["options"]["proposer"] == "Retrieval"
    assert how["options"]["seed"] == 3


def test_what_drafts_inside_vllm_is_said_once():
    setting = '{"method": "ngram", "num_speculative_tokens": 2}'
    result = CliRunner().invoke(app, ["audit", "vllm", "--proposer", "Lookup", "--speculative-config", setting])
    assert result.exit_code == 2
    assert "give --proposer or --speculative-config" in result.stderr
