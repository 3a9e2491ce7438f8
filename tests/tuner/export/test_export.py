"""What is exported starts exactly what was measured."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tuner.errors import TunerError, UsageError
from tuner.export.artefact import FORMATS, export_artefact
from tuner.export.json_file import load_export, load_launch
from tuner.export.provenance import Figure, Provenance, record_hash
from tuner.export.secrets import Secret, secret_args, secret_env, secret_variables
from tuner.export.shell import render_shell
from tuner.export.verify import artefact_start as started_record
from tuner.records import LaunchRecord

SHELLS = [shell for shell in ("dash", "bash") if any(Path(d, shell).exists() for d in os.environ["PATH"].split(":"))]
OF_THE_SHELL = {"_", "SHLVL", "PWD", "OLDPWD"}
"""Variables that a shell sets for whatever it starts."""

STUB = "import json, os, sys; print(json.dumps({'argv': sys.argv[1:], 'env': dict(os.environ)}))"


def launch(*args: str, env: dict[str, str | None] | None = None, **changes: object) -> LaunchRecord:
    record = LaunchRecord(
        engine="command",
        engine_version="1.2",
        model="tiny",
        argv=(sys.executable, "-I", "-X", "utf8", "-c", STUB, *args),
        env=env or {},
        host="127.0.0.1",
        port=31234,
        settings={"num_steps": 3},
        expected={"num_steps": 3},
        served_model="tiny",
    )
    return replace(record, **changes)


def provenance(record: LaunchRecord, **changes: object) -> Provenance:
    made = Provenance(
        study="night\nrm -rf /",
        launch=12,
        candidate="abc",
        decision="winner overall: +10.1 % $(touch pwned) `touch pwned`",
        record_hash=record_hash(record),
        engine=record.engine,
        engine_version=record.engine_version,
        measured_at="2026-11-29T10:00:00+00:00",
        machine={"cpu": "x"},
        figures=(Figure(8, 123.4, 100.0, 4, "confirm"),),
    )
    return replace(made, **changes)


def run(record: LaunchRecord, shell: str, folder: Path, env: dict[str, str] | None = None) -> dict:
    """What the started program saw, with `env` as its surroundings."""
    path, *_ = export_artefact(record, provenance(record), "shell", folder)
    surroundings = {"PATH": os.environ["PATH"], "KEPT": "kept", **(env or {})}
    done = subprocess.run([shell, str(path)], env=surroundings, capture_output=True, text=True, check=True, cwd=folder)
    seen = json.loads(done.stdout)
    seen["env"] = {k: v for k, v in seen["env"].items() if k not in OF_THE_SHELL and k not in surroundings}
    return seen


text = st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]), max_size=30)
hard = st.sampled_from(
    ["", "'", '"', "$HOME", "`id`", "a b", "\n", "*", "~", "\\", "!x", "{}", "%s", "-n", "on", "1e3", '{"a": {"b": 1}}']
)
name = st.from_regex(r"\A[A-Za-z_][A-Za-z0-9_.]{0,12}\Z").filter(
    lambda n: n not in OF_THE_SHELL | {"PATH", "KEPT", "LC_CTYPE", "HOST", "PORT"} and not n.startswith("PYTHON")
)


@pytest.mark.parametrize("shell", SHELLS)
@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(args=st.lists(text | hard, max_size=6), env=st.dictionaries(name, text | hard | st.none(), max_size=4))
def test_the_script_starts_the_program_with_the_very_same_arguments_and_environment(
    shell: str, args: list[str], env: dict[str, str | None], tmp_path: Path
) -> None:
    seen = run(launch(*args, env=env), shell, tmp_path)
    assert seen["argv"] == args
    assert seen["env"] == {k: v for k, v in env.items() if v is not None} | (
        {"LC_CTYPE": seen["env"]["LC_CTYPE"]} if "LC_CTYPE" in seen["env"] else {}
    )
    assert not (tmp_path / "pwned").exists()


@pytest.mark.parametrize("shell", SHELLS)
def test_variables_that_mean_something_to_a_shell_arrive_too_and_removed_ones_are_gone(
    shell: str, tmp_path: Path
) -> None:
    env: dict[str, str | None] = {"UID": "7", "IFS": "x", "OPTIND": "abc", "ENV": "/nowhere", "GONE": None, "EMPTY": ""}
    seen = run(launch(env=env), shell, tmp_path, {"GONE": "still here"})
    assert {k: seen["env"].get(k) for k in env} == env


@pytest.mark.parametrize("shell", SHELLS)
def test_host_and_port_move_the_server_and_nothing_else(shell: str, tmp_path: Path) -> None:
    args = ("--host", "127.0.0.1", "--port", "31234", "--kv-tokens", "31234", "--url=http://127.0.0.1:31234/x", "31234")
    stays = run(launch(*args), shell, tmp_path)
    moved = run(launch(*args), shell, tmp_path, {"HOST": "0.0.0.0", "PORT": "80"})
    assert tuple(stays["argv"]) == args
    assert moved["argv"] == [
        "--host", "0.0.0.0", "--port", "80", "--kv-tokens", "31234", "--url=http://0.0.0.0:80/x", "31234",
    ]  # fmt: skip
    assert moved["env"] == stays["env"]


def test_a_port_that_the_command_does_not_show_is_not_moved_in_silence(tmp_path: Path) -> None:
    path, *_ = export_artefact(launch("serve"), provenance(launch("serve")), "shell", tmp_path)
    done = subprocess.run(["sh", path], env={**os.environ, "PORT": "80"}, capture_output=True, text=True)
    assert done.returncode == 2
    assert "PORT" in done.stderr


def test_the_program_takes_the_place_of_the_shell(tmp_path: Path) -> None:
    record = launch(argv=(sys.executable, "-c", "import os; print(os.getpid())"))
    path, *_ = export_artefact(record, provenance(record), "shell", tmp_path)
    started = subprocess.Popen([path], stdout=subprocess.PIPE, text=True)
    out, _ = started.communicate()
    assert int(out) == started.pid


@pytest.mark.parametrize("fmt", [fmt for fmt in FORMATS if fmt not in ("engine", "vllm", "sglang")])
def test_secrets_are_left_out_of_every_format(fmt: str, tmp_path: Path) -> None:
    record = launch("--api-key", "s3cr3t", "--hf-token=s3cr3t", env={"HF_TOKEN": "s3cr3t", "MAX_TOKENS": "5"})
    written = [path.read_text() for path in export_artefact(record, provenance(record), fmt, tmp_path)]
    assert all("s3cr3t" not in text for text in written)
    assert any("MAX_TOKENS" in text for text in written)


KEY = "s3cr3ts3cr3t"
HIDDEN = {
    "a header": launch("--header", f"Authorization: Bearer {KEY}"),
    "JSON": launch("--overrides", json.dumps({"a": 1, "api_key": KEY, "b": [2]})),
    "an assignment": launch(f"token={KEY}"),
    "an address": launch("--url", f"https://me:{KEY}@host/x"),
    "a known shape": launch("--x", f"hf_{KEY}ABCDEFGH"),
    "a command line in one argument": launch("-c", f"serve --api-key {KEY} --steps 3"),
    "a variable with an address": launch(env={"FOO": f"postgres://me:{KEY}@host/x"}),
    "a variable with a known shape": launch(env={"FOO": f"hf_{KEY}ABCDEFGH"}),
    "the same secret once more": launch("--y", f"x{KEY}x", env={"HF_TOKEN": KEY}),
    "a key that begins with a dash": launch("--api-key", f"-{KEY}", "-tp", "2"),
    "several keys of vLLM": launch("--api-key", KEY, f"other{KEY}", "--port", "31234", engine="vllm"),
    "two of one name": launch("--api-key", KEY, f'{{"api_key": "other{KEY}"}}'),
}


@pytest.mark.parametrize("case", HIDDEN)
@pytest.mark.parametrize("fmt", [fmt for fmt in FORMATS if fmt not in ("engine", "vllm", "sglang")])
def test_a_secret_within_an_argument_or_a_variable_is_left_out_too(fmt: str, case: str, tmp_path: Path) -> None:
    record = HIDDEN[case]
    written = [path.read_text() for path in export_artefact(record, provenance(record), fmt, tmp_path)]
    assert all(KEY not in text for text in written)


@pytest.mark.parametrize("case", HIDDEN)
def test_what_was_left_out_comes_back_where_it_stood(
    case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    record = HIDDEN[case]
    path, *_ = export_artefact(record, provenance(record), "shell", tmp_path / "shell")
    found = secret_args(record)
    secrets = {part.variable: part.value for parts in found.values() for part in parts if isinstance(part, Secret)}
    secrets |= {variable: record.env[name] for name, variable in secret_env(record).items()}
    assert sorted(secrets) == secret_variables(record)
    given = {"PATH": os.environ["PATH"], **secrets}
    seen = json.loads(subprocess.run(["sh", path], env=given, capture_output=True, text=True, check=True).stdout)
    assert seen["argv"] == list(record.argv[6:])
    assert seen["env"].items() >= dict(record.env).items()
    export_artefact(record, provenance(record), "json", tmp_path / "json")
    for name, value in secrets.items():
        monkeypatch.setenv(name, value)
    again = started_record(load_export(tmp_path / "json"), tmp_path / "json", None)
    assert (again.argv, again.env) == (record.argv, record.env)


@pytest.mark.parametrize(
    "change",
    [
        {"settings": {"api_key": KEY}},
        {"files": {"/c/a.json": f'{{"api_key": "{KEY}"}}'}},
        {"model": f"https://me:{KEY}@host/x"},
        {"files": {"/c/a.txt": f"x {KEY} x"}, "env": {"HF_TOKEN": KEY}},
    ],
)
@pytest.mark.parametrize("fmt", [fmt for fmt in FORMATS if fmt not in ("engine", "vllm", "sglang")])
def test_a_secret_where_no_variable_can_stand_is_refused(fmt: str, change: dict, tmp_path: Path) -> None:
    record = launch(**change)
    with pytest.raises(UsageError, match="looks like a secret"):
        export_artefact(record, provenance(record), fmt, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_tokens_of_a_vocabulary_are_no_secrets() -> None:
    args = ("--eos-token", "</s>", "--max-token=5", '{"pad_token": "x", "token_count": 3}')
    record = launch(*args, env={"STOP_TOKEN": "y"})
    assert secret_variables(record) == []
    assert secret_variables(launch("--hf-token", "x")) == ["HF_TOKEN"]


def test_a_script_with_a_secret_asks_for_it_and_passes_it_on(tmp_path: Path) -> None:
    record = launch("--api-key", "s3cr3t", env={"HF_TOKEN": "s3cr3t"})
    path, *_ = export_artefact(record, provenance(record), "shell", tmp_path)
    refused = subprocess.run(["sh", path], env={"PATH": os.environ["PATH"]}, capture_output=True, text=True)
    assert refused.returncode != 0
    assert "API_KEY" in refused.stderr
    given = {"PATH": os.environ["PATH"], "API_KEY": "a b", "HF_TOKEN": "$c"}
    seen = json.loads(subprocess.run(["sh", path], env=given, capture_output=True, text=True, check=True).stdout)
    assert seen["argv"] == ["--api-key", "a b"]
    assert seen["env"]["HF_TOKEN"] == "$c"


@given(args=st.lists(text | hard, max_size=6), env=st.dictionaries(name, text | st.none(), max_size=4))
@settings(max_examples=50, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_json_comes_back_as_the_same_record(args: list[str], env: dict[str, str | None], tmp_path: Path) -> None:
    record = launch(*args, env=env)
    export_artefact(record, provenance(record), "json", tmp_path)
    assert load_launch(tmp_path) == (record, provenance(record))


def test_a_json_that_was_edited_is_not_taken_for_what_was_measured(tmp_path: Path) -> None:
    record = launch("--steps", "3")
    path, *_ = export_artefact(record, provenance(record), "json", tmp_path)
    path.write_text(path.read_text().replace('"3"', '"4"'))
    with pytest.raises(UsageError, match="was changed"):
        load_launch(path)


@pytest.mark.parametrize("content", ["", "{}", "[]", '{"format": "spec-tuner launch record", "version": 2}'])
def test_a_file_of_another_kind_is_refused(content: str, tmp_path: Path) -> None:
    (tmp_path / "launch.json").write_text(content)
    with pytest.raises(UsageError):
        load_launch(tmp_path)


@pytest.mark.parametrize(
    ("change", "fmt", "said", "error"),
    [
        ({"simulated": True}, "shell", "simulated", UsageError),
        ({}, "shel", "did you mean 'shell'", UsageError),
        ({"argv": ("a\0b",)}, "shell", "NUL", UsageError),
        ({"argv": ()}, "shell", "name of a program", UsageError),
        ({"argv": ("-rf",)}, "shell", "name of a program", UsageError),
        ({"env": {"a=b": "c"}}, "shell", "name of a variable", UsageError),
        ({"host": ""}, "json", "not complete: it has no host", UsageError),
        ({"engine": "", "port": 0}, "compose", "no engine, port", UsageError),
    ],
)
def test_what_cannot_be_exported_writes_nothing(
    change: dict, fmt: str, said: str, error: type[TunerError], tmp_path: Path
) -> None:
    record = launch(**change)
    with pytest.raises(error, match=said):
        export_artefact(record, provenance(record), fmt, tmp_path / "out")
    assert not list(tmp_path.rglob("*.*"))


def test_a_record_that_is_not_the_measured_one_is_refused(tmp_path: Path) -> None:
    with pytest.raises(TunerError, match="is not the one that was measured"):
        export_artefact(launch("--other"), provenance(launch()), "shell", tmp_path)


def test_a_simulated_record_says_so_when_it_is_wanted_all_the_same(tmp_path: Path) -> None:
    record = launch(simulated=True)
    path, *_ = export_artefact(record, provenance(record), "shell", tmp_path, allow_simulated=True)
    assert "SIMULATED" in path.read_text()


def test_an_earlier_export_is_replaced_and_a_users_own_file_is_not(tmp_path: Path) -> None:
    first, second = launch("1"), launch("2")
    export_artefact(first, provenance(first), "shell", tmp_path)
    path, *_ = export_artefact(second, provenance(second), "shell", tmp_path)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["launch.json", "run.sh"]
    path.write_text("#!/bin/sh\nmine\n")
    with pytest.raises(UsageError, match="left as it is"):
        export_artefact(first, provenance(first), "shell", tmp_path)
    assert path.read_text() == "#!/bin/sh\nmine\n"


def test_a_folder_that_is_a_file_is_a_clear_message(tmp_path: Path) -> None:
    (tmp_path / "out").write_text("x")
    with pytest.raises(UsageError, match="give a folder"):
        export_artefact(launch(), provenance(launch()), "json", tmp_path / "out")


def test_nothing_is_half_written_when_the_disk_is_full(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    record = launch("1")
    path, *_ = export_artefact(record, provenance(record), "shell", tmp_path)
    before = path.read_bytes()

    def full(_descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(UsageError, match="No space left on device"):
        export_artefact(launch("2"), provenance(launch("2")), "shell", tmp_path)
    assert path.read_bytes() == before
    assert sorted(tmp_path.iterdir()) == [tmp_path / "launch.json", path]


def test_the_script_says_where_it_comes_from() -> None:
    record = launch()
    script = render_shell(record, provenance(record))["run.sh"]
    for said in ("launch 12", record_hash(record), "+10.1 %", "123.4 tok/s, baseline 100.0", "command 1.2"):
        assert said in script


@pytest.mark.parametrize("shell", SHELLS)
def test_files_that_the_command_names_are_written_and_what_only_the_trial_needed_is_not_set(
    shell: str, tmp_path: Path
) -> None:
    path = tmp_path / "a folder" / "steps.json"
    content = '{"1": "$HOME `id` \\\\n %s\'"}\n'
    record = launch(str(path), files={str(path): content}, trial_env={"SERVER_DEV_MODE": "1"})
    seen = run(record, shell, tmp_path)
    assert path.read_text() == content
    assert "SERVER_DEV_MODE" not in seen["env"]
    assert "SERVER_DEV_MODE" not in (tmp_path / "run.sh").read_text()
