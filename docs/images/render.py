"""Draws the README's picture: the top of a study's report, as a browser shows it. Needs Chromium and playwright.

python docs/images/render.py STUDY.db docs/images/report.png
"""

from __future__ import annotations

import shutil
import sys
import tempfile
from contextlib import closing
from pathlib import Path

from playwright.sync_api import sync_playwright

from tuner.report.content import report
from tuner.report.html import html
from tuner.report.view import study_view
from tuner.study.store import open_study

WIDTH, HEIGHT = 980, 760


def main(database: Path, picture: Path, scheme: str = "light") -> None:
    """Draw the report of the study in `database` into `picture`."""
    name = database.parent.name
    with closing(open_study(name, f"sqlite:///{database}")) as store:
        text = html(report(study_view(store.data())))
    with tempfile.TemporaryDirectory() as folder, sync_playwright() as playwright:
        page_file = Path(folder) / "report.html"
        page_file.write_text(text)
        browser = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        page = browser.new_context(viewport={"width": WIDTH, "height": HEIGHT}, color_scheme=scheme).new_page()
        page.goto(page_file.as_uri())
        page.screenshot(path=str(picture))
        browser.close()


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), *sys.argv[3:])
