"""`foretoken generate`, in this process."""

from __future__ import annotations

import io
import json
import re
import shutil
import sys
import warnings
from statistics import median

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

from foretoken.cli import setup
from foretoken.cli.json_output import print_json
from foretoken.cli.options import SamplingOptions
from foretoken.cli.screen import Screen
from foretoken.models.wrapping import SlowModelWarning
from foretoken.sampling import SamplingParams

ESCAPE = "\x1b"


def test_the_text_alone_goes_to_standard_output(call):
    # A fixed length: beside so small a target no model's call pays.
    given = ("generate", "hello", "--seed", 1, "-n", 20, "-k", 3)
    as_json = json.loads(call(*given, "--json").stdout)
    result = call(*given)
    assert result.exit_code == 0, result.stderr
    assert result.stdout.rstrip("\n") == as_json["text"].rstrip("\n")
    assert ESCAPE not in result.stderr
    assert re.search(
        r"20 tokens · .* tokens/s · mean acceptance length .* · acceptance rate .*% \(by position", result.stderr
    )


def test_json_is_complete_and_alone(call):
    result = call("generate", "hello", "--seed", 1, "-n", 12, "--json", "--logprobs", 2, "--trace")
    answer = json.loads(result.stdout)
    assert result.stderr == ""
    assert len(answer["token_ids"]) == len(answer["logprobs"]) == answer["stats"]["emitted"] == 12
    assert all(len(entry["top"]) == 2 for entry in answer["logprobs"])
    assert [entry["token_id"] for entry in answer["logprobs"]] == answer["token_ids"]
    assert [entry["token"] for entry in answer["logprobs"]] == answer["tokens"]
    assert [token["token_id"] for one in answer["rounds"] for token in one["emitted"]] == answer["token_ids"]
    assert sum(len(one["drafted"]) for one in answer["rounds"]) == answer["stats"]["drafted"]
    assert answer["finish_reason"] == "length"


def test_json_says_what_it_was_made_with(call, models):
    given = ["hello", "-n", 5, "--seed", 7, "--top-k", 9, "--logit-bias", "70=-inf", "--json"]
    answer = json.loads(call("generate", *given, "--drafter", "prompt-lookup", "-k", 2).stdout)
    assert (answer["model"], answer["drafter"], answer["verifier"]) == (models.target, "prompt-lookup", "block")
    assert (answer["num_speculative_tokens"], answer["seed"]) == (2, 7)
    settings = answer["settings"]
    assert (settings["top_k"], settings["max_new_tokens"], settings["logit_bias"]) == (9, 5, {"70": "-inf"})
    assert len(answer["tokens"]) == len(answer["token_ids"])


def test_json_holds_what_standard_output_has_no_characters_for(monkeypatch):
    stream = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    monkeypatch.setattr(sys, "stdout", stream)
    print_json(Screen(), {"text": "grüße"})
    assert json.loads(stream.buffer.getvalue()) == {"text": "grüße"}


def test_where_nothing_is_drafted_there_is_no_acceptance_rate(call):
    answer = json.loads(call("generate", "hello", "-n", 4, "--drafter", "none", "--json").stdout)
    assert answer["stats"]["acceptance_rate"] is None
    assert answer["seed"] is None


def test_log_probabilities_are_shown(call):
    given = ["hello", "-n", 5, "--seed", 1, "--logprobs", 2]
    shown = call("generate", *given)
    answer = json.loads(call("generate", *given, "--json").stdout)
    lines = [line for line in shown.stderr.splitlines() if re.match(r" *\d+ +\S+ +-\d", line)]
    assert len(lines) == 5
    for line, entry in zip(lines, answer["logprobs"], strict=True):
        assert f" {entry['logprob']:.3f} " in line


def test_greedy_is_what_transformers_writes(call, models):
    tokenizer, model = (kind.from_pretrained(models.target) for kind in (AutoTokenizer, AutoModelForCausalLM))
    inputs = tokenizer("hello", return_tensors="pt")
    expected = model.generate(**inputs, max_new_tokens=20, do_sample=False)[0, inputs.input_ids.shape[1] :].tolist()
    answer = json.loads(call("generate", "hello", "--raw", "-t", 0, "-n", 20, "--json").stdout)
    assert answer["token_ids"] == expected


