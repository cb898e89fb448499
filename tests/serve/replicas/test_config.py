"""What a config file of Ray Serve may say, and how options become deployments. No cluster is started."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

from foretoken.cli.app import app
from foretoken.errors import ParameterError

pytest.importorskip("ray", reason="needs the extra ray")

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
    assert parts["replica"].max_ongoing_requests == 16 + 64
    assert parts["replica"].ray_actor_options["num_cpus"] == 4
    assert parts["gateway"].num_replicas == 2


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
    ("options", "said"),
    [
        (["--replicas", "many"], "write a number, LOW-HIGH or auto"),
        (["--replicas", "2", "--drafter", "lokup"], "did you"),
    ],
)
def test_wrong_options_are_told_before_a_cluster_starts(options, said, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setattr("ray.init", lambda **_: pytest.fail("a cluster was started"))
    result = CliRunner().invoke(app, ["serve", "--port", "0", *options])
    assert result.exit_code == 2
    assert said in result.output


@pytest.mark.parametrize("command", [["serve", "--replicas", "2"], ["batch", __file__, "-o", "x", "--ray", "local"]])
def test_missing_ray_is_told(command, monkeypatch):
    monkeypatch.setattr("foretoken.cli.serve.find_spec", lambda name: None if name == "ray" else name)
    result = CliRunner().invoke(app, command)
    assert result.exit_code == 2
    assert "foretoken[ray]" in result.output
