"""Write docs/results.md, or say in what it differs from what its chapters and files say.

``python -m benchmarks.results_page`` writes it; with ``--check`` nothing is written, differences are shown, and the
exit status is 1 where there are any. Where git is at hand, commits that it does not know are named too.
``--record FILE.json`` adds to a file whose program writes no date which commit it is of.
``--take NAME --kinds KIND ... [--command COMMAND] [--device DEVICE] < TABLE.md`` makes docs/results/tables/NAME.json of
a table that a program printed, and says the line that shows it.
"""

from __future__ import annotations

import argparse
import datetime
import difflib
import json
import subprocess
import sys
from pathlib import Path

from benchmarks.record import checkout_state
from benchmarks.results_page.changes import Changes
from benchmarks.results_page.files import PageError, read_source
from benchmarks.results_page.page import make_page
from benchmarks.results_page.take import taken
from benchmarks.results_page.unused import unused_files

_DOCS = Path(__file__).resolve().parents[2] / "docs"
_SHOWN = 40


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.results_page", description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing, and say what differs")
    parser.add_argument("--docs", type=Path, default=_DOCS, help="the folder with results.md and results/")
    parser.add_argument("--record", type=Path, nargs="+", metavar="FILE", help="add date and commit to these files")
    parser.add_argument("--take", metavar="NAME", help="keep a Markdown table from standard input as a typed one")
    parser.add_argument("--kinds", nargs="*", default=[], help="with --take, the kinds of its figures")
    parser.add_argument("--command", help="with --take, what printed it")
    parser.add_argument("--device", help="with --take, what measured it")
    options = parser.parse_args(arguments)
    if options.record:
        return _recorded(options.record)
    folder, target = options.docs / "results", options.docs / "results.md"
    if options.take:
        return _take(folder, options)
    try:
        page = make_page(folder)
        said = unused_files(folder, page.used)
    except PageError as error:
        print(error, file=sys.stderr)
        return 1
    said += [f"{where}: git knows no commit {commit}" for commit, where in _unknown(page.commits, folder)]
    if options.check:
        before = target.read_text().splitlines() if target.exists() else []
        different = list(
            difflib.unified_diff(before, page.text.splitlines(), str(target), "as its files say", lineterm="")
        )
        said += different[:_SHOWN] + [f"... {len(different) - _SHOWN} lines more"] * (len(different) > _SHOWN)
    elif not said:
        target.write_text(page.text)
        print(f"{target}: {page.tables} tables, {page.stale} older than a change that alters their figures")
    for line in said:
        print(line, file=sys.stderr)
    return 1 if said else 0


def _take(folder: Path, options: argparse.Namespace) -> int:
    name = f"tables/{options.take}.json"
    try:
        Changes.of(read_source(folder, "changes.json").content).known(options.kinds, name)
        text = taken(sys.stdin.read(), options.kinds, options.command, options.device, checkout_state())
        (folder / name).write_text(text)
    except (OSError, PageError) as error:
        print(error, file=sys.stderr)
        return 1
    print(f"{{{{ table typed: {name} }}}}")
    return 0


def _git(folder: Path, *words: str, given: str = "") -> str | None:
    try:
        done = subprocess.run(["git", "-C", folder, *words], input=given, capture_output=True, text=True, check=False)
    except OSError:
        return None
    return done.stdout if done.returncode == 0 else None


def _unknown(commits: dict[str, str], folder: Path) -> list[tuple[str, str]]:
    """Commits that git does not know, where there is git and the whole history."""
    if (_git(folder, "rev-parse", "--is-shallow-repository") or "").strip() != "false":
        return []
    answer = _git(folder, "cat-file", "--batch-check", given="".join(f"{commit}^{{commit}}\n" for commit in commits))
    answers = (answer or "").splitlines()
    return [(commit, commits[commit]) for commit, line in zip(commits, answers) if line.endswith("missing")]


def _recorded(paths: list[Path]) -> int:
    for path in paths:
        try:
            content = json.loads(path.read_text())
            if not isinstance(content, dict):
                raise ValueError("no JSON object")
        except (OSError, ValueError) as error:
            print(f"{path}: {error}", file=sys.stderr)
            return 1
        commit = checkout_state().get("commit")
        now = datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")
        rest = {key: value for key, value in content.items() if key != "recorded"}
        path.write_text(json.dumps({"recorded": {"commit": commit, "date": now}, **rest}, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
