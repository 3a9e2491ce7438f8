import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import sqlalchemy as sa

from tests.tuner.study.toy_study import study
from tuner.errors import StudyStopped, UsageError
from tuner.study.lease import EXPIRES_S, Holder, acquire, alive, hold, holder, this_process
from tuner.study.tables import workers


def set_holder(store, **values):
    with store.engine.begin() as connection:
        connection.execute(sa.update(workers).values(**values))


def test_two_tuners_on_one_study_are_refused_and_the_first_is_named(tmp_path):
    store = study(tmp_path)
    with hold(store.engine, "toy"), pytest.raises(UsageError, match=f"process {os.getpid()} on") as refused:
        acquire(store.engine, "toy")
    assert refused.value.exit_code == 2


def test_a_lease_that_was_given_back_is_free(tmp_path):
    store = study(tmp_path)
    with hold(store.engine, "toy") as lease:
        lease.check()
        assert holder(store.engine, "toy") == this_process()
    assert holder(store.engine, "toy") is None
    with hold(store.engine, "toy"):
        pass


def test_the_lease_of_a_dead_process_is_taken_over_at_once(tmp_path):
    store = study(tmp_path)
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    acquire(store.engine, "toy")
    started = Path(f"/proc/{child.pid}/stat").read_text().rsplit(")", 1)[1].split()[19]
    set_holder(store, pid=child.pid, pid_started=started)
    with pytest.raises(UsageError):
        acquire(store.engine, "toy")
    os.kill(child.pid, signal.SIGSTOP)  # a stopped tuner may go on at any moment
    with pytest.raises(UsageError):
        acquire(store.engine, "toy")
    child.kill()
    child.wait()
    acquire(store.engine, "toy").check()


def test_a_reused_pid_and_another_boot_are_not_the_holder(tmp_path):
    us = this_process()
    assert alive(us, 0, 1)
    assert not alive(Holder(us.host, us.boot, us.pid, "12345"), 1e12, 0)
    assert not alive(Holder(us.host, "another boot", us.pid, us.pid_started), 1e12, 0)


def test_another_hosts_lease_holds_until_it_expires(tmp_path):
    store = study(tmp_path)
    acquire(store.engine, "toy", clock=lambda: 1000.0)
    set_holder(store, host="elsewhere")
    with pytest.raises(UsageError, match="on elsewhere"):
        acquire(store.engine, "toy", clock=lambda: 1000.0 + EXPIRES_S - 1)
    acquire(store.engine, "toy", clock=lambda: 1000.0 + EXPIRES_S + 1).check()


def test_a_tuner_whose_lease_was_taken_over_stops(tmp_path):
    store = study(tmp_path)
    lease = acquire(store.engine, "toy")
    set_holder(store, token="of another")
    with pytest.raises(StudyStopped, match="taken over"):
        lease.check()
    lease.release()
    with store.engine.connect() as connection:
        assert connection.execute(sa.select(workers.c.token)).scalar() == "of another"


def test_a_holder_in_another_pid_namespace_lives_until_its_lease_expires():
    us = this_process()
    boot = us.boot.partition("/")[0]
    elsewhere = Holder(us.host, f"{boot}/12345", us.pid, us.pid_started)
    assert alive(elsewhere, expires_at=2, now=1)
    assert not alive(elsewhere, expires_at=1, now=2)
    assert not alive(Holder(us.host, "another boot/12345", us.pid, us.pid_started), 2, 1)
    assert alive(Holder(us.host, boot, us.pid, us.pid_started), 1, 2), "of a version that did not note the namespace"


def test_starts_at_the_same_moment_are_refused_in_words_that_name_the_one_that_works(tmp_path):
    """Of several at once one begins; all others, and all that come later at once, are told which."""
    for store in (study(tmp_path), None):
        engines = [study(tmp_path).engine for _ in range(4)]
        barrier = threading.Barrier(len(engines))
        said: list[str] = []

        def start(engine, barrier=barrier, said=said):
            barrier.wait()
            try:
                acquire(engine, "toy")
                said.append("began")
            except UsageError as error:
                said.append(str(error))

        threads = [threading.Thread(target=start, args=(engine,)) for engine in engines]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        refused = [words for words in said if words != "began"]
        assert len(refused) == (len(engines) if store is None else len(engines) - 1), said
        for words in refused:
            assert f"process {os.getpid()} on" in words
            assert "Nothing was started; wait for it, or end it and run the same again" in words
