"""Optuna's own dashboard opens a study, and shows its trials with the candidates that they name."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Iterator
from pathlib import Path
from wsgiref.simple_server import WSGIRequestHandler, make_server

import httpx
import optuna
import optuna_dashboard
import pytest
from report_studies import REFERENCE, reference


class Quiet(WSGIRequestHandler):
    def log_message(self, *_args: object) -> None:
        """Says nothing."""


@pytest.fixture
def dashboard(tmp_path: Path) -> Iterator[str]:
    shutil.copy(REFERENCE, tmp_path / "study.db")
    storage = optuna.storages.RDBStorage(f"sqlite:///{tmp_path / 'study.db'}")
    server = make_server("127.0.0.1", 0, optuna_dashboard.wsgi(storage), handler_class=Quiet)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join()
    server.server_close()
    storage.remove_session()
    storage.engine.dispose()


def test_the_dashboard_lists_the_study_and_its_trials(dashboard: str) -> None:
    with httpx.Client(base_url=dashboard, trust_env=False, timeout=30) as client:
        (study,) = client.get("/api/studies").raise_for_status().json()["study_summaries"]
        assert study["study_name"] == "quickstart"
        assert study["directions"] == ["maximize"]
        shown = client.get(f"/api/studies/{study['study_id']}").raise_for_status().json()["trials"]
        assert client.get("/dashboard").status_code == 200
    trials = reference().trials
    assert len(shown) == len(trials)
    for mine, theirs in zip(trials, shown, strict=True):
        attributes = {each["key"]: each["value"] for each in theirs["user_attrs"]}
        assert mine.candidate_id in attributes["candidate"]
        assert theirs["values"] == [mine.value]
