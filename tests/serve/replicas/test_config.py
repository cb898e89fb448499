"""What a config file of Ray Serve may say, and how options become deployments. No cluster is started."""

from __future__ import annotations

import logging
import re
import socket
from importlib.metadata import PackageNotFoundError
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

import tiny
from byte_tokenizer import byte_tokenizer
from foretoken.cli.app import app
from foretoken.cli.options import ModelOptions
from foretoken.cli.replicas import ReplicaApp, ReplicaOptions
from foretoken.cli.serve import ServeOptions
from foretoken.errors import ForetokenError, ParameterError
from foretoken.serve.logs import JsonLines

pytest.importorskip("ray", reason="needs the extra ray")

from foretoken.serve.replicas.cluster import LOCAL, Door, check_address, cluster, held_port, served

EXAMPLE = Path(__file__).parents[3] / "examples" / "replicas.yaml"


def deployments(**args):
    from ray.serve._private.build_app import build_app

    from foretoken.cli.replicas import application

    built = build_app(application(args), name="x", default_runtime_env=None)
    return {one.name: one for one in built.deployments}


def test_the_example_is_a_config_file_of_serve_and_its_args_are_options():
    from ray.serve.schema import ServeDeploySchema

    (found,) = ServeDeploySchema.parse_obj(yaml.safe_load(EXAMPLE.read_text())).applications
    assert found.import_path == "foretoken.cli.replicas:application"
    parts = deployments(**found.args)
    scaling = parts["replica"]._deployment_config.autoscaling_config
    assert (scaling.min_replicas, scaling.max_replicas, scaling.target_ongoing_requests) == (2, 8, 16)
    assert (scaling.upscale_delay_s, scaling.downscale_delay_s) == (30.0, 600.0)
    assert parts["replica"].max_ongoing_requests == 16 + 64
    assert parts["replica"].ray_actor_options["num_cpus"] == 4
    assert parts["gateway"].num_replicas == 2


def test_delays_of_scaling_are_options():
    scaling = deployments(replicas="1-2", upscale_delay=1.5, downscale_delay=0)["replica"]._deployment_config
    delays = scaling.autoscaling_config.upscale_delay_s, scaling.autoscaling_config.downscale_delay_s
    assert delays == (1.5, 0.0)


def test_a_number_of_replicas_stays():
    replica = deployments(replicas=3, max_batch_size=2, max_queue=0)["replica"]
    assert (replica.num_replicas, replica._deployment_config.autoscaling_config) == (3, None)
    assert (replica.max_ongoing_requests, replica.max_queued_requests) == (2, 1)


@pytest.mark.parametrize(
    ("args", "said"),
    [
        ({"replica": 2}, "did you mean 'replicas'"),
        ({"replicas": "auto"}, "LOW-HIGH"),
        ({"replicas": "5-2"}, "smaller number first"),
        ({"log_format": "xml"}, "log_format"),
        ({"max_body_bytes": 0}, "max_body_bytes"),
    ],
)
def test_wrong_args_are_told(args, said):
    with pytest.raises(ParameterError, match=said):
        deployments(**args)


@pytest.mark.parametrize(
    ("args", "said"),
    [
        ({"api_key": [12]}, "args has api_key with something that is no text: write each in quotes"),
        ({"api_key": None}, "args has api_key with something that is no text: write each in quotes"),
        ({"max_queue": -1}, "args has max_queue: -1, which is wrong: .*0"),
        ({"max_queue": "many"}, "args has max_queue: 'many', which is wrong"),
        ({"max_queue": 1.5}, "args has max_queue: 1.5, which is wrong"),
        ({"max_queue": None}, "args has max_queue: None: write one value, or leave max_queue out"),
        ({"target": ["a", "b"]}, "args has target: .*write one value"),
        ({"replica_cpus": -1}, "args has replica_cpus: -1, which is wrong"),
        ({"metrics": "no"}, "args has metrics: 'no': write true or false"),
        ({"api_key_file": "/nowhere"}, "file of API keys"),
        ({"port": 9000}, "args has 'port', .*: write port under http_options"),
        ({"tls_cert": "cert.pem"}, "args has 'tls_cert', .*: write ssl_certfile under http_options"),
        ({"tls_key": "key.pem"}, "args has 'tls_key', .*: write ssl_keyfile under http_options"),
        ({"keep_alive": 9}, "args has 'keep_alive', .*: write keep_alive_timeout_s under http_options"),
        ({"ray": "auto"}, "args has 'ray', which means nothing there"),
        ({"engine_process": True}, "args has 'engine_process', which means nothing there"),
    ],
)
def test_args_of_another_type_or_of_no_meaning_are_refused(args, said):
    with pytest.raises(ForetokenError, match=said):
        deployments(**args)


