"""The page in a real browser: light, dark, on a phone, without a network. Needs Chromium, which `.ci/run` sees to."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
from report_studies import reference, toy

from tuner.records import Failure
from tuner.report.compare import comparison
from tuner.report.content import report
from tuner.report.html import html
from tuner.report.view import FailureView, study_view

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)

pytestmark = [
    pytest.mark.skipif(CHROMIUM is None, reason="no Chromium in PATH; `apt-get install chromium` brings one"),
    pytest.mark.timeout(180),
]

HOSTILE = (
    "</style></title></svg><script>document.title='owned'</script><img src='https://example.org/x' onerror=alert(1)>"
)


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("pages")
    real = study_view(reference())
    failure = Failure("startup_crash", "ready", HOSTILE, evidence=f"{HOSTILE}\n" * 40)
    told = replace(
        study_view(toy()), model=HOSTILE * 3, simulated=True, state="stopped", reason=HOSTILE, prompts="x" * 400
    )
    hostile = replace(told, failures=(*told.failures, FailureView("0" * 12, failure, (1, 2), HOSTILE)))
    texts = {
        "real": html(report(real)),
        "hostile": html(report(hostile)),
        "compared": html(comparison(real, study_view(toy()))),
    }
    for name, text in texts.items():
        (folder / f"{name}.html").write_text(text)
    return {name: (folder / f"{name}.html").as_uri() for name in texts}


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        found = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield found
        found.close()


@pytest.fixture(scope="module", params=[(1000, "light"), (1000, "dark"), (360, "light"), (360, "dark")])
def context(browser: Any, request: pytest.FixtureRequest) -> Iterator[Any]:
    width, scheme = request.param
    found = browser.new_context(viewport={"width": width, "height": 800}, color_scheme=scheme)
    yield found
    found.close()


@pytest.mark.parametrize("name", ["real", "hostile", "compared"])
def test_a_page_opens_whole_and_asks_nobody(pages: dict[str, str], context: Any, name: str) -> None:
    page, said, asked = context.new_page(), [], []
    page.on("console", lambda message: said.append(message.text))
    page.on("pageerror", lambda error: said.append(str(error)))
    page.on("dialog", lambda dialog: said.append(dialog.message))
    page.on("request", lambda request: asked.append(request.url))
    page.goto(pages[name])
    width = page.viewport_size["width"]
    assert said == []
    assert asked == [pages[name]]
    assert page.evaluate("document.documentElement.scrollWidth") <= width, "nothing sticks out to the right"
    assert page.title() != "owned"
    beyond = page.evaluate(
        """[...document.querySelectorAll('h1,h2,h3,p,li,figure,td,svg')].filter(e => {
             const r = e.getBoundingClientRect(); return r.width && (r.right > innerWidth + 1 || r.left < -1)
           }).map(e => e.outerHTML.slice(0, 80))"""
    )
    assert beyond == []
    shown = "narrow" if width < 700 else "wide"
    assert page.locator(f"figure .{shown} svg").first.is_visible()
    assert page.locator("h2").first.is_visible()
    page.close()


def test_light_and_dark_differ_and_both_can_be_read(pages: dict[str, str], browser: Any) -> None:
    grounds = []
    for scheme in ("light", "dark"):
        context = browser.new_context(color_scheme=scheme)
        page = context.new_page()
        page.goto(pages["real"])
        for part in ("body", ".note", "figcaption", "th", "svg .tick", ".eyebrow", "code"):
            assert page.evaluate(CONTRAST, part) >= 4.5, f"{part} in {scheme}"
        grounds.append(page.evaluate("getComputedStyle(document.body).backgroundColor"))
        context.close()
    assert grounds[0] != grounds[1]


CONTRAST = """part => {
  const element = document.querySelector(part), style = getComputedStyle(element)
  const numbers = text => text.match(/[0-9.]+/g).map(Number)
  const linear = v => v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4
  const light = rgb => rgb.slice(0, 3).map(v => linear(v / 255))
    .reduce((sum, v, i) => sum + v * [0.2126, 0.7152, 0.0722][i], 0)
  let ground = element
  const clear = e => numbers(getComputedStyle(e).backgroundColor)[3] === 0
  while (ground.parentElement && clear(ground)) ground = ground.parentElement
  const ink = element instanceof SVGElement ? style.fill : style.color
  const [a, b] = [light(numbers(ink)), light(numbers(getComputedStyle(ground).backgroundColor))].sort((x, y) => y - x)
  return (a + 0.05) / (b + 0.05)
}"""
