from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from tuner.bench.counters import delta, parse_snapshot


def snapshot(text, at=0):
    return parse_snapshot(text.encode(), at, at + 2_000_000)


ENGINE = """# HELP engine_generated_tokens_total Output tokens.
# TYPE engine_generated_tokens_total counter
engine_generated_tokens_total {generated}
# TYPE engine_spec_verify_steps_total counter
engine_spec_verify_steps_total {steps}
# TYPE engine_spec_accepted_tokens_total counter
engine_spec_accepted_tokens_total {accepted}
"""


def test_accept_length_is_drafts_plus_one_over_the_window_alone():
    """The counters began before the window, with another workload."""
    before = snapshot(ENGINE.format(generated=1000, steps=1000, accepted=0))
    after = snapshot(ENGINE.format(generated=1300, steps=1100, accepted=200), at=8_000_000_000)
    change = delta(before, after)
    assert change.generated == 300
    assert change.accept_length == pytest.approx(3.0)
    assert change.uncertain_s == pytest.approx(0.002)
    assert change.end_ns - change.start_ns == 8_000_000_000


def test_acceptance_per_depth_is_told_alike_for_engines_that_count_differently():
    def exactly(*counts):
        lines = [f'engine_spec_rounds_by_accepted_total{{accepted="{d}"}} {n}\n' for d, n in enumerate(counts)]
        return ENGINE.format(generated=0, steps=sum(counts), accepted=0) + (
            "# TYPE engine_spec_rounds_by_accepted_total counter\n" + "".join(lines)
        )

    def at_least(*counts):
        name = "vllm:spec_decode_num_accepted_tokens_per_pos"
        lines = [f'{name}_total{{engine="{rank}",position="{p}"}} {n}\n' for rank in "01" for p, n in enumerate(counts)]
        head = "# TYPE vllm:spec_decode_num_drafts counter\nvllm:spec_decode_num_drafts_total 100\n"
        return head + f"# TYPE {name} counter\n" + "".join(lines)

    one = delta(snapshot(exactly(0, 0, 0, 0)), snapshot(exactly(40, 30, 20, 10)))
    other = delta(snapshot(at_least(0, 0, 0)), snapshot(at_least(30, 15, 5)))
    assert one.accepted_at_depth == other.accepted_at_depth == (60, 30, 10)


def test_no_verify_steps_give_no_accept_length():
    same = snapshot(ENGINE.format(generated=5, steps=0, accepted=0))
    assert delta(same, same).accept_length is None


def test_vllm_names_and_ranks_are_summed():
    def page(drafts, accepted, tokens):
        ranks = "".join(
            f'vllm:spec_decode_num_drafts_total{{engine="{rank}"}} {drafts}\n'
            f'vllm:spec_decode_num_drafts_created{{engine="{rank}"}} 1.7e9\n'
            for rank in (0, 1)
        )
        return (
            f"# TYPE vllm:spec_decode_num_drafts counter\n{ranks}"
            "# TYPE vllm:spec_decode_num_accepted_tokens counter\n"
            f"vllm:spec_decode_num_accepted_tokens_total {accepted}\n"
            f"# TYPE vllm:generation_tokens counter\nvllm:generation_tokens_total {tokens}\n"
        )

    change = delta(snapshot(page(0, 0, 0)), snapshot(page(50, 160, 260)))
    assert (change.generated, change.steps) == (260, 100)
    assert change.accept_length == pytest.approx(2.6)


def test_sglang_counts_tokens_at_the_end_of_a_request_so_they_check_no_window():
    page = (
        "# TYPE sglang:generation_tokens counter\nsglang:generation_tokens_total {0}\n"
        "# TYPE sglang:spec_verify_calls counter\nsglang:spec_verify_calls_total {1}\n"
    )
    change = delta(snapshot(page.format(100, 50)), snapshot(page.format(400, 150)))
    assert change.generated is None
    assert change.accept_length == pytest.approx(3.0)


@pytest.mark.parametrize("page", ["", "<html>not found</html>", "other_total 5\n", '{"a": 1}', "engine_x{ 5"])
def test_pages_without_known_counters_are_no_snapshot(page):
    assert snapshot(page) is None


def test_a_restart_between_the_readings_is_noticed():
    big, small = (snapshot(ENGINE.format(generated=n, steps=0, accepted=0)) for n in (500, 20))
    assert delta(big, small) is None
    assert delta(None, big) is None


@pytest.mark.parametrize("value", ["NaN", "+Inf", "-1", "1e300", "{", '{a="'])
def test_a_page_with_counts_that_are_none_is_no_page(value):
    page = f"engine_spec_verify_steps_total 3\nengine_generated_tokens_total {value}\n".encode()
    assert parse_snapshot(page, 0, 1) is None


def test_seconds_and_rounds_of_the_model_process_are_those_of_the_window() -> None:
    def page(rounds: int, draft: float, forward: float) -> bytes:
        return (
            f"engine_generated_tokens_total {10 * rounds}\nengine_rounds_total {rounds}\n"
            f"engine_draft_seconds_total {draft}\nengine_forward_seconds_total {forward}\n"
        ).encode()

    change = delta(parse_snapshot(page(10, 0.5, 2.0), 0, 1), parse_snapshot(page(30, 0.75, 6.0), 10, 11))
    assert change is not None
    assert change.rounds == 20
    assert change.seconds == {"draft": 0.25, "forward": 4.0}


def test_of_a_page_of_megabytes_only_what_is_of_use_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is read while the load runs, and a loop that is held up invalidates the block."""
    other = "".join(f'other_seconds_bucket{{path="/{i}",le="{i}"}} {i}\n' for i in range(100_000)).encode()
    page = other + ENGINE.format(generated=7, steps=3, accepted=1).encode() + other
    seen = []

    def parse(text: str) -> Any:
        seen.append(len(text))
        return text_string_to_metric_families(text)

    monkeypatch.setattr("tuner.bench.counters.text_string_to_metric_families", parse)
    found = parse_snapshot(page, 0, 1)
    assert found is not None
    assert found.values["engine_generated_tokens_total"] == 7
    assert seen[0] < 1000 < len(page)