def test_args_are_read_with_the_types_of_their_options(tmp_path):
    template, keys = tmp_path / "template.jinja", tmp_path / "keys"
    template.write_text("{{ messages }}")
    keys.write_text("third\n")
    paths = {"chat_template": str(template), "api_key_file": str(keys)}
    parts = deployments(api_key="secret", num_speculative_tokens=4, max_queue="7", page=False, eager=True, **paths)
    settings = parts["gateway"].init_args[1]
    assert settings.api_keys == ("secret", "third")  # not each letter of it
    assert (settings.max_queue, settings.page) == (7, False)
    models = parts["replica"].init_args[0].models
    assert (models.num_speculative_tokens, models.chat_template, models.eager) == ("4", template, True)
    several = deployments(api_key=["one", "two"], log_bodies=True)["gateway"].init_args[1]
    assert (several.api_keys, several.log_bodies) == (("one", "two"), True)


def test_who_deploys_without_a_key_is_told(caplog, monkeypatch):
    deployments(api_key="secret")
    assert not caplog.records
    deployments()
    (said,) = caplog.messages
    assert "anybody who reaches the proxies may ask" in said
    assert "a file that every node has" in said
    caplog.clear()
    monkeypatch.setenv("FORETOKEN_API_KEY", "secret")
    deployments(host="127.0.0.1")
    (said,) = caplog.messages
    assert "args has host, which means nothing there" in said


def test_a_replica_logs_failures_in_the_form_that_is_asked_for(tmp_path):
    tiny.tiny_llama(vocab_size=259, eos_token_id=258).save_pretrained(tmp_path)
    byte_tokenizer().save_pretrained(tmp_path)
    models = ModelOptions(target=str(tmp_path), drafter="none", eager=True)
    logs = [logging.getLogger(name) for name in ("foretoken.serve", "uvicorn.error", "asyncio")]
    before = [(log.handlers, log.level, log.propagate) for log in logs]
    try:
        ReplicaApp(models, ServeOptions(log_format="json"))("one")
        (handler,) = logs[0].handlers
        assert isinstance(handler.formatter, JsonLines)
        assert not logs[0].isEnabledFor(logging.INFO)  # the gateway has a line a request
    finally:
        for log, (handlers, level, propagate) in zip(logs, before, strict=True):
            log.handlers, log.level, log.propagate = handlers, level, propagate


def test_a_cluster_of_ones_own_has_the_processors_that_this_process_may_use(monkeypatch):
    asked: dict[str, object] = {}
    monkeypatch.setattr("ray.init", lambda **options: asked.update(options))
    monkeypatch.setattr("os.cpu_count", lambda: 64)
    monkeypatch.setattr("os.sched_getaffinity", lambda _: {0}, raising=False)
    with cluster(LOCAL, 0.5):
        pass
    assert asked["num_cpus"] == 1
    with cluster(LOCAL, 2.5):  # what was asked for is counted, whatever there is
        pass
    assert asked["num_cpus"] == 3


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--replicas", "many"], "write a number, LOW-HIGH or auto"),
        (["--replicas", "2", "--drafter", "lokup"], "did you"),
        (["--replicas", "2", "--engine-process"], "--engine-process is for a server without replicas"),
    ],
)
def test_wrong_options_are_told_before_a_cluster_starts(options, said, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setattr("ray.init", lambda **_: pytest.fail("a cluster was started"))
    result = CliRunner().invoke(app, ["serve", "--port", "0", *options])
    assert result.exit_code == 2
    assert said in result.output


COMMANDS = [["serve", "--replicas", "2"], ["batch", __file__, "-o", "x", "--ray", "local"]]


@pytest.mark.parametrize("command", COMMANDS)
def test_missing_ray_is_told(command, monkeypatch):
    def missing(name: str) -> str:
        raise PackageNotFoundError(name)

    monkeypatch.setattr("foretoken.cli.serve.version", missing)
    said = told(command, monkeypatch)
    assert "this needs ray 2.60, which is not installed: run pip install '.[ray]'" in said


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize("found", ["2.59.1", "2.600.0", "3.0.0"])
def test_another_release_of_ray_is_told(command, found, monkeypatch):
    monkeypatch.setattr("foretoken.cli.serve.version", lambda name: found)
    assert f"ray is {found}, and this needs 2.60: run pip install '.[ray]'" in told(command, monkeypatch)


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("--replica-cpus", "2.0"),
        ("--replica-gpus", "0.5"),
        ("--gateways", "3"),
        ("--prefix-slack", "0"),
        ("--upscale-delay", "5.0"),
        ("--downscale-delay", "60.0"),
    ],
)
def test_options_that_mean_nothing_without_replicas_are_told(option, value, monkeypatch):
    monkeypatch.setattr("foretoken.cli.app.run_server", lambda *_: pytest.fail("a server was started"))
    said = told(["serve", option, value], monkeypatch)
    assert f"{option} is {value}, and there are no replicas: give --replicas N or --ray ADDRESS, too" in said
    ReplicaOptions(replicas="2", replica_cpus=2.0, replica_gpus=0.5, gateways=3, prefix_slack=0).check()
    ReplicaOptions(ray="auto", gateways=3).check()
    ReplicaOptions().check()


def told(command: list[str], monkeypatch: pytest.MonkeyPatch) -> str:
    """What a command that is wrong says, in one line."""
    monkeypatch.setenv("COLUMNS", "1000")
    result = CliRunner().invoke(app, command)
    assert result.exit_code == 2
    return " ".join(result.output.split())