def test_a_prompt_is_a_chat_message_where_there_is_a_template(call, models):
    def ids(*arguments):
        return json.loads(call("generate", *arguments, "-t", 0, "-n", 8, "--json").stdout)["token_ids"]

    wrapped = "<user>hello<end><assistant>"
    assert ids("hello") == ids("hello", "--chat") == ids(wrapped, "--raw")
    assert ids("hello", "--raw") != ids("hello")
    assert ids("hello", "--target", models.untemplated) == ids("hello", "--raw")


def test_prompts_from_files_and_standard_input(call, tmp_path):
    file = tmp_path / "prompt.txt"
    file.write_text("grüße\n", encoding="utf-8")
    outputs = {
        call("generate", *arguments, "--raw", "-t", 0, "-n", 8, stdin="grüße\n").stdout
        for arguments in (["grüße\n"], ["-"], ["--prompt-file", file])
    }
    assert len(outputs) == 1
    assert outputs.pop().strip()


def test_a_byte_order_mark_is_no_part_of_a_prompt(call, tmp_path):
    file = tmp_path / "prompt.txt"
    file.write_text("hello", encoding="utf-8-sig")
    given = ("--raw", "-t", 0, "-n", 8)
    expected = call("generate", "hello", *given).stdout
    assert call("generate", "--prompt-file", file, *given).stdout == expected
    assert call("generate", "-", *given, stdin=file.read_bytes()).stdout == expected


def test_a_seed_decides_the_text(call):
    first, again, other = (call("generate", "hello", "-n", 20, "--seed", seed).stdout for seed in (1, 1, 2))
    assert first == again != other


def test_defaults_are_those_of_the_library():
    assert SamplingOptions().params() == SamplingParams()


@pytest.fixture
def wanting(models, tmp_path):
    """The target, whose makers want it to be sampled in a way of their own."""
    folder = shutil.copytree(models.target, tmp_path / "wanting")
    file = folder / "generation_config.json"
    wanted = {"temperature": 0.0, "top_k": 7, "top_p": 0.9}
    file.write_text(json.dumps(json.loads(file.read_text()) | wanted), encoding="utf-8")
    return str(folder)


def settings_of(result):
    assert result.exit_code == 0, result.stderr
    return [json.loads(line)["settings"] for line in result.stdout.splitlines()]


def test_what_is_not_given_is_as_the_model_wants_it(call, wanting):
    common = ("generate", "--target", wanting, "--drafter", "none", "-n", 4, "--json")
    (settings,) = settings_of(call(*common, "hello"))
    assert (settings["temperature"], settings["top_k"], settings["top_p"], settings["min_p"]) == (0.0, 7, 0.9, 0.0)
    (settings,) = settings_of(call(*common, "hello", "--temperature", 1, "--top-k", 0))
    assert (settings["temperature"], settings["top_k"], settings["top_p"]) == (1.0, 0, 0.9)


def test_lines_of_a_file_win_over_what_the_model_wants(call, wanting, tmp_path):
    file = tmp_path / "prompts.jsonl"
    file.write_text('"hello"\n{"prompt": "hello", "temperature": 0.5, "top_k": 0}\n', encoding="utf-8")
    given = ("generate", "--target", wanting, "--drafter", "none", "-n", 4, "--prompt-file", file)
    found = [(one["temperature"], one["top_k"], one["top_p"]) for one in settings_of(call(*given))]
    assert found == [(0.0, 7, 0.9), (0.5, 0, 0.9)]
    found = [(one["temperature"], one["top_k"], one["top_p"]) for one in settings_of(call(*given, "-t", 1))]
    assert found == [(1.0, 7, 0.9), (0.5, 0, 0.9)]


