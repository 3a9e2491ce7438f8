import os
import signal
import subprocess
import sys

import pytest

from tests.tuner.study.toy_study import ToyMachine, controller, study
from tuner.study.interrupt import Interrupted, Interrupts


@pytest.fixture(autouse=True)
def as_a_shell_starts_it():
    """A job in the background is started with some signals ignored, and what is ignored stays so."""
    before = {
        number: signal.signal(number, signal.SIG_DFL) for number in (signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2)
    }
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_becomes_an_exception_with_the_exit_code_of_a_shell(number, code):
    with pytest.raises(Interrupted) as interrupted, Interrupts().installed():
        os.kill(os.getpid(), number)
    assert interrupted.value.exit_code == code
    assert str(interrupted.value) == number.name


@pytest.mark.parametrize("number", [signal.SIGUSR1, signal.SIGUSR2, signal.SIGQUIT])
def test_what_a_dead_servers_worker_may_send_to_its_next_parent_does_not_end_the_tuner(number, monkeypatch):
    monkeypatch.setattr("os.isatty", lambda _fd: False)
    interrupts = Interrupts()
    with interrupts.installed():
        os.kill(os.getpid(), number)
        interrupts.check()
        code = f"import signal; print(signal.getsignal({int(number)}).name)"
        child = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
        assert child.stdout.strip() == "SIG_DFL", "a server inherits nothing of that"


def test_at_a_terminal_the_key_for_sigquit_ends_a_study_in_order(monkeypatch):
    monkeypatch.setattr("os.isatty", lambda _fd: True)
    with pytest.raises(Interrupted) as interrupted, Interrupts().installed():
        os.kill(os.getpid(), signal.SIGQUIT)
    assert interrupted.value.exit_code == 131


def test_handlers_are_put_back():
    before = signal.getsignal(signal.SIGTERM)
    with Interrupts().installed():
        assert signal.getsignal(signal.SIGTERM) != before
    assert signal.getsignal(signal.SIGTERM) == before


def test_within_a_shield_a_signal_waits():
    interrupts, reached = Interrupts(), []

    def work():
        with interrupts.shield():
            with interrupts.shield():
                os.kill(os.getpid(), signal.SIGINT)
            reached.append("the end of the outer shield")
        reached.append("beyond it")

    with interrupts.installed(), pytest.raises(Interrupted):
        work()
    assert reached == ["the end of the outer shield"]


def test_after_the_first_signal_others_change_nothing():
    interrupts = Interrupts()
    with interrupts.installed():
        with pytest.raises(Interrupted):
            os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGTERM)


class Swallows:
    """Loses every exception of its destructor, as Python does."""

    def __del__(self):
        os.kill(os.getpid(), signal.SIGINT)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_signal_whose_exception_was_lost_takes_effect_at_the_next_check():
    interrupts = Interrupts()
    with interrupts.installed():
        interrupts.check()
        lost = Swallows()
        del lost  # nothing is raised here
        with pytest.raises(Interrupted, match="SIGINT"):
            interrupts.check()


def test_an_interrupted_study_stops_its_server_and_goes_on_from_there(tmp_path):
    store = study(tmp_path)
    machine = ToyMachine()
    interrupts = Interrupts()
    measure = machine.measure

    def interrupted(*args, **kwargs):
        if len(machine.measured) == 3:
            os.kill(os.getpid(), signal.SIGTERM)
        return measure(*args, **kwargs)

    machine.measure = interrupted
    work = controller(store, machine)
    work.shield = interrupts.shield
    with pytest.raises(Interrupted), interrupts.installed():
        work.run()
    assert not machine.running
    data = store.data()
    assert [launch.state for launch in data.launches] == ["done", "interrupted"]
    assert len(data.blocks) == 3
    machine.measure = measure
    done = controller(store, machine).run()
    assert done.state == "done"
    assert sum(launch.state != "interrupted" for launch in done.launches) == 14
    assert len(machine.measured) == len(done.blocks) == 28
