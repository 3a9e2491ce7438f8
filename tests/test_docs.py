"""Every command that README and docs show is run, or understood by the program that it names; and no link is dead.

Commands of the user guide are run one after another on the space that ships, put on a simulated machine, so that they
take seconds. Of all other shell blocks each `tuner` and `engine` command is parsed by its own command line, options,
values and all, without being carried out: they would take hours, a GPU, or a server. `KNOWN` lists the other programs,
with what is checked of them.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Iterator
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import click
import pytest
import typer
from typer.testing import CliRunner

from tuner.cli.app import app
from tuner.space import reference

ROOT = Path(__file__).parent.parent
PAGES = sorted([ROOT / "README.md", *(ROOT / "docs").glob("*.md")])

SIMULATED = ["--set", "engine.kind=simulated", "--set", "simulation.clock=virtual"]
EXTRA = {
    ("run", "quickstart.yaml"): SIMULATED,
    ("check", "quickstart.yaml"): SIMULATED,
    ("run", "pcie_blackwell.yaml"): ["--launches", "22", "--candidates", "5"],
}
NOT_RUN = {
    "tuner calibrate --space quickstart.yaml": "launches servers for minutes",
    "tuner check my-server.yaml": "the space of the text, which has a test of its own",
    "tuner bench http://127.0.0.1:8000 --concurrency 1,8": "needs a running server",
    "tuner logs quickstart": "a simulated launch has no log",
    "pip install optuna-dashboard": "an installation; the dashboard's own test opens a study",
    "optuna-dashboard sqlite:///studies/quickstart/study.db --host 127.0.0.1": "serves until it is stopped; own test",
    "make lint": "what gates a change",
    "make test": "this",
}
"""Commands of the guide that the test does not carry out, and why. They are parsed all the same."""


def shell_lines(page: Path) -> list[str]:
    """The commands of a page's shell blocks, without comments; a line that ends in a backslash goes on."""
    found = []
    for block in re.findall(r"^```(?:sh|console)\n(.*?)^```", page.read_text(encoding="utf-8"), re.M | re.S):
        for text in block.replace("\\\n", " ").splitlines():
            words = shlex.split(text, comments=True)
            if words:
                found.append(shlex.join(words))
    return found


ALL = [(page.name, command) for page in PAGES for command in shell_lines(page)]


def parsed(program: typer.Typer, words: list[str]) -> None:
    """Raises click's own error where the command line is not one of the program."""
    command: Any = typer.main.get_command(program)
    context = command.make_context(command.name or "", [], resilient_parsing=True)
    name, found, rest = command.resolve_command(context, words)
    with suppress(click.exceptions.Exit):  # --help and its like have done what they do
        found.make_context(name, rest, parent=context)


def tuner(words: list[str]) -> None:
    parsed(app, words)


def engine(words: list[str]) -> None:
    import engine.cli

    parsed(engine.cli.app, words)


def python(words: list[str]) -> None:
    assert words[0] == "-m"
    assert find_spec(words[1]), f"there is no module {words[1]}"


def make(words: list[str]) -> None:
    text = (ROOT / "Makefile").read_text()
    for word in words:
        assert "=" in word or re.search(rf"^{re.escape(word)}:", text, re.M), f"make has no target {word}"


def anything(_words: list[str]) -> None:
    """The program is not ours, and what it is told is no option of ours."""


KNOWN: dict[str, Callable[[list[str]], None]] = {
    "tuner": tuner,
    "engine": engine,
    "python": python,
    "make": make,
    "pip": anything,
    "export": anything,
    "ray": anything,
    "curl": anything,
    "optuna-dashboard": anything,
    "nohup": lambda words: understood(shlex.join(words)),
    "out/run.sh": anything,  # what `tuner export` of the line before has written
}


def understood(command: str) -> None:
    words = shlex.split(command)
    while words and re.match(r"[A-Za-z_]+=", words[0]):
        words.pop(0)
    words = words[: next((i for i, word in enumerate(words) if word in ("|", "||", "&&", ">", "2>", "&")), None)]
    assert words[0] in KNOWN, f"no test knows the program {words[0]}"
    KNOWN[words[0]](words[1:])


@pytest.mark.parametrize(("page", "command"), ALL, ids=[f"{page}: {command[:60]}" for page, command in ALL])
def test_every_command_shown_is_understood(page: str, command: str) -> None:
    understood(command)


