"""What docs/scaling.md shows: its manifest, its flags, and the names of its series."""

import re
from pathlib import Path

import pytest
import yaml

from headlong.cli.main import build_parser
from headlong.server import replicas

PAGE = (Path(__file__).parents[2] / "docs" / "scaling.md").read_text(encoding="utf-8")


def test_the_manifest_is_whole():
    (text,) = re.findall(r"```yaml\n(.*?)```", PAGE, re.DOTALL)
    cluster, service = yaml.safe_load_all(text)
    groups = [cluster["spec"]["headGroupSpec"], *cluster["spec"]["workerGroupSpecs"]]
    pods = [group["template"]["spec"]["containers"][0] for group in groups]
    assert all("$KUBERAY_GEN_RAY_START_CMD" in " ".join(pod["command"]) for pod in pods)
    assert all(pod["env"][0]["name"] == "RAY_AUTH_TOKEN" for pod in pods), "all share one token"
    front = cluster["spec"]["workerGroupSpecs"][-1]["template"]
    assert front["metadata"]["labels"] == service["spec"]["selector"]
    assert service["spec"]["ports"][0]["targetPort"] == pods[-1]["ports"][0]["containerPort"]


def merged(command: str) -> list[str]:
    """The words of a command as the parser takes them: `deploy status` is one of its own."""
    first, *rest = command.split()
    return [f"{first} {rest[0]}", *rest[1:]] if rest[:1] in (["status"], ["stop"]) else [first, *rest]


def test_its_commands_are_understood():
    commands = re.findall(
        r"^ *(?:exec )?headlong (deploy .*?)(?: +#.*)?$", PAGE.replace("\\\n", " "), re.MULTILINE
    )
    parser, _ = build_parser()
    assert len(commands) > 4
    for command in commands:
        parser.parse_args(merged(command))


def test_its_series_exist():
    named = set(re.findall(r"`headlong:(\w+)\{", PAGE))
    assert named == {"replicas", *(f"{name}_total" for name, *_ in replicas.COUNTERS)}


def test_its_config_is_what_serve_takes():
    pytest.importorskip("ray.serve", reason="needs headlong[ray]")
    from ray.serve.schema import ServeDeploySchema

    from headlong.cluster.app import Placement, written

    config = written(
        "headlong-x", "owner/x", {"max_rows": 8}, Placement(min_replicas=4, max_replicas=4, gpus=1.0)
    )
    schema = ServeDeploySchema(**yaml.safe_load(yaml.safe_dump(config)))
    assert schema.applications[0].import_path == "headlong.cluster.app:build"
