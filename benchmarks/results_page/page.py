"""The page: chapters with their tables, each with what it comes from and what it is older than."""

from __future__ import annotations

import dataclasses
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

from benchmarks.results_page.changes import Change, Changes
from benchmarks.results_page.files import PageError, Source, moment_of, read_source
from benchmarks.results_page.tables import Table
from benchmarks.results_page.views import VIEWS

__all__ = ["COMMAND", "Page", "make_page"]

COMMAND = "python -m benchmarks.results_page"
_HEAD = f"<!-- Made by `{COMMAND}` from docs/results/page/*.md and docs/results/*.json: change those. -->"
_NAMED = 3
"""Changes that are named below a table."""
_OLDER = "{{ older tables }}"
_RULER = re.compile(r"\s*:?-+:?\s*(?:\|\s*:?-+:?\s*)+\|?\s*")
_DIRECTIVE = re.compile(
    r"\{\{ table (?P<view>[\w-]+): (?P<files>[^|{}]+?)(?: \| of (?P<commit>[0-9a-f]+) (?P<date>[\d:TZ+-]+))? \}\}"
)


@dataclasses.dataclass
class Page:
    """A page as it is made.

    Attributes
    ----------
    lines : list of str
    used : set of str
        The files that it shows.
    commits : dict of str to str
        Each commit that it names, and where from.
    older : Counter of Change
        How many tables are older than a change.
    tables, stale : int
        How many there are, and how many of them are older than some change.
    """

    lines: list[str] = dataclasses.field(default_factory=list)
    used: set[str] = dataclasses.field(default_factory=set)
    commits: dict[str, str] = dataclasses.field(default_factory=dict)
    older: Counter[Change] = dataclasses.field(default_factory=Counter)
    tables: int = 0
    stale: int = 0

    @property
    def text(self) -> str:
        """What docs/results.md holds."""
        return "\n".join(self.lines) + "\n"


def make_page(folder: Path) -> Page:
    """The page of the chapters and files of a folder such as docs/results.

    Raises
    ------
    PageError
        If a chapter or a file does not fit; the message names it.
    """
    chapters = sorted((folder / "page").glob("*.md"))
    if not chapters:
        raise PageError(f"{folder / 'page'} holds no chapters")
    changes = Changes.of(read_source(folder, "changes.json").content)
    page = Page()
    page.commits.update((change.commit, "changes.json") for change in changes.changes)
    body: list[str] = []
    for chapter in chapters:
        body += [*_Chapter(chapter, folder, changes, page).lines(), ""]
    page.lines = [_HEAD]
    for line in body[:-1]:
        page.lines += _older_tables(page) if line == _OLDER else [line]
    return page


class _Chapter:
    """One file of the page."""

    def __init__(self, path: Path, folder: Path, changes: Changes, page: Page) -> None:
        self.path, self.folder, self.changes, self.page = path, folder, changes, page
        self.commands: list[list[str]] = []

    def lines(self) -> Iterator[str]:
        fence, command = "", ""
        for number, line in enumerate(self.path.read_text().rstrip("\n").split("\n"), 1):
            where = f"{self.path.name}:{number}"
            if line.startswith("```"):
                fence = "" if fence else line
            elif fence == "```sh":
                command += line
                if not line.endswith("\\"):
                    self.commands.append(_words(command))
                    command = ""
            elif not fence and (line.lstrip().startswith("|") or _RULER.fullmatch(line)):
                raise PageError(f"{where} has a table of its own; its cells belong into a file that the chapter names")
            elif not fence and "{{" in line and line != _OLDER:
                yield from self._table(line, where)
                continue
            yield line

    def _table(self, line: str, where: str) -> Iterator[str]:
        asked = _DIRECTIVE.fullmatch(line)
        if asked is None:
            raise PageError(f"{where}: {line!r} is no table; one is {{{{ table VIEW: FILE.json ... }}}}")
        if asked["view"] not in VIEWS:
            raise PageError(f"{where}: there is no view {asked['view']!r}, only {', '.join(sorted(VIEWS))}")
        sources = [read_source(self.folder, name) for name in asked["files"].split()]
        shown = f"{where}, {asked['view']} of {asked['files']}"
        table, kinds = _made(asked["view"], sources, shown)
        if asked["commit"]:
            state = {"commit": asked["commit"], "recorded": False, "moment": moment_of(asked["date"], where)}
            sources = [dataclasses.replace(one, origin=dataclasses.replace(one.origin, **state)) for one in sources]
        changes = self.changes.after(min(source.origin.moment for source in sources), kinds, shown)
        self.page.tables += 1
        self.page.stale += bool(changes)
        self.page.older.update(changes)
        self.page.used.update(source.name for source in sources)
        commits = (source.origin.commit for source in sources if source.origin.commit)
        self.page.commits.update((commit.rstrip("+"), where) for commit in commits)
        yield from table.markdown()
        yield ""
        told = [source for source in sources if not source.is_typed] or sources
        yield _provenance(sources, self._commands_of(told), changes)

    def _commands_of(self, sources: list[Source]) -> list[str]:
        """The commands of files that nothing above in the chapter shows."""
        new = []
        for command in dict.fromkeys(source.origin.command for source in sources if source.origin.command):
            parts = [_words(part) for part in command.split(" && ")]
            if _words(command) not in self.commands and any(part not in self.commands for part in parts):
                new.append(command)
                self.commands += parts
        return new


def _made(name: str, sources: list[Source], shown: str) -> tuple[Table, Sequence[str]]:
    """A table, and the kinds of its figures."""
    view = VIEWS[name]
    try:
        return view.make(*sources), view.kinds if view.kinds is not None else sources[0].content.texts("kinds")
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        raise PageError(f"{shown}: {type(error).__name__}: {error}") from error


def _words(command: str) -> list[str]:
    """What of a command makes figures: not where they go, nor the words behind it."""
    words = command.partition("  #")[0].replace("\\", " ").split()
    at = words.index("--out") if "--out" in words else len(words)
    return words[:at] + words[at + 2 :]


def _provenance(sources: list[Source], commands: list[str], changes: tuple[Change, ...]) -> str:
    """Of what files a table is, from when and by which state; files of one origin together."""
    files: dict[str, list[str]] = {}
    for source in sources:
        # Cells that no program wrote stand beside those of a campaign, which says what the table is of.
        one = (sources[0] if source.is_typed else source).origin
        commit = one.commit and (f"recorded with {one.commit}" if one.recorded else f"commit {one.commit}")
        said = ", ".join(filter(None, (one.date, commit, one.device)))
        files.setdefault(said, []).append(f"[{source.name}](results/{source.name})")
    parts = [f"{said}: {', '.join(names)}" for said, names in files.items()]
    line = f"*{', '.join(['; '.join(parts), *(f'`{command}`' for command in commands)])}.*"
    if changes:
        shown = ", ".join(map(str, reversed(changes[-_NAMED:])))
        more = len(changes) - _NAMED
        line += f" **Older than** {shown}{f', and {more} before' if more > 0 else ''}."
    return line


def _older_tables(page: Page) -> list[str]:
    """What stands at the top of the page: the changes that tables are older than."""
    if not page.stale:
        return [f"None of the {page.tables} tables is older than a change that alters its figures."]
    lines = [
        f"Of the {page.tables} tables, {page.stale} are older than a change of the compiler that alters figures of "
        "their kind. They are marked where they stand; the changes, the last first, and how many tables are older:",
        "",
    ]
    ordered = sorted(page.older.items(), key=lambda entry: entry[0].moment, reverse=True)
    return lines + [f"- {change}: {change.what}: {count}" for change, count in ordered]
