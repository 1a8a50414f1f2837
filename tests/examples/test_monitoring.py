"""The dashboard and the scrape configuration, against a real server: whatever they name is exported."""

import json
import re
from pathlib import Path

import httpx
import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

from headlong.server.settings import Settings
from support.serving import RunningServer

FOLDER = Path(__file__).parents[2] / "examples" / "monitoring"
DASHBOARD = json.loads((FOLDER / "grafana.json").read_text())
SCRAPE = yaml.safe_load((FOLDER / "prometheus.yml").read_text())["scrape_configs"][0]
FUNCTIONS = {"sum", "rate", "histogram_quantile", "label_values", "by", "on", "group_left"}
ADDED = {"job", "instance"}
"""Labels that Prometheus adds when it reads."""
BODY = {"messages": [{"role": "user", "content": "Tell me a story."}], "max_tokens": 20, "ignore_eos": True}


@pytest.fixture(scope="module")
def exported():
    """Labels by the name of a sample, after an answer and an error."""
    with RunningServer(draft_tokens=3) as running, running.client() as http:
        assert http.post("/v1/chat/completions", json=BODY).status_code == 200
        assert http.post("/v1/chat/completions", content="{").status_code == 400
        text = httpx.get(f"{running.url}{SCRAPE['metrics_path']}", trust_env=False).text
    samples = [sample for family in text_string_to_metric_families(text) for sample in family.samples]
    return {sample.name: set(sample.labels) for sample in samples}


def metrics_of(expression: str) -> tuple[set[str], set[str]]:
    """The metrics and the labels that an expression names."""
    bare = re.sub(r'"[^"]*"', "", re.sub(r"\[[^\]]*\]", "", expression))
    labels = set(re.findall(r"(\w+)\s*=~?", bare))
    for listed in re.findall(r"\b(?:by|on|group_left) \(([^)]*)\)", bare):
        labels |= {name.strip() for name in listed.split(",") if name.strip()}
    names = set(re.findall(r"[A-Za-z_][\w:]*", bare)) - FUNCTIONS - labels
    return names, labels


TARGETS = [(panel, target) for panel in DASHBOARD["panels"] for target in panel["targets"]]


@pytest.mark.parametrize(
    ("panel", "target"), TARGETS, ids=lambda part: part.get("title") or part.get("refId")
)
def test_what_a_panel_names_is_exported(exported, panel, target):
    names, labels = metrics_of(target["expr"])
    assert names and names <= exported.keys(), f"{panel['title']} names what no server has"
    known = ADDED.union(*(exported[name] for name in names))
    assert labels <= known
    assert set(re.findall(r"{{(\w+)}}", target["legendFormat"])) <= known
    assert target["expr"].count("(") == target["expr"].count(")")


def test_variables(exported):
    variables = {one["name"]: one for one in DASHBOARD["templating"]["list"]}
    used = set(re.findall(r"\$\{?(\w+)", json.dumps(DASHBOARD))) - {"__rate_interval", "__all"}
    assert used == variables.keys()
    for one in variables.values():
        if one["type"] == "query":
            metric, label = re.fullmatch(r"label_values\(([\w:]+), (\w+)\)", one["query"]).groups()
            assert label in exported[metric] | ADDED


def test_every_metric_of_requests_is_on_a_panel(exported):
    """What is measured and not shown is named here on purpose."""
    shown = set().union(*(metrics_of(target["expr"])[0] for _, target in TARGETS))
    stems = {
        re.sub(r"_(bucket|sum|count|created)$", "", name) for name in exported if name.startswith("headlong:")
    }
    left_out = (
        stems
        - {name.removesuffix("_bucket") for name in shown}
        - {name.removesuffix("_total") for name in shown}
    )
    assert left_out == {
        "headlong:request_inference_time_seconds",
        "headlong:request_time_per_output_token_seconds",
    }


def test_panels_do_not_overlap():
    places = {(one["gridPos"]["x"], one["gridPos"]["y"]) for one in DASHBOARD["panels"]}
    assert len(places) == len(DASHBOARD["panels"]) == len({one["id"] for one in DASHBOARD["panels"]})


def test_the_scrape_configuration_finds_a_server_as_it_comes():
    (target,) = SCRAPE["static_configs"][0]["targets"]
    assert target == f"{Settings().host}:{Settings().port}"