def test_a_chat_is_sampled_as_the_model_wants_it(call, wanting):
    lines = ["hello", "/temperature", "/top_k 3", "/temperature 0.5", "hello", "/temperature none", "/set"]
    given = ("chat", "--target", wanting, "--drafter", "none", "-n", 4, "--json")
    result = call(*given, stdin="".join(f"{line}\n" for line in lines))
    found = [(one["temperature"], one["top_k"], one["top_p"]) for one in settings_of(result)]
    assert found == [(0.0, 7, 0.9), (0.5, 3, 0.9)]
    assert "temperature is 0.0 (the model's)" in result.stderr
    shown = result.stderr[result.stderr.index("setting") :]
    assert re.search(r"temperature +0\.0 \(the model's\)", shown)
    assert re.search(r"top_k +3\n|top_k +3 ", shown)
    assert re.search(r"min_p +0\.0", shown)


def test_the_length_has_the_names_that_others_give_it(call):
    outputs = {
        call("generate", "hello", "--seed", 1, option, 7, "--json").stdout.partition('"stats"')[0]
        for option in ("-n", "--max-new-tokens", "--max-tokens")
    }
    assert len(outputs) == 1


def test_every_sampling_parameter_can_be_given(call):
    result = call(
        "generate", "hello", "--json", "-n", 9, "--temperature", 0.7, "--top-k", 40, "--top-p", 0.9, "--min-p", 0.01,
        "--repetition-penalty", 1.1, "--presence-penalty", 0.1, "--frequency-penalty", 0.1, "--logit-bias", "70=-inf",
        "--logit-bias", "71=1.5", "--seed", 3, "--min-new-tokens", 2, "--stop-token-id", 72, "--stop", "zzz",
        "--ignore-eos", "--logprobs", 0,
    )  # fmt: skip
    assert result.exit_code == 0, result.stderr
    assert 70 not in json.loads(result.stdout)["token_ids"]


@pytest.mark.parametrize("drafter", ["none", "prompt-lookup", "ngram-storage", "ngram-storage-one-level"])
def test_drafters_by_name(call, drafter):
    answers = [
        json.loads(call("generate", "hello hello", "-t", 0, "-n", 16, "--json", *more).stdout)["token_ids"]
        for more in (["--drafter", drafter], [])
    ]
    assert answers[0] == answers[1]


@pytest.mark.parametrize("tree", ["static", "dynamic"])
def test_trees(call, tree):
    arguments = ["hello hello", "-t", 0, "-n", 16, "-k", 6, "--json"]
    chains, trees = (json.loads(call("generate", *arguments, *more).stdout) for more in ([], ["--tree", tree]))
    assert trees["token_ids"] == chains["token_ids"]
    assert trees["stats"]["rounds"] <= chains["stats"]["rounds"]
    assert call("generate", "hello", "--tree", tree, "-n", 8, "-k", 6, "--probs").exit_code == 0
    refused = call("generate", "hello", "--tree", "round")
    assert refused.exit_code == 2
    assert "none, static, dynamic" in refused.stderr


def test_another_target_drafts_by_lookup(models, call, monkeypatch):
    from foretoken.cli.options import ModelOptions
    from foretoken.cli.screen import Screen
    from foretoken.cli.setup import load_engine

    assert load_engine(ModelOptions(target=models.target), Screen()).drafter.name == "lookup"


def test_colours_say_where_tokens_came_from(models, call):
    drafted = "--drafter", models.drafter, "-k", 3
    coloured = call("generate", "hello", "--seed", 1, "-n", 40, *drafted, FORCE_COLOR="1").stdout
    assert {"\x1b[32m", "\x1b[33m"} <= set(re.findall(r"\x1b\[\d+m", coloured))


@pytest.mark.parametrize("arguments", [[], ["--trace"], ["--compare"]])
def test_no_color_means_no_escape_codes(call, arguments, monkeypatch):
    monkeypatch.setattr("foretoken.cli.compare.MAX_SECONDS", 0.0)
    by_environment = call("generate", "hello", "-n", 8, *arguments, FORCE_COLOR="1", NO_COLOR="1")
    by_option = call("generate", "hello", "-n", 8, *arguments, "--no-color", FORCE_COLOR="1")
    for result in (by_environment, by_option):
        assert result.exit_code == 0
        assert not re.search(r"\x1b\[[\d;]*m", result.stdout + result.stderr)


