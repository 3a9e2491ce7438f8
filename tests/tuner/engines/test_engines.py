"""From neutral settings to a launch record, and from a server's words to what is in effect."""

from __future__ import annotations

import json
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tuner.engines.base import Installed, SettingSpec, engine_kinds, env_problems, get_engine
from tuner.errors import EnvironmentBroken, UsageError
from tuner.records import LaunchRecord
from tuner.secrets import is_secret

BUNDLED = get_engine("bundled")
COMMAND = get_engine("command")


def bundled(settings: dict[str, Any], **args: Any) -> LaunchRecord:
    return BUNDLED.record(model="smollm2-135m", args=args, env={}, settings=settings, host="127.0.0.1", port=31234)


def command(template: list[str], settings: dict[str, Any] | None = None, **args: Any) -> LaunchRecord:
    return COMMAND.record(
        model="a model", args={"command": template, **args}, env={}, settings=settings or {}, host="::1", port=31234
    )


def flags(record: LaunchRecord) -> dict[str, str]:
    rest = list(record.argv[4:])
    return dict(zip(rest[::2], rest[1::2], strict=True))


def test_an_unknown_kind_is_refused_with_the_nearest() -> None:
    with pytest.raises(UsageError, match="did you mean 'bundled'"):
        get_engine("bundeld")


@pytest.mark.parametrize("kind", engine_kinds())
def test_every_engine_keeps_the_interface(kind: str) -> None:
    engine = get_engine(kind)
    assert engine.kind == kind
    assert engine.hot <= set(engine.settings) | engine.hot
    if isinstance(engine, Installed):
        with suppress(EnvironmentBroken):  # apart from the tuner, and not everywhere
            assert engine.version()
    else:
        assert engine.version()
    assert engine.check_model("") is not None


