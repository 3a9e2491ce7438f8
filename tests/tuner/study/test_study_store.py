import math
import sqlite3
import threading
import time

import numpy as np
import optuna
import pytest
from sqlalchemy.exc import StatementError

from tests.tuner.study.toy_study import SPACE, ToyMachine, block, controller, space, study
from tuner.errors import UsageError
from tuner.records import Failure, Verdict
from tuner.study.data import Slot
from tuner.study.database import LOCK_TIMEOUT_S, finite, open_database
from tuner.study.names import check_name
from tuner.study.policy import Policy
from tuner.study.store import AlreadyMeasured, open_study, study_exists


def test_a_second_valid_block_of_the_same_is_refused_by_the_database(tmp_path):
    store = study(tmp_path)
    slot = Slot(store.data().baseline.id, "screen", 0)
    launch = store.begin_launch(slot)
    store.put_block(launch, slot, block(8, "screen", 90.0, valid=False))
    store.put_block(launch, slot, block(8, "screen", 100.0))
    with pytest.raises(AlreadyMeasured):
        store.put_block(launch, slot, block(8, "screen", 110.0))
    assert [stored.block.tokens_per_s for stored in store.data().blocks.values()] == [90.0, 100.0]
    store.put_block(launch, Slot(slot.candidate_id, "confirm", 0), block(8, "confirm", 100.0))
    store.put_block(launch, Slot(slot.candidate_id, "screen", 1), block(8, "screen", 100.0))


def test_a_block_comes_back_as_it_was_put(tmp_path):
    store = study(tmp_path)
    slot = Slot(store.data().baseline.id, "screen", 0)
    put = block(8, "screen", 123.456)
    number = store.put_block(store.begin_launch(slot), slot, put)
    assert store.data().blocks[number].block == put


def test_numpy_scalars_become_plain_numbers_and_nan_is_refused(tmp_path):
    store = study(tmp_path)
    slot = Slot(store.data().baseline.id, "screen", 0)
    launch = store.begin_launch(slot)
    store.launch_ready(launch, {"free": float(np.float32(0.5)), "broken": math.nan, "nested": {"x": [math.inf]}})
    assert store.data().launches[0].effective == {"free": 0.5, "broken": None, "nested": {"x": [None]}}
    store.finish([Verdict("c", 1, np.int64(4), np.float64(1.5), None, None, 0.95, "better", None)], "")
    assert store.data().verdicts[0].speedup == 1.5
    with pytest.raises(StatementError, match="JSON compliant"):
        store.put_block(launch, slot, block(8, "screen", math.nan))
    assert store.data().blocks == {}
    assert finite((1.0, math.nan)) == [1.0, None]


def test_what_a_server_says_of_itself_is_kept_without_its_secrets(tmp_path):
    store = study(tmp_path)
    launch = store.begin_launch(Slot(store.data().baseline.id, "screen", 0))
    told = {"api_key": "swordfish", "args": ["--api-key", "swordfish"], "env": "HF_TOKEN=swordfish\nA=1", "steps": 3}
    store.launch_ready(launch, told)
    kept = store.data().launches[0].effective
    assert kept["steps"] == 3
    assert "A=1" in kept["env"]
    assert b"swordfish" not in b"".join(file.read_bytes() for file in tmp_path.rglob("study.db*"))


def test_why_a_launch_failed_is_kept_without_secrets(tmp_path):
    store = study(tmp_path)
    launch = store.begin_launch(Slot(store.data().baseline.id, "screen", 0))
    said = "Namespace(port=1, api_key='swordfish')\nGET https://me:swordfish@hub/x failed: HF_TOKEN=swordfish"
    store.launch_failed(launch, Failure("startup_crash", "start", "died: --api-key swordfish", evidence=said))
    kept = store.data().launches[0].failure
    assert kept.message.startswith("died: --api-key")
    assert "Namespace(port=1" in kept.evidence
    assert b"swordfish" not in b"".join(file.read_bytes() for file in tmp_path.rglob("study.db*"))


