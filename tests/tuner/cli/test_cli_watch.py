import io
from datetime import datetime

from rich.console import Console

from tests.tuner.study.toy_study import SPACE, ToyMachine, controller, space, study
from tuner.bench.block import BlockProgress
from tuner.cli.console import by_the_clock, remaining
from tuner.cli.watch import LiveDisplay, PlainLines
from tuner.study.policy import Policy


def test_the_live_display_shows_candidate_block_incumbent_and_time_left(tmp_path):
    screen = Console(file=io.StringIO(), force_terminal=True, width=160)
    display = LiveDisplay(screen)
    frames = []
    machine = ToyMachine()
    measure = machine.measure

    def measured(*args, on_progress, **kwargs):
        on_progress(BlockProgress("window", 4.0, 8.0, 12, 0, 33.3))
        frame = Console(file=io.StringIO(), width=160)
        frame.print(display.render())
        frames.append(frame.file.getvalue())
        return measure(*args, on_progress=on_progress, **kwargs)

    machine.measure = measured
    work = controller(
        study(tmp_path, space(SPACE, "budget.launches=6", "objective.guard.min_speedup=0.5")),
        machine,
        policy=Policy(pairs=1),
    )
    work.observer = display
    with display.live:
        work.run()
    assert "baseline (screen): measuring at concurrency" in frames[0]
    assert "window" in frames[0]
    assert "12 requests" in frames[0]
    last = frames[-1]
    assert "in the search, unconfirmed" in last
    assert "(confirm): measuring at concurrency" in last
    assert "5 of 6 launches" in last
    assert "left" in last
    assert "launch 1 of 6: the baseline" in screen.file.getvalue()


def test_plain_lines_carry_the_time_and_no_escape_codes(tmp_path, capsys):
    work = controller(study(tmp_path, space(SPACE, "budget.launches=4")), ToyMachine(), policy=Policy(pairs=1))
    work.observer = PlainLines()
    work.run()
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("[  0:0")
    assert "\x1b" not in "".join(lines)


def test_an_end_is_told_by_the_clock_with_its_day_where_it_is_another_one():
    noon = datetime(2026, 11, 30, 12, 0).timestamp()
    assert by_the_clock(90, noon) == "12:01"
    assert by_the_clock(13 * 3600, noon) == "Tuesday 01:00"
    assert by_the_clock(10 * 86400, noon) == "2026-12-10 12:00"
    assert remaining(600, virtual=True) == "about 10 min left on its virtual clock"