def test_trace_has_a_line_a_round(call):
    arguments = ["hello", "--seed", 1, "-n", 30, "-k", 3]
    answer = json.loads(call("generate", *arguments, "--trace", "--json").stdout)
    result = call("generate", *arguments, "--probs")
    lines = [line for line in result.stderr.splitlines() if re.match(r" +\d+  \d/\d", line)]
    assert len(lines) == answer["stats"]["rounds"]
    for line, one in zip(lines, answer["rounds"], strict=True):
        accepted = sum(token["accepted"] for token in one["drafted"])
        assert f" {accepted}/{len(one['drafted'])} " in line
        assert len(re.findall(r"\[-.+?-\]", line)) == len(one["drafted"]) - accepted
        assert line.count("|") >= len(one["drafted"])
    # The text is still there, and alone.
    assert result.stdout.rstrip("\n") == answer["text"].rstrip("\n")


def test_trace_in_colour_strikes_rejected_tokens_through(call):
    traced = call("generate", "hello", "--seed", 1, "-n", 30, "--trace", FORCE_COLOR="1").stderr
    assert re.search(r"\x1b\[[\d;]*9;31m", traced)


@pytest.mark.grid
@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["-t", 0], "equal, token by token (greedy decoding)"),
        (["--verifier", "coupled", "--seed", 5], "equal, token by token ('coupled' verifier, seed 5)"),
        ([], "drawn from the target's distribution"),
        (["--verifier", "token-unadjusted"], "is lossy"),
    ],
)
def test_compare(call, arguments, said, monkeypatch):
    how = "in turns"
    if arguments != ["-t", 0]:
        how = "one run of each"
        monkeypatch.setattr("foretoken.cli.compare.MAX_SECONDS", 0.0)
    result = call("generate", "hello", "-n", 16, "--compare", *arguments)
    assert result.exit_code == 0, result.stderr
    assert said in " ".join(result.stderr.split())
    for row in ("tokens/s", "speed-up", "mean acceptance length", "acceptance rate"):
        assert row in result.stderr
    answer = json.loads(call("generate", "hello", "-n", 16, "--compare", "--json", *arguments).stdout)
    assert said in answer["compare"]["relation"]
    compared = answer["compare"]
    assert compared["runs"] == len(compared["tokens_per_second"]) == len(compared["plain_tokens_per_second"])
    speeds = [median(compared[name]) for name in ("tokens_per_second", "plain_tokens_per_second")]
    assert compared["speed_up"] == speeds[0] / speeds[1]
    assert f"{how}, after a warm-up" in compared["measured"]
    assert compared["measured"] in " ".join(result.stderr.split())
    if "equal" in said:
        assert answer["compare"]["texts_equal"]
        assert answer["compare"]["plain"]["text"] == answer["text"]


