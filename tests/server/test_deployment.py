"""The example files in docs/deploy: they parse, their flags exist, and so do all figures."""

from __future__ import annotations

import configparser
import importlib
import json
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

from dsv3_jax.cli.main import parser
from dsv3_jax.serve_ray.settings import AppSettings

FILES = Path(__file__).parents[2] / "docs" / "deploy"
END_SECONDS = 10  # between the time to drain and the end of the process


def docker_words() -> list[str]:
    text = (FILES / "Dockerfile").read_text("utf-8")
    entry, command = (
        json.loads(re.search(f"^{name} (.*)$", text, re.M)[1])  # pyright: ignore[reportOptionalSubscript]
        for name in ("ENTRYPOINT", "CMD")
    )
    return [*entry, *command]


def unit() -> configparser.SectionProxy:
    read = configparser.ConfigParser(interpolation=None)
    read.optionxform = str  # pyright: ignore[reportAttributeAccessIssue]
    read.read(FILES / "dsv3.service", "utf-8")
    return read["Service"]


def kubernetes() -> dict[str, dict]:
    documents = yaml.safe_load_all((FILES / "kubernetes.yaml").read_text("utf-8"))
    return {document["kind"]: document for document in documents}


def commands() -> dict[str, list[str]]:
    docker = docker_words()
    pod = kubernetes()["Deployment"]["spec"]["template"]["spec"]
    entry = docker[: docker.index("--model")]
    return {
        "docker": docker,
        "systemd": shlex.split(unit()["ExecStart"]),
        "kubernetes": [*entry, *pod["containers"][0]["args"]],
    }


@pytest.mark.parametrize("name", ["docker", "systemd", "kubernetes"])
def test_flags_exist(name):
    program, *words = commands()[name]
    assert program.endswith("dsv3")
    arguments = parser().parse_args(words)
    assert (arguments.command, arguments.host, arguments.port) == ("serve", "0.0.0.0", 8000)


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="needs systemd-analyze")
def test_systemd_accepts_the_unit(tmp_path):
    """Its program and its user, which this machine lacks, are replaced."""
    text = (FILES / "dsv3.service").read_text("utf-8")
    program = unit()["ExecStart"].split()[0]
    here = text.replace(program, sys.executable).replace("User=dsv3", "User=root")

    def complaints(text: str) -> str:
        (tmp_path / "dsv3.service").write_text(text, "utf-8")
        done = subprocess.run(
            ["systemd-analyze", "verify", str(tmp_path / "dsv3.service")],
            capture_output=True,
            text=True,
        )
        return "" if done.returncode == 0 and "dsv3.service" not in done.stderr else done.stderr

    assert not complaints(here)
    assert "RestartSecs" in complaints(here.replace("RestartSec=", "RestartSecs="))


@pytest.mark.slow
def test_kubernetes_accepts_the_manifests():
    """Their fields are those of the published schemas, and no others."""
    kubernetes_validate = pytest.importorskip(
        "kubernetes_validate", reason="needs kubernetes-validate, of the extra clients"
    )
    documents = list(yaml.safe_load_all((FILES / "kubernetes.yaml").read_text("utf-8")))
    for document in documents:
        kubernetes_validate.validate(document, kubernetes_validate.latest_version(), strict=True)
    documents[0]["spec"]["template"]["spec"]["containers"][0]["port"] = 8000
    with pytest.raises(kubernetes_validate.ValidationError, match="port"):
        kubernetes_validate.validate(
            documents[0], kubernetes_validate.latest_version(), strict=True
        )


def test_the_process_has_time_to_drain():
    for name, seconds in (
        ("systemd", int(unit()["TimeoutStopSec"])),
        (
            "kubernetes",
            kubernetes()["Deployment"]["spec"]["template"]["spec"]["terminationGracePeriodSeconds"],
        ),
    ):
        drain = parser().parse_args(commands()[name][1:]).drain_seconds
        assert seconds >= drain + END_SECONDS


def test_probes_exist(server):
    (container,) = kubernetes()["Deployment"]["spec"]["template"]["spec"]["containers"]
    for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
        path = container[probe]["httpGet"]["path"]
        assert server.request("GET", path)[0] == 200
    assert kubernetes()["Service"]["spec"]["selector"] == {"app": "dsv3"}


def test_the_dashboard_finds_its_figures(server):
    server.post("/v1/completions", {"model": "demo", "prompt": "x", "max_tokens": 2})
    server.wait_until_idle()
    exposed = {
        (sample.name, label)
        for family in text_string_to_metric_families(server.request("GET", "/metrics")[2].decode())
        for sample in family.samples
        for label in sample.labels
    }
    dashboard = json.loads((FILES / "grafana.json").read_text("utf-8"))
    expressions = [target["expr"] for panel in dashboard["panels"] for target in panel["targets"]]
    used = set(re.findall(r"vllm:\w+", " ".join(expressions)))
    assert len(used) > 12
    assert used <= {name for name, _ in exposed}
    for expression in expressions:
        for name in re.findall(r"vllm:\w+", expression):
            for label in re.findall(r"by \((\w+)\)|\{(\w+)=", expression):
                assert (name, "".join(label)) in exposed or "".join(label) == "finished_reason"
    variables = {each["name"] for each in dashboard["templating"]["list"]}
    assert set(re.findall(r"\$\{?(\w+)", json.dumps(dashboard["panels"]))) <= (
        variables | {"__rate_interval"}
    )
    ids = [panel["id"] for panel in dashboard["panels"]]
    assert len(set(ids)) == len(ids)


def ray_service() -> dict:
    return yaml.safe_load((FILES / "kuberay.yaml").read_text("utf-8"))["spec"]


def ray_configs() -> dict[str, dict]:
    return {
        "serve": yaml.safe_load((FILES / "serve.yaml").read_text("utf-8")),
        "kuberay": yaml.safe_load(ray_service()["serveConfigV2"]),
    }


@pytest.mark.parametrize("name", ["serve", "kuberay"])
def test_an_application_of_replicas_can_be_built(name):
    (application,) = ray_configs()[name]["applications"]
    module, _, function = application["import_path"].partition(":")
    assert function in importlib.import_module(module).__all__
    settings = AppSettings.of(application["args"])
    assert settings.autoscaling.target_ongoing_requests <= settings.arguments.max_running


@pytest.mark.slow
@pytest.mark.parametrize("name", ["serve", "kuberay"])
def test_ray_serve_reads_the_configs(name):
    schema = pytest.importorskip(
        "ray.serve.schema", reason="needs the extra ray: pip install '.[ray]'"
    )
    schema.ServeDeploySchema.model_validate(ray_configs()[name])


def test_workers_have_what_replicas_need():
    (application,) = ray_configs()["kuberay"]["applications"]
    settings = AppSettings.of(application["args"])
    (workers,) = ray_service()["rayClusterConfig"]["workerGroupSpecs"]
    pod = workers["template"]["spec"]
    (container,) = pod["containers"]
    limits = container["resources"]["limits"]
    assert limits["nvidia.com/gpu"] == settings.resources["num_gpus"]
    assert int(limits["cpu"]) >= settings.resources["num_cpus"]
    assert workers["maxReplicas"] >= settings.autoscaling.max_replicas
    assert pod["terminationGracePeriodSeconds"] > settings.arguments.drain_seconds + END_SECONDS
    mounted = {mount["mountPath"] for mount in container["volumeMounts"]}
    for path in (settings.arguments.api_key_file, settings.arguments.program_store):
        assert str(path.parent) in mounted
