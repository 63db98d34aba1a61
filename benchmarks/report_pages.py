"""Reports in a browser: how large they are, how long they take to open, and how long to scroll through.

``python -m benchmarks.report_pages bert.html swin.html``; pictures with ``--pictures DIR``. It needs Chromium.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from pathlib import Path

from benchmarks.chromium import Page, chromium_page, find_chromium

SIZES = {"wide": (1440, 900), "narrow": (1000, 900)}
PARTS = {"overview": "", "program": "/stage/0", "tensors": "/tensor/0", "waits": "/wait/0", "decisions": "/decision/0"}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("pages", nargs="+", type=Path)
    parser.add_argument("--repeats", type=int, default=5, help="of opening a page; the median counts")
    parser.add_argument("--pictures", type=Path, metavar="DIR", help="where to put what each part looks like")
    arguments = parser.parse_args()
    program = find_chromium()
    if program is None:
        print("no Chromium is installed", file=sys.stderr)
        return 2
    records = [measured(program, path, arguments.repeats, arguments.pictures) for path in arguments.pages]
    print(json.dumps(records, indent=1))
    return 0


def measured(program: str, path: Path, repeats: int, pictures: Path | None) -> dict[str, object]:
    """One report: seconds are of the file being opened until it has drawn itself, and of one screen of a list."""
    with chromium_page(program) as page:
        opened = [_opened(page, path) for _ in range(repeats)]
        seconds, computed = (statistics.median(column) for column in zip(*opened, strict=True))
        page.press("2")
        report = "JSON.parse(document.getElementById('report-data').textContent)"
        counts = {key: page.run(f"{report}.{key}.length") for key in ("kernels", "launches", "stages", "decisions")}
        record = {
            "file": path.name,
            "bytes": path.stat().st_size,
            **counts,
            "open_s": round(seconds, 3),
            "open_cpu_s": round(computed, 3),
            "elements": page.run("document.querySelectorAll('*').length"),
            **_scrolled(page),
            "problems": list(page.problems),
        }
        if pictures is not None:
            pictures.mkdir(parents=True, exist_ok=True)
            take(page, pictures / path.stem)
        return record


def _opened(page: Page, path: Path) -> tuple[float, float]:
    """Seconds until a page has drawn itself, and those in which its process computed."""
    # From a page of the same process, since the time of another one's says nothing.
    before = page.cpu_seconds()
    seconds = page.open(path)
    return seconds, max(0.0, page.cpu_seconds() - before)


def _scrolled(page: Page) -> dict[str, float]:
    """Milliseconds for each of the places that a list is scrolled to, and those in which the page computed."""
    before = page.cpu_seconds()
    wall = page.run(_SCROLL)
    return {"screen_ms": round(wall, 2), "screen_cpu_ms": round((page.cpu_seconds() - before) * 1e3 / 60, 2)}


_SCROLL = """(async () => {
  const list = document.querySelector('.list');
  const steps = 60;
  const start = performance.now();
  for (let step = 0; step < steps; step++) {
    list.scrollTop = (list.scrollHeight * step) / steps;
    list.dispatchEvent(new Event('scroll'));
    await new Promise(requestAnimationFrame);
  }
  return (performance.now() - start) / steps;
})()"""
"""Milliseconds from one of sixty places of the program to the next, drawn; a screen of 60 a second has 16.7."""


def take(page: Page, stem: Path) -> None:
    """Pictures of each part, in both widths, light and dark."""
    for size, (width, height) in SIZES.items():
        page.size(width, height)
        for scheme in ("light", "dark"):
            page.prefer(scheme)
            for part, selected in PARTS.items():
                page.run(f"location.hash = '#{part}{selected}'")
                page.frame()
                page.picture(stem.with_name(f"{stem.name}-{part}-{size}-{scheme}.png"))


if __name__ == "__main__":
    sys.exit(main())
