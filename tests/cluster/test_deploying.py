"""What `headlong deploy` refuses before anything is started, and what it writes."""

import sys
from dataclasses import replace
from types import SimpleNamespace

import pytest
import yaml

from headlong.cli.main import main
from headlong.cluster.app import IMPORT_PATH, Placement, build, name_of, version_of, written
from headlong.cluster.loader import options_of
from headlong.cluster.machines import Room, check_room, placed
from headlong.cluster.runtime import meant, noted, on_this_machine, own_folder
from headlong.cluster.trouble import reason, trouble
from headlong.config import EngineConfig
from headlong.errors import ConfigError

LAPTOP = Room(where="this machine", address="", cpus=4.0, gpus=0.0, memory=8e9)
STATION = Room(where="the station", address="", cpus=64.0, gpus=2.0, memory=None)


def test_without_ray(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "ray", None)
    for words in (["deploy"], ["deploy", "status"], ["deploy", "stop"]):
        assert main(words) == 2
        assert "Ray is not installed; pip install 'headlong[ray]'" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--replicas", "2", "--max-replicas", "3"], "use one or the other"),
        (["--min-replicas", "2"], "--min-replicas needs --max-replicas"),
        (["--replicas", "0", "--write", "-"], "replicas must be from 1 to 1024"),
        (["--min-replicas", "4", "--max-replicas", "2", "--write", "-"], "the least before the most"),
        (["--cpus-per-replica", "0", "--write", "-"], "CPUs above 0"),
        (["--port", "99999"], "--port must be a whole number"),
    ],
)
def test_what_cannot_be_meant(flags, said, capsys):
    assert main(["deploy", *flags]) == 2
    assert said in capsys.readouterr().err


@pytest.mark.parametrize(
    ("room", "wanted", "weights", "said"),
    [
        (LAPTOP, {"max_replicas": 5, "cpus": 1.0}, 1, "1 CPUs each need 5, and this machine has 4: use --replicas 4"),
        (LAPTOP, {"max_replicas": 6}, 1, "or --cpus-per-replica 0.67"),
        (LAPTOP, {"max_replicas": 2, "gpus": 1.0}, 1, "of 1 GPUs each need 2, and this machine has 0"),
        (STATION, {"max_replicas": 3}, 1, "of 1 GPUs each need 3, and the station has 2: use --replicas 2"),
        (LAPTOP, {"max_replicas": 3}, 3_000_000_000, "9.0 GB, and this machine has 8.0 GB of memory: use --replicas 2"),
        (LAPTOP, {"max_replicas": 1}, 9_000_000_000, "use a smaller model"),
    ],
)  # fmt: skip
def test_no_room(room, wanted, weights, said):
    with pytest.raises(ConfigError) as refusal:
        check_room(room, placed(room, {"min_replicas": 1, **wanted}, "auto"), weights)
    assert said in str(refusal.value)


def test_a_cluster_that_may_grow_is_waited_for(caplog):
    few = Placement(min_replicas=2, max_replicas=99)
    check_room(replace(LAPTOP, may_grow=True), few, 1)
    assert not caplog.records, "there is room for the least that there may be"
    check_room(replace(LAPTOP, may_grow=True, cpus=1.0), few, 1)
    assert "waiting until the cluster grows: 2 replicas of 1 CPUs each need 2" in caplog.text


def test_what_is_left_open_is_shared_out():
    assert placed(LAPTOP, {"min_replicas": 2, "max_replicas": 2, "cpus": None}, "auto") == Placement(
        min_replicas=2, max_replicas=2, cpus=2.0
    )
    assert placed(STATION, {"max_replicas": 2}, "auto").gpus == 1.0
    assert placed(STATION, {"max_replicas": 2}, "cpu").gpus == 0.0
    check_room(LAPTOP, placed(LAPTOP, {"max_replicas": 4}, "auto"), 1_000_000_000)