@pytest.mark.parametrize("address", ["", "nonsense", "127.0.0.1", "127.0.0.1:x", ":6379", "127.0.0.1:0", "a:70000"])
def test_what_is_no_address_of_a_cluster_is_told(address):
    with pytest.raises(
        ForetokenError, match=re.escape(f"ray is {address!r}, which is no address: give --ray HOST:PORT")
    ):
        check_address(address)


def test_an_address_where_nothing_answers_is_told_before_ray_tries(monkeypatch):
    monkeypatch.setattr("ray.init", lambda **_: pytest.fail("Ray tried"))
    with socket.socket() as bound:  # nobody else can take the port, and it does not listen
        bound.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{bound.getsockname()[1]}"
        said = f"nothing answers at '{address}' within 5 s .*: give --ray HOST:PORT"
        with pytest.raises(ForetokenError, match=said), cluster(address, 1.0):
            pass
        bound.listen()
        check_address(address)
        check_address(f"ray://{address}")


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (
            ConnectionError("none found"),
            r"no Ray cluster at 'auto' \(none found\): give --ray .* `ray start --head`, or give --ray local",
        ),
        (
            RuntimeError("Version mismatch"),
            r"Version mismatch\): this is ray 2\.60\.\d+ and Python 3\..*each node needs",
        ),
    ],
)
def test_a_cluster_that_can_not_be_joined_is_told(error, said, monkeypatch, tmp_path):
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path))  # without a latest cluster

    def init(**_: object) -> None:
        raise error

    monkeypatch.setattr("ray.init", init)
    with pytest.raises(ForetokenError, match=said), cluster("auto", 1.0):
        pass


def test_a_latest_cluster_that_has_ended_is_told_before_ray_tries(monkeypatch, tmp_path):
    monkeypatch.setattr("ray.init", lambda **_: pytest.fail("Ray tried"))
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path))
    check_address("auto")  # none is known: Ray looks for one
    (tmp_path / "ray").mkdir()
    with socket.socket() as bound:  # it does not listen
        bound.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{bound.getsockname()[1]}"
        (tmp_path / "ray" / "ray_current_cluster").write_text(address)
        with pytest.raises(ForetokenError, match=rf"'{address}', the cluster that .*`ray stop`"), cluster("auto", 1.0):
            pass
        monkeypatch.setenv("RAY_ADDRESS", "local")
        check_address("auto")
        monkeypatch.delenv("RAY_ADDRESS")
        bound.listen()
        check_address("auto")


def bound(port: int, *options: int) -> socket.socket:
    one = socket.socket()
    for option in options:
        one.setsockopt(socket.SOL_SOCKET, option, 1)
    try:
        one.bind(("127.0.0.1", port))
    except OSError:
        one.close()
        raise
    return one


@pytest.mark.parametrize("asked", ["any", "given"])
def test_a_port_is_kept_for_the_proxies_while_a_cluster_starts(asked):
    """Ray's processes take ports of their own meanwhile: one of them had taken the door's."""
    with bound(0) as free:
        port = 0 if asked == "any" else free.getsockname()[1]
    with held_port("127.0.0.1", port) as held:
        assert held == port or port == 0
        with pytest.raises(OSError, match="in use"):
            bound(held, socket.SO_REUSEADDR)
        with bound(held, socket.SO_REUSEADDR, socket.SO_REUSEPORT) as proxy:
            proxy.listen()
            for _ in range(8):  # all connections are the proxy's
                with socket.create_connection(("127.0.0.1", held), timeout=60):
                    proxy.accept()[0].close()
    bound(held, socket.SO_REUSEADDR).close()


@pytest.mark.parametrize(("seconds", "told"), [(0.0, 0), (0.4, 1), (75.0, 75)])
def test_proxies_keep_connections_for_whole_seconds_and_for_none_only_where_that_is_asked(seconds, told, monkeypatch):
    found = []

    def start(**options):
        found.append(options["http_options"]["keep_alive_timeout_s"])
        raise RuntimeError("no more")

    monkeypatch.setattr("ray.serve.start", start)
    door = Door(host="127.0.0.1", port=1, keep_alive=seconds)
    with pytest.raises(ForetokenError, match="no more"), served(None, door, True, 0.0):
        pass
    assert found == [told]


def test_a_port_of_another_server_is_not_shared():
    with bound(0, socket.SO_REUSEPORT) as other:
        other.listen()
        with pytest.raises(ForetokenError, match="can't listen on port"), held_port(*other.getsockname()):
            pass


def test_a_port_whose_connections_have_just_ended_is_had():
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        with socket.create_connection(("127.0.0.1", port), timeout=60) as client:
            server.accept()[0].close()  # the side that closes first waits for what is still under way
            assert client.recv(1) == b""
    with pytest.raises(OSError, match="in use"):
        bound(port, socket.SO_REUSEPORT).close()
    with held_port("127.0.0.1", port) as had:
        assert had == port