def test_stop_strings_end_the_text(call):
    full = json.loads(call("generate", "hello", "-t", 0, "-n", 30, "--json").stdout)
    stop = full["text"].rstrip("\ufffd")[-3:]
    cut = json.loads(call("generate", "hello", "-t", 0, "-n", 30, "--json", "--stop", stop).stdout)
    assert cut["finish_reason"] == "stop"
    assert cut["text"] == full["text"][: full["text"].index(stop)]


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["hello", "--target", "/no/such/folder"], ["/no/such/folder"]),
        (["hello", "--drafter", "telepathy"], ["telepathy", "prompt-lookup", "ngram-storage"]),
        (["hello", "--drafter", ""], ["unknown drafter ''", "prompt-lookup"]),
        (["hello", "--target", ""], ["name is ''"]),
        (["hello", "--device", "toaster"], ["toaster", "cpu"]),
        (["hello", "--stop-token-id", "259"], ["stop_token_ids", "259", "258"]),
        (["hello", "--verifier", "typical:0.1,nan"], ["nan", "finite"]),
        (["a\ud800"], ["surrogate", "character 1"]),
        (["hello", "--drafter", "draft-model"], ["draft-model", "shipped"]),
        (["hello", "--verifier", "trust"], ["trust", "token", "coupled"]),
        (["hello", "--temperature", "-1"], ["temperature", "-1", "0"]),
        (["hello", "--top-p", "1.5"], ["top_p", "1.5"]),
        (["hello", "-k", "-3"], ["num_speculative_tokens", "-3"]),
        (["hello", "-n", "0"], ["max_new_tokens", "0"]),
        (["hello", "--logit-bias", "x"], ["logit bias", "'x'", "42=-1.5"]),
        (["hello", "--dtype", "int3"], ["int3", "bfloat16"]),
        (["hello", "--runner", "legs"], ["'legs'", "'native'", "'hf'"]),
        (["hello", "--quantize", "int3"], ["'int3'", "'int8'"]),
        (["hello", "--target", "NATIVE", "--quantize", "w8a8", "--eager"], ["w8a8", "eager is True", "'int8'"]),
        (["hello", "--quantize-drafter", "int8", "--drafter", "prompt-lookup"], ["int8", "prompt-lookup", "no model"]),
        (["hello", "--quantize-drafter", "int8", "--drafter", "eagle3:/no/head"], ["/no/head"]),
        (["hello", "--quantize", "int4"], ["can't be quantised to int4", "leave quantize out"]),
        ([""], ["empty"]),
        ([" \n", "--chat"], ["empty"]),
        ([], ["no prompt", "--prompt-file"]),
        (["hello", "--prompt-file", "x"], ["two prompts"]),
        (["--prompt-file", "/no/such/file"], ["/no/such/file"]),
        (["x" * 2000], ["512"]),
    ],
)
def test_bad_input_is_one_readable_line_and_status_2(call, models, arguments, named):
    result = call("generate", *(models.native if word == "NATIVE" else word for word in arguments))
    assert result.exit_code == 2
    assert result.stdout == ""
    assert "Traceback" not in result.stderr
    assert result.stderr.startswith("error: ")
    for part in named:
        assert part in result.stderr


@pytest.mark.grid
@pytest.mark.parametrize("quantize", ["int8", "int4"])
def test_quantised_models_say_so(quantize, call, models):
    pair = ["--target", models.native, "--drafter", models.native]
    result = call("generate", "hello", *pair, "--quantize", quantize, "-n", "4", "--quantize-drafter", quantize)
    assert result.exit_code == 0
    assert f"rounded to {quantize}: the output follows the distribution of the rounded target" in " ".join(
        result.stderr.split()
    )
    assert "rounded" not in call("generate", "hello", *pair, "-n", "4", "--runner", "hf").stderr


def test_a_drafter_of_another_vocabulary_is_refused(call, models):
    result = call("generate", "hello", "--drafter", models.foreign, "--vocab", "same")
    assert result.exit_code == 2
    assert "vocabular" in result.stderr
    assert models.foreign in result.stderr


@pytest.mark.grid
@pytest.mark.parametrize("vocab", ["auto", "intersection", "text"])
def test_a_drafter_of_another_vocabulary_is_told_of(call, models, vocab):
    options = ["--drafter", models.foreign, "-n", "8", "-t", "0", "--ignore-eos", "--vocab", vocab]
    result = call("generate", "hello", *options)
    assert result.exit_code == 0, result.stderr
    said = " ".join(result.stderr.split())
    assert f"drafter {models.foreign} has another vocabulary than {models.target}" in said
    assert ("vocab=text" if vocab == "text" else "vocab=intersection") in said
    assert result.stdout == call("generate", "hello", "-n", "8", "-t", "0", "--ignore-eos").stdout


def test_a_wrong_way_to_use_a_vocabulary_is_named(call, models):
    result = call("generate", "hello", "--vocab", "both")
    assert result.exit_code == 2
    assert "vocab is 'both': use one of 'auto', 'same', 'intersection', 'text'" in " ".join(result.stderr.split())


def test_a_file_that_is_not_utf8_is_refused(call, tmp_path):
    file = tmp_path / "latin1.txt"
    file.write_bytes("grün".encode("latin-1"))
    by_file, by_stdin = call("generate", "--prompt-file", file), call("generate", "-", stdin="grün".encode("latin-1"))
    for result in (by_file, by_stdin):
        assert result.exit_code == 2
        assert "0xfc at offset 2" in result.stderr