def test_blocks_survive_another_process_holding_the_database_for_a_while(tmp_path):
    store = study(tmp_path)
    slot = Slot(store.data().baseline.id, "screen", 0)
    launch = store.begin_launch(slot)
    other = sqlite3.connect(tmp_path / "study.db", check_same_thread=False, isolation_level=None)
    for engine in (store.engine, store.trials._storage.engine):  # Optuna alone gives up after five seconds
        with engine.connect() as connection:
            assert connection.exec_driver_sql("pragma busy_timeout").scalar() == LOCK_TIMEOUT_S * 1000
    other.execute("begin exclusive")
    release = threading.Timer(0.5, lambda: other.execute("commit"))
    release.start()
    began = time.monotonic()
    store.put_block(launch, slot, block(8, "screen", 100.0))
    store.trials.begin("baseline", slot.candidate_id, None)
    assert time.monotonic() - began > 0.4
    assert len(store.data().blocks) == len(store.data().trials) == 1
    other.close()


def test_optunas_own_tools_read_the_study(tmp_path):
    store = study(tmp_path, space(SPACE, "budget.launches=5"))
    data = controller(store, ToyMachine(), policy=Policy(pairs=1)).run()
    loaded = optuna.load_study(study_name="toy", storage=f"sqlite:///{tmp_path / 'study.db'}")
    assert [trial.number for trial in loaded.trials] == [trial.number for trial in data.trials]
    assert loaded.direction == optuna.study.StudyDirection.MAXIMIZE
    assert (
        loaded.best_trial.user_attrs["candidate"]
        == max((t for t in data.trials if t.feasible), key=lambda t: t.value).candidate_id
    )


def test_several_studies_share_a_database(tmp_path):
    url = f"sqlite:///{tmp_path / 'study.db'}"
    one, two = study(tmp_path, name="one"), study(tmp_path, name="two")
    controller(one, ToyMachine(), policy=Policy(pairs=1)).run()
    assert len(two.data().blocks) == len(two.data().trials) == 0
    assert study_exists("two", url)
    with pytest.raises(UsageError, match=r"did you mean|Did you mean 'one'"):
        open_study("on", url)


# -- opening what is not ours ------------------------------------------------------------------------------------------


def test_a_missing_database_is_not_created_by_looking(tmp_path):
    url = f"sqlite:///{tmp_path / 'gone.db'}"
    assert not study_exists("x", url)
    with pytest.raises(UsageError, match="no database"):
        open_database(url, create=False)
    assert list(tmp_path.iterdir()) == []


def test_a_file_that_is_no_database_is_left_alone(tmp_path):
    file = tmp_path / "study.db"
    file.write_bytes(b"not a database at all" * 100)
    for create in (True, False):
        with pytest.raises(UsageError, match=r"cannot be opened|not a database"):
            open_database(f"sqlite:///{file}", create=create)
    assert file.read_bytes() == b"not a database at all" * 100


def test_another_programs_database_is_refused(tmp_path):
    with sqlite3.connect(tmp_path / "study.db") as connection:
        connection.execute("create table recipes (id integer)")
    for create in (True, False):
        with pytest.raises(UsageError, match=r"another program|no study"):
            open_database(f"sqlite:///{tmp_path / 'study.db'}", create=create)


def test_another_schema_version_is_refused_with_advice_and_untouched(tmp_path):
    study(tmp_path).close()
    with sqlite3.connect(tmp_path / "study.db") as connection:
        connection.execute("update tuner_schema set version = 99")
    with pytest.raises(UsageError, match=r"schema version 99.*--study NAME"):
        study(tmp_path)
    with sqlite3.connect(tmp_path / "study.db") as connection:
        assert connection.execute("select version from tuner_schema").fetchall() == [(99,)]


def test_a_damaged_database_is_noticed_when_it_is_opened(tmp_path):
    store = study(tmp_path)
    controller(store, ToyMachine(), policy=Policy(pairs=1)).run()
    with store.engine.connect() as connection:
        connection.exec_driver_sql("pragma wal_checkpoint(truncate)")
    store.close()
    file = tmp_path / "study.db"
    content = bytearray(file.read_bytes())
    for offset in range(4096 * 3, len(content) - 4096, 4096):
        content[offset : offset + 64] = b"\xff" * 64
    file.write_bytes(bytes(content))
    with pytest.raises(UsageError, match=r"damaged|cannot be opened|not a database"):
        open_study("toy", f"sqlite:///{file}")


@pytest.mark.parametrize("url", ["nonsense", "oracle+nope://x/y"])
def test_a_storage_that_cannot_be_used_is_a_usage_error(url):
    with pytest.raises(UsageError):
        open_study("x", url)


@pytest.mark.parametrize("name", ["", "..", "../x", "a/b", "a\\b", ".hidden", "a" * 65, "a\nb", "ä", "-x"])
def test_a_name_that_could_leave_the_folder_is_refused(name):
    with pytest.raises(UsageError):
        check_name(name)