def test_there_are_commands_in_the_pages_that_have_them() -> None:
    for page in ("README.md", "guide.md", "measuring.md"):
        assert any(name == page for name, _ in ALL)


@pytest.mark.timeout(300)
def test_the_guides_commands_do_what_the_guide_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    commands = [command for page, command in ALL if page == "guide.md"]
    left = set(NOT_RUN)
    for command in commands:
        if command in NOT_RUN:
            left.discard(command)
            continue
        program, *words = shlex.split(command)
        assert program == "tuner", f"neither run nor in NOT_RUN: {command}"
        extra = EXTRA.get((words[0], words[-1]), ["--allow-simulated"] if words[0] == "export" else [])
        done = CliRunner().invoke(app, [*words, *extra])
        fine = {0, 3} if words == ["doctor"] else {0}  # 3: somebody else's leftovers on this machine
        assert done.exit_code in fine, f"{command}: {done.output}"
    assert (tmp_path / "quickstart.html").read_text().startswith("<!doctype html>")
    assert (tmp_path / "quickstart.md").read_text().startswith("# Study quickstart")
    assert (tmp_path / "out" / "run.sh").exists()
    assert left <= {"make lint", "make test"}, f"in NOT_RUN, and no longer in the guide: {left}"


def test_the_spaces_in_the_pages_are_valid(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my_prompts.jsonl").write_text(
        "".join(
            f'{{"prompt": "What is {n} times {n + 3}, and why is that so for number {n * 7}?"}}\n' for n in range(40)
        )
    )
    found = 0
    for page in PAGES:
        for block in re.findall(r"^```yaml\n(.*?)^```", page.read_text(encoding="utf-8"), re.M | re.S):
            if block.startswith("name:"):
                (tmp_path / "space.yaml").write_text(block)
                done = CliRunner().invoke(app, ["check", "space.yaml", "--set", "workload.prompts=mixed"])
                assert done.exit_code == 0, f"{page.name}: {done.output}"
                found += 1
    assert found >= 2


def links(page: Path) -> Iterator[str]:
    text = re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.M | re.S)
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if not target.startswith(("http://", "https://", "#", "mailto:")):
            yield target.partition("#")[0]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_no_link_is_dead(page: Path) -> None:
    dead = [target for target in links(page) if not (page.parent / target).exists()]
    assert not dead


def test_a_reader_finds_every_page_from_the_readme() -> None:
    found, waiting = set(), [ROOT / "README.md"]
    while waiting:
        page = waiting.pop()
        found.add(page)
        below = {(page.parent / target).resolve() for target in links(page) if target.endswith(".md")}
        waiting += [each for each in below if each in PAGES and each not in found]
    assert found == set(PAGES), "a page that no other leads to"


def test_the_reference_of_the_space_file_is_up_to_date() -> None:
    said = "run `python -m tuner.space.reference > docs/space-file.md`"
    assert (ROOT / "docs" / "space-file.md").read_text(encoding="utf-8") == reference.page(), said


def test_every_key_of_a_space_file_is_explained() -> None:
    assert [path for path in reference.paths() if path not in reference.ABOUT] == [], "add them to reference.ABOUT"
    assert {"engine.launch.stall_s", "parameters.NAME.when", "rules[].because"} <= set(reference.paths())


def test_every_failure_class_has_advice_in_the_guide() -> None:
    from tuner.launch.kinds import KINDS

    guide = (ROOT / "docs" / "guide.md").read_text(encoding="utf-8").partition("## When something fails")[2]
    assert [kind for kind in KINDS if f"`{kind}`" not in guide] == []


def test_whoever_adds_a_part_is_sent_to_files_that_exist() -> None:
    text = (ROOT / "docs" / "extending.md").read_text(encoding="utf-8")
    for name in re.findall(r"`((?:tuner|engine|tests)/[\w/.]+)`", text):
        if "NAME" not in name:
            assert (ROOT / name).exists(), name
    for symbol, name in re.findall(r"`(\w+)` (?:and `\w+` )?in `((?:tuner|engine)/[\w/]+\.py)`", text):
        assert re.search(rf"\b{symbol}\b", (ROOT / name).read_text()), f"{symbol} in {name}"
