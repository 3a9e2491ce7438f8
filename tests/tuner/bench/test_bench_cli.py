import json

import pytest
import typer
from bench_harness import QUICK, TIMING
from typer.testing import CliRunner

from tuner.bench import plan as plans
from tuner.cli.bench import COLUMNS, command, parse_levels
from tuner.errors import UsageError

app = typer.Typer()
app.command()(command)


@pytest.fixture
def tuner_bench(monkeypatch):
    """Runs the command with windows of half a second."""
    monkeypatch.setitem(plans.PROFILES, "short", QUICK)
    return lambda *arguments: CliRunner().invoke(app, [str(a) for a in arguments], env={"COLUMNS": "160"})


def test_a_running_server_is_measured_at_each_level(server, tuner_bench):
    result = tuner_bench(server.url + "/v1", "--concurrency", "1,4", "--max-tokens", 16)
    assert result.exit_code in (0, 1), result.output  # 1: a busy machine may fail a timing gate
    assert "null at http://127.0.0.1" in result.stdout
    asked = "prompts (mixed, its tuning part), up to 16 tokens each at temperature 0 (greedy), at concurrency 1, 4: "
    assert asked in result.stdout
    assert "s behind" in result.stdout.splitlines()[0]
    assert all(column in result.stdout for column in COLUMNS)
    rows = [line for line in result.stdout.splitlines() if line.startswith("│")]
    assert [row.split("│")[1].strip() for row in rows] == ["1", "4"]


def test_json_is_one_document_with_every_figure(server, tuner_bench):
    result = tuner_bench(server.url, "--concurrency", 2, "--max-tokens", 16, "--json", "--model", "null")
    document = json.loads(result.stdout)
    (block,) = document["blocks"]
    assert (document["model"], block["concurrency"], block["success_rate"]) == ("null", 2, 1.0)
    assert document["workload"].items() >= {"prompts": "mixed", "max_tokens": 16, "temperature": 0.0}.items()
    assert document["workload"]["count"] >= 20
    assert block["tokens_per_s"] == pytest.approx(400, rel=0.2)
    assert {gate["name"] for gate in block["gates"] if not gate["ok"]} <= TIMING


def test_nobody_there_is_said_and_ends_with_3(tuner_bench, own_server):
    own_server.stop()
    result = tuner_bench(own_server.url)
    assert result.exit_code == 3
    assert f"Nothing answers at {own_server.url}" in result.stderr
    assert "Traceback" not in result.output


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--concurrency", "0"], "must be at least 1"),
        (["--concurrency", "1,x"], "whole numbers"),
        (["--concurrency", "4,4"], "each level once"),
        (["--concurrency", ""], "whole numbers"),
        (["--max-tokens", "-1"], "--max-tokens -1"),
        (["--temperature", "7"], "--temperature"),
        (["--profile", "huge"], "valid: short, full"),
        (["--prompts", "nowhere.jsonl"], "no such file"),
        (["--model", "gpt-x"], "it serves: null"),
        (["--api-key", "kéy"], "API key"),
    ],
)
def test_wrong_usage_ends_with_2_and_sends_no_load(server, tuner_bench, arguments, message):
    result = tuner_bench(server.url, *arguments)
    assert result.exit_code == 2
    assert message in result.stderr
    assert server.told()["asked"] == []


def test_a_wrong_url_ends_with_2(tuner_bench):
    result = tuner_bench("ftp://localhost")
    assert result.exit_code == 2
    assert "not an http(s) URL" in result.stderr


def test_held_out_prompts_stay_unseen(server, tuner_bench):
    tuner_bench(server.url, "--concurrency", 4, "--max-tokens", 4)
    from tuner.bench.prompts import load_prompts

    held_out = {prompt.text for prompt in load_prompts("mixed", split="held_out")}
    sent = {body["messages"][0]["content"] for body in server.told()["asked"]}
    assert len(sent) > 72
    assert not any(text.endswith(secret) for text in sent for secret in held_out)


def test_levels():
    assert parse_levels("1, 8,32") == [1, 8, 32]
    with pytest.raises(UsageError):
        parse_levels("8;9")