def test_the_config_for_serve_deploy(tmp_path, capsys):
    from ray.serve.schema import ServeDeploySchema

    file = tmp_path / "serve.yaml"
    words = ["--min-replicas", "1", "--max-replicas", "4", "--cpus-per-replica", "2", "--max-rows", "32"]
    assert main(["deploy", *words, "--write", str(file)]) == 0
    assert f"serve deploy {file}" in capsys.readouterr().err
    config = yaml.safe_load(file.read_text())
    ServeDeploySchema(**config)
    (app,) = config["applications"]
    assert app["name"] == "headlong-tale-20m" and app["import_path"] == IMPORT_PATH
    assert app["args"]["engine"]["max_rows"] == 32
    deployment = build(app["args"])._bound_deployment
    assert deployment.ray_actor_options["num_cpus"] == 2.0
    assert deployment._deployment_config.autoscaling_config.max_replicas == 4
    with pytest.raises(ConfigError, match="there is no 'replicas'"):
        build(app["args"] | {"replicas": 3})
    fixed = build(
        written("x", None, {}, Placement(min_replicas=3, max_replicas=3))["applications"][0]["args"]
    )
    assert fixed._bound_deployment.num_replicas == 3


def test_names_and_versions():
    assert name_of(None) == "headlong-tale-20m"
    assert name_of("/models/Some model/") == "headlong-Some-model"
    assert name_of("Qwen/Qwen3.5-0.8B") == "headlong-Qwen3.5-0.8B"
    assert (
        version_of("a", {"max_rows": 4})
        == version_of("a", {"max_rows": 4})
        != version_of("a", {"max_rows": 5})
    )
    assert options_of(EngineConfig(max_rows=4, map_files=False)) == {"max_rows": 4}


def test_why_a_replica_could_not_load_is_found_in_serves_message():
    message = (
        "Deploying application headlong-x failed: Failed to update the deployments ['replicas']:\n"
        "The deployment failed to start 1 times in a row. Error:\n"
        "\x1b[36mray::ServeReplica:headlong-x:replicas.initialize_and_get_metadata()\x1b[39m (pid=1, ip=127.0.0.1)\n"
        '  File "/x/headlong/config.py", line 3, in resolve_device\n'
        "    raise ConfigError(\n"
        "headlong.errors.ConfigError: device: there is no cuda here\n"
        "\nThe above exception was the direct cause of the following exception:\n"
    )
    assert reason(message) == "device: there is no cuda here"
    assert reason("x\nRuntimeError: out of luck") == "RuntimeError: out of luck"
    assert reason("nothing that is known") == "nothing that is known"


def test_who_waits_for_a_replica_is_told_only_where_none_can_come(monkeypatch):
    message = "The deployment failed to start 2 times in a row. Error:\n"
    told = SimpleNamespace(status_trigger="REPLICA_STARTUP_FAILED", message="")
    status = SimpleNamespace(applications={"x": SimpleNamespace(deployments={"replicas": told})})
    monkeypatch.setattr("ray.serve.status", lambda: status)
    told.message = f"{message}Traceback:\nheadlong.errors.CheckpointError: weights.safetensors is cut short"
    assert trouble("x") == "a replica could not load its model: weights.safetensors is cut short"
    told.message = f"{message}ActorDiedError()"
    assert trouble("x") is None, "it was killed before it served"
    told.message, told.status_trigger = "A replica's health check failed.", "HEALTH_CHECK_FAILED"
    assert trouble("x") is None, "Serve starts another"
    assert trouble("y") == "it is not deployed any more"


def test_clusters_of_this_machine_are_found(tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setenv("RAY_AUTH_MODE", "token")
    monkeypatch.setenv("RAY_AUTH_TOKEN_PATH", "none")
    assert on_this_machine() == [] and meant(None) == "auto" and meant("a:1") == "a:1"
    with own_folder() as folder:
        with noted("127.0.0.1:7", folder):
            assert [one.address for one in on_this_machine()] == ["127.0.0.1:7"]
            assert meant(None) == "127.0.0.1:7" and meant("b:2") == "b:2"
        assert on_this_machine() == []
        (tmp_path / next(tmp_path.iterdir()).name / "1.json").write_text(
            '{"pid": 999999999, "address": "x", "folder": "y"}'
        )
        assert on_this_machine() == []
    assert [one.name for one in next(tmp_path.iterdir()).iterdir()] == []