def test_what_another_encoding_is_called_is_told(call, tmp_path):
    file = tmp_path / "utf16.txt"
    file.write_text("hello", encoding="utf-16")
    assert "iconv -f UTF-16 -t UTF-8" in " ".join(call("generate", "--prompt-file", file).stderr.split())


@pytest.mark.parametrize("command", [["generate", "hello"], ["generate", "hello", "--raw"], ["chat"]])
def test_a_model_without_a_tokenizer_says_what_it_lacks(call, models, tmp_path, command):
    folder = shutil.copytree(models.target, tmp_path / "model", ignore=shutil.ignore_patterns("*token*", "chat*"))
    result = call(*command, "--target", folder, stdin="hello\n")
    assert result.exit_code == 2
    assert "has no tokenizer, which prompts need: put its files beside the model" in " ".join(result.stderr.split())


def test_a_broken_model_is_refused(call, models, tmp_path):
    (tmp_path / "config.json").write_text("{")
    result = call("generate", "hello", "--target", tmp_path)
    assert result.exit_code == 2
    assert str(tmp_path) in result.stderr


def test_usage_errors_have_status_2(call):
    for arguments in (["--no-such-option"], ["-k", "many"]):
        assert call("generate", "hello", *arguments).exit_code == 2


def test_a_width_of_no_columns_hides_nothing(call):
    assert "tokens/s" in call("generate", "hello", "-n", 4, COLUMNS="0").stderr


def test_a_slow_runner_is_told_of(call, monkeypatch):
    def load(*arguments, **options):
        warnings.warn("this model is slow", SlowModelWarning, stacklevel=2)
        return real(*arguments, **options)

    real = setup.load_target
    monkeypatch.setattr(setup, "load_target", load)
    assert "note: this model is slow" in call("generate", "hello", "-n", 1).stderr


def test_a_base_model_says_what_to_do_instead(call, models):
    for command in (["generate", "hello", "--chat"], ["chat"]):
        result = call(*command, "--target", models.untemplated)
        assert result.exit_code == 2
        for part in ("no chat template", "generate --raw", "--chat-template FILE"):
            assert part in result.stderr


def test_a_chat_template_can_be_given(call, models, tmp_path):
    file = tmp_path / "template.jinja"
    file.write_text("{% for m in messages %}<{{ m.role }}>{{ m.content }}<end>{% endfor %}<assistant>")
    given = ["--target", models.untemplated, "--chat-template", file, "-t", 0, "-n", 8]
    wrapped = call("generate", "<user>hello<end><assistant>", "--raw", "-t", 0, "-n", 8).stdout
    assert call("generate", "hello", *given).stdout == wrapped
    assert call("chat", *given, stdin="hello\n").stdout == wrapped
    for content, said in ((b"", "is empty"), (b"\xff", "is not UTF-8"), (b"{% if %}", "chat template")):
        file.write_bytes(content)
        refused = call("generate", "hello", *given)
        assert refused.exit_code == 2
        assert said in refused.stderr


def test_a_prediction_is_drafted_from(call, tmp_path):
    fields = ("generate", "hello", "--max-tokens", "20", "--temperature", "0", "--raw", "--json", "--drafter", "none")
    plain = json.loads(call(*fields).stdout)
    file = tmp_path / "expected.txt"
    file.write_bytes(plain["text"].encode() or b"x")
    drafted = json.loads(call(*fields, "--prediction", str(file)).stdout)
    assert drafted["token_ids"] == plain["token_ids"]
    assert drafted["stats"]["drafted_prediction"] == drafted["stats"]["drafted"] > 0
    assert plain["stats"]["drafted_prediction"] == 0
    compared = json.loads(call(*fields, "--compare", "--prediction", str(file)).stdout)
    assert compared["stats"]["drafted_prediction"] > 0 == compared["compare"]["plain"]["stats"]["drafted"]
    for missing in (tmp_path / "nothing.txt", tmp_path):
        refused = call(*fields, "--prediction", str(missing))
        assert refused.exit_code == 2
        assert "prediction file" in refused.stderr