class TestBundled:
    def test_the_baseline_is_a_server_without_any_speculation_flag_but_none(self) -> None:
        record = bundled({"speculation": "none"})
        assert record.argv[:4] == (sys.executable, "-m", "engine", "serve")
        assert flags(record) == {
            "--model": "smollm2-135m",
            "--served-model-name": "smollm2-135m",
            "--host": "127.0.0.1",
            "--port": "31234",
            "--speculation": "none",
        }

    def test_ranks_and_device_are_told_in_the_engines_words_and_expected_back(self) -> None:
        record = bundled({"speculation": "none", "tp": 2, "allreduce": "gloo"}, device="gpu", cuda_graphs=True)
        told = {"--tp": "2", "--allreduce": "gloo", "--device": "cuda", "--cuda-graphs": "required"}
        assert told.items() <= flags(record).items()
        expected = {"tp": 2, "allreduce": "gloo", "device": "cuda", "cuda_graphs": "required"}
        assert expected.items() <= record.expected.items()
        effective = {**record.expected, "allreduce": "shm"}
        assert [m.setting for m in BUNDLED.mismatches(record, {"effective": effective})] == ["allreduce"]

    def test_what_the_engine_would_derive_is_told_explicitly_and_expected_back(self) -> None:
        record = bundled({"speculation": "ngram", "num_steps": 3, "disable_batch_threshold": 8})
        assert flags(record)["--num-draft-tokens"] == "4"
        assert record.expected == {
            "speculation": "ngram",
            "num_steps": 3,
            "topk": 1,
            "num_draft_tokens": 4,
            "spec_version": "v1",
            "disable_batch_threshold": 8,
        }
        assert record.settings == {"speculation": "ngram", "num_steps": 3, "disable_batch_threshold": 8}

    def test_a_tree_and_a_schedule_are_told_in_full(self) -> None:
        record = bundled({"speculation": "eagle3", "num_steps": 2, "topk": 4, "steps_by_batch": "1:2,8:0"})
        assert flags(record)["--num-draft-tokens"] == "16"
        assert flags(record)["--steps-by-batch"] == "1:2,8:0"
        assert "disable_batch_threshold" not in record.expected
        assert BUNDLED.hot >= {"speculation", "num_steps", "steps_by_batch"}

    def test_never_is_passed_as_never(self) -> None:
        record = bundled({"speculation": "ngram", "num_steps": 1, "disable_batch_threshold": "never"})
        assert flags(record)["--disable-batch-threshold"] == "never"
        assert BUNDLED.mismatches(record, {"effective": {**record.expected, "disable_batch_threshold": None}}) == []

    @pytest.mark.parametrize(
        ("settings", "args", "said"),
        [
            ({"speculation": "ngrm", "num_steps": 2}, {}, "did you mean 'ngram'"),
            (
                {"speculation": "ngram", "num_steps": 9},
                {},
                "num_steps: 9 is not valid; valid: a whole number from 1 up to 8",
            ),
            ({"speculation": "ngram", "num_steps": True}, {}, "num_steps: True is not valid"),
            ({"speculation": "ngram"}, {}, "num_steps: is needed"),
            ({"speculation": "ngram", "num_steps": 2, "topk": 4}, {}, "the drafter 'ngram' only chains"),
            ({"speculation": "eagle3", "num_steps": 2, "topk": 4, "num_draft_tokens": 30}, {}, "holds at most 21"),
            ({"speculation": "eagle3", "num_steps": 2, "steps_by_batch": "1:0,8:3"}, {}, "outside 0 to num_steps"),
            ({"speculation": "eagle3", "num_steps": 2, "steps_by_batch": "8:2"}, {}, "must begin with 1"),
            ({"speculation": "eagle3", "num_steps": 2, "steps_by_batch": "1-2"}, {}, "not of the form"),
            ({"speculation": "ngram", "num_steps": 2, "num_draft_tokens": 4}, {}, "has 3, not 4"),
            ({"speculation": "none", "num_steps": 2}, {}, "has no meaning while speculation is 'none'"),
            ({"speculation": "ngram", "num_steps": 2, "ngram_min": 5, "ngram_max": 3}, {}, "above ngram_max"),
            ({"speculation": "none"}, {"speculation": "none"}, "both in engine.args and among the settings"),
            ({"speculation": "none"}, {"page_sise": 16}, "did you mean 'page_size'"),
            ({"speculation": "none"}, {"tp": 65}, "tp: 65 is not valid"),
            ({"speculation": "none", "allreduce": "shm"}, {"tp": 1}, "no meaning with one rank"),
            ({"speculation": "none", "allreduce": "smh"}, {"tp": 2}, "allreduce: 'smh' is not valid"),
            ({"speculation": "ngram", "num_steps": 2, "disable_batch_threshold": 0}, {}, "or never"),
        ],
    )
    def test_what_cannot_work_is_said_and_never_launched(self, settings: dict, args: dict, said: str) -> None:
        assert said in "; ".join(BUNDLED.problems(args, settings))
        with pytest.raises(UsageError):
            bundled(settings, **args)

    def test_every_setting_that_the_real_command_line_has_is_accepted_by_it(self) -> None:
        record = bundled(
            {"speculation": "ngram", "num_steps": 2, "ngram_min": 2, "ngram_max": 3},
            dtype="float32",
            context_length=256,
            kv_tokens=512,
            page_size=16,
            max_running_requests=4,
            prefill_tokens=64,
            threads=1,
            seed=7,
            tp=1,
        )
        known = subprocess.run([*record.argv[:4], "--help"], capture_output=True, text=True, env={"COLUMNS": "200"})
        assert known.returncode == 0, known.stderr
        assert [flag for flag in flags(record) if flag not in known.stdout] == []

    @pytest.mark.parametrize(
        ("effective", "setting"),
        [({"speculation": "none"}, "speculation"), ({"num_steps": 2, "num_draft_tokens": 3}, "num_steps")],
    )
    def test_what_is_not_in_effect_is_a_mismatch_with_the_servers_reason(self, effective: dict, setting: str) -> None:
        record = bundled({"speculation": "ngram", "num_steps": 3})
        info = {
            "effective": {**record.expected, **effective},
            "differences": [{"setting": setting, "requested": "x", "effective": "y", "reason": "no room"}],
        }
        first = BUNDLED.mismatches(record, info)[0]
        assert (first.setting, first.requested, first.reason) == (setting, record.expected[setting], "no room")
        assert first.effective == effective[setting]

    @pytest.mark.parametrize(("effective", "differs"), [(512, False), (528, True), (496, True)])
    def test_a_pool_rounded_up_to_whole_pages_is_what_was_asked_for(self, effective: int, differs: bool) -> None:
        record = bundled({"speculation": "none"}, kv_tokens=500)
        info = {"effective": {**record.expected, "kv_tokens": effective, "page_size": 16}}
        assert bool(BUNDLED.mismatches(record, info)) == differs

    def test_silence_about_a_setting_is_a_mismatch(self) -> None:
        record = bundled({"speculation": "none"})
        assert [m.setting for m in BUNDLED.mismatches(record, {})] == ["speculation"]

    @pytest.mark.parametrize("state", ["failed", "fell_back"])
    def test_a_requested_path_that_did_not_come_up_is_a_mismatch_and_an_unrequested_one_is_not(
        self, state: str
    ) -> None:
        record = bundled({"speculation": "ngram", "num_steps": 3})
        paths = {"native_kernels": {"state": state}, "ngram": {"state": state, "detail": "no suffix index"}}
        found = BUNDLED.mismatches(record, {"effective": record.expected, "paths": paths})
        assert [(m.setting, m.effective, m.reason) for m in found] == [("speculation", state, "ngram: no suffix index")]

    def test_a_model_that_does_not_exist_is_refused_with_the_nearest(self, tmp_path: Path) -> None:
        assert BUNDLED.check_model("smollm2-135m") is None
        assert "did you mean 'smollm2-135m'" in str(BUNDLED.check_model("smollm-135m"))
        assert "config.json" in str(BUNDLED.check_model(str(tmp_path)))
        (tmp_path / "config.json").write_text('{"model_type": "llama"}')
        assert BUNDLED.check_model(str(tmp_path)) is None

    def test_what_no_engine_could_load_is_refused_without_loading_it(self, tmp_path: Path) -> None:
        config, weights = tmp_path / "config.json", tmp_path / "x.gguf"
        for text, said in (("{}", "names no architecture"), ("[]", "holds no JSON object"), ("{", "cannot be read")):
            config.write_text(text)
            for kind in ("bundled", "vllm", "sglang"):
                assert said in str(get_engine(kind).check_model(str(tmp_path)))
        weights.write_bytes(b"<!DOCTYPE html>")
        for kind in ("bundled", "llama_server"):
            assert "is no GGUF file: it begins with b'<!DO'" in str(get_engine(kind).check_model(str(weights)))

    def test_a_path_is_absolute_in_the_record_because_it_is_deployed_elsewhere(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        (tmp_path / "tiny.gguf").write_bytes(b"GGUF")
        monkeypatch.chdir(tmp_path)
        record = BUNDLED.record(model="tiny.gguf", args={}, env={}, settings={}, host="127.0.0.1", port=1)
        assert flags(record)["--model"] == str(tmp_path / "tiny.gguf")
        assert record.served_model == "tiny"

    def test_the_engine_is_never_imported(self) -> None:
        code = "import sys, tuner.engines.bundled as b; b.BundledEngine().version(); print('engine' in sys.modules)"
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
        assert done.stdout.strip() == "False"


class TestCommand:
    def test_placeholders_are_filled_and_plain_braces_stay(self) -> None:
        record = command(
            ["serve", "{host}:{port}", "--model", "{model}", "--spec", '{{"steps": {num_steps}, "on": {on}}}'],
            {"num_steps": 3, "on": True},
        )
        assert record.argv[1:4] == ("::1:31234", "--model", "a model")
        assert json.loads(record.argv[5]) == {"steps": 3, "on": True}

    def test_an_optional_placeholder_takes_its_flag_along_when_it_is_inactive(self) -> None:
        template = ["serve", "--verbose", "--port", "{port}", "--steps", "{steps?}", "--topk={topk?}", "-q"]
        assert command(template).argv == ("serve", "--verbose", "--port", "31234", "-q")
        assert command(template, {"steps": 2, "topk": 1}).argv[4:7] == ("--steps", "2", "--topk=1")

    @pytest.mark.parametrize(
        ("template", "settings", "args", "said"),
        [
            (["s", "{port}", "{num_stps}"], {"num_steps": 1}, {}, "did you mean '{num_steps}'"),
            (["s", "{port}"], {"num_steps": 1}, {}, "num_steps: is used by no placeholder"),
            (["s", "{port}"], {}, {"tp": 2}, "tp: is used by no placeholder"),
            (["s", "{port}"], {}, {"ready_pth": "/health"}, "ready_pth: is used by no placeholder"),
            (["s", "{port}"], {}, {"ready_path": "health"}, "begins with '/'"),
            (["s"], {}, {}, "{port} is missing"),
            (["s", "{port}", '{"a": 1}'], {}, {}, "plain braces"),
            (["s", "{port:>9}"], {}, {}, "not a name"),
            (["s", "{port!r}"], {}, {}, "not a name"),
            (["s", "{port.real}"], {}, {}, "not a name"),
            (["s", "{}"], {}, {}, "not a name"),
            (["s", "{port"], {}, {}, "plain braces"),
            ([], {}, {}, "args.command: is needed"),
        ],
    )
    def test_a_template_that_cannot_be_right_is_refused(
        self, template: list[str], settings: dict, args: dict, said: str
    ) -> None:
        assert said in "; ".join(COMMAND.problems({"command": template, **args}, settings))
        with pytest.raises(UsageError):
            command(template, settings, **args)

    @given(st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"])))
    def test_a_value_arrives_as_it_is_whatever_it_holds(self, value: str) -> None:
        assert command(["s", "{port}", "{value}"], {"value": value}).argv[2] == value

    @given(st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"])))
    def test_any_text_can_be_written_with_doubled_braces(self, text: str) -> None:
        escaped = text.replace("{", "{{").replace("}", "}}")
        assert command(["s", "{port}", escaped]).argv[2] == text

    def test_what_the_server_says_counts_and_its_silence_does_not(self) -> None:
        record = command(["s", "{port}", "{num_steps}"], {"num_steps": 3})
        assert COMMAND.mismatches(record, {"version": "1"}) == []
        assert [m.effective for m in COMMAND.mismatches(record, {"num_steps": 1})] == [1]
        assert [m.effective for m in COMMAND.mismatches(record, {"effective": {"num_steps": 2}})] == [2]


@pytest.mark.parametrize("name", ["HF_TOKEN", "OPENAI_API_KEY", "--api-key", "DB_PASSWORD", "AWS_SECRET_ACCESS_KEY"])
def test_secrets_are_known_by_name_and_never_kept(name: str) -> None:
    assert is_secret(name)
    assert "looks like a secret" in env_problems({name: "abc"})[0]


@pytest.mark.parametrize("name", ["TOKENIZERS_PARALLELISM", "HF_TOKEN_PATH", "MAX_TOKENS", "--kv-tokens", "AUTHOR"])
def test_what_only_sounds_like_a_secret_is_none(name: str) -> None:
    assert not is_secret(name)


@pytest.mark.parametrize(
    ("spec", "good", "bad"),
    [
        (SettingSpec("float", "x", low=0, high=1), [0, 1, 0.5], [2, -0.1, "0.5", True, float("nan")]),
        (SettingSpec("bool", "x"), [True, False], [0, "true"]),
        (SettingSpec("int", "x", low=1, words=("never",)), [1, 10**9, "never"], [0, 1.0, "always", None]),
        (SettingSpec("int", "x", choices=(1, 2)), [1, 2], [True, 3, "1"]),
    ],
)
def test_a_setting_takes_its_own_values_only(spec: SettingSpec, good: list, bad: list) -> None:
    assert [spec.problem(value) for value in good] == [None] * len(good)
    assert all("valid: " in str(spec.problem(value)) for value in bad)
