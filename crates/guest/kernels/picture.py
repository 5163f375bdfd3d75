"""This program makes a picture and a page of a chart or a drawing.

The Python driver starts it for each, so that an interrupt, a time-out or a lack of memory costs the picture and not the kernel.
`picture.py KIND DIRECTORY` reads the chart as JSON from standard input (`svg`: the drawing as text) and prints one line of JSON:
`png` (base64), `page` (the name of the page in DIRECTORY), and `why` if there is no picture. vl-convert draws Vega, Vega-Lite and
SVG; plotly's charts need the Chromium that `SANDPOOL_CHROMIUM` names. Nothing here needs a network.
"""

from __future__ import annotations

import base64
import importlib.util
import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

PAGES = 100  # most pages in one directory
SCALE = 2  # Vega's charts are small
SIZE, LARGEST = (700, 500), 4000  # of a plotly chart: what it has by default, and the most, in pixels
PATIENCE = 30  # seconds that Chromium has
FLAGS = ("--headless", "--no-sandbox", "--disable-gpu", "--disable-software-rasterizer", "--disable-dev-shm-usage", "--no-first-run",
         "--disable-breakpad", "--disable-crash-reporter", "--disable-background-networking", "--disable-component-update",
         "--disable-extensions", "--disable-sync", "--no-proxy-server", "--hide-scrollbars", "--mute-audio",
         "--enable-features=NetworkServiceInProcess2", "--virtual-time-budget=10000", "--run-all-compositor-stages-before-draw")
PAGE = """<!DOCTYPE html>
<html><head><meta charset="utf-8"><title>Chart</title><style>html, body, #chart {{ margin: 0; width: 100%; height: 100% }}</style>
<script>{library}</script></head><body><div id="chart"></div><script>
const figure = {figure};
Plotly.newPlot("chart", figure.data || [], figure.layout || {{}},
  {{responsive: true, ...figure.config, ...(location.hash === "#picture" && {{displayModeBar: false}})}})
  .then(() => figure.frames && Plotly.addFrames("chart", figure.frames));
</script></body></html>
"""


def directory_of(package: str) -> Path:
    """Return the directory of a package without importing it."""
    spec = importlib.util.find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        raise FileNotFoundError(f"the package {package} is not installed")
    return Path(spec.submodule_search_locations[0])


def leave(directory: str, text: str) -> str:
    """Write a page under a new name and return the name."""
    for number in range(1, PAGES + 1):
        try:
            with open(os.path.join(directory, name := f"chart-{number}.html"), "x", encoding="utf-8") as page:
                page.write(text)
            return name
        except FileExistsError:
            continue
    raise FileExistsError(f"there are {PAGES} pages already; remove some")


def plotly_page(chart: dict[str, Any]) -> str:
    library = (directory_of("plotly") / "package_data" / "plotly.min.js").read_text(encoding="utf-8")
    return PAGE.format(library=library, figure=json.dumps(chart).replace("<", "\\u003c"))


def plotly_size(chart: dict[str, Any]) -> tuple[int, ...]:
    layout = chart.get("layout") or {}
    wanted = (layout.get("width"), layout.get("height"))
    return tuple(max(1, min(int(value), LARGEST)) if isinstance(value, (int, float)) else usual for value, usual in zip(wanted, SIZE))


def photograph(page: str, size: tuple[int, ...]) -> bytes:
    """Return a picture of a page, made by Chromium."""
    chromium = os.environ.get("SANDPOOL_CHROMIUM", "")
    if not os.access(chromium, os.X_OK):
        raise FileNotFoundError("a picture of a plotly chart needs Chromium, which this sandbox does not have")
    with tempfile.TemporaryDirectory(prefix="chromium-") as home:
        picture = Path(home, "picture.png")
        own = (f"--user-data-dir={home}/profile", f"--screenshot={picture}", f"--window-size={size[0]},{size[1]}")
        env = {"HOME": home, "TMPDIR": home, "LANG": "C.UTF-8", "PATH": "/usr/bin:/bin"}
        env |= {name: os.environ[name] for name in ("FONTCONFIG_FILE",) if name in os.environ}
        process = subprocess.run([chromium, *FLAGS, *own, f"{Path(page).absolute().as_uri()}#picture"], env=env, stdin=subprocess.DEVNULL,
                                 stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, timeout=PATIENCE, check=False)
        if not picture.exists():
            lines = process.stderr.decode("utf-8", "replace").strip().splitlines() or ["it said nothing"]
            raise RuntimeError(f"Chromium ended with {process.returncode}: {lines[-1][:300]}")
        return picture.read_bytes()


def drawing_page(drawing: str) -> str:
    """Return a page that shows a drawing, without what precedes it in a file of its own."""
    root = re.search(r"<svg\b", drawing)
    return f'<!DOCTYPE html>\n<html><head><meta charset="utf-8"><title>Drawing</title></head><body>\n{drawing[root.start() if root else 0:]}\n</body></html>\n'


def with_font(drawing: str) -> str:
    """Give a drawing that names no font one that exists; otherwise its text would not be drawn at all."""
    root = re.search(r"<svg\b[^>]*", drawing)
    if root is None or "font-family" in root.group():
        return drawing
    return f'{drawing[:root.start()]}<svg font-family="sans-serif"{drawing[root.start() + 4:]}'


def make(kind: str, directory: str, data: bytes, answer: dict[str, str]) -> bytes:
    """Leave the page and return the picture."""
    if kind == "svg":
        import vl_convert

        drawing = with_font(data.decode("utf-8"))
        drawn = vl_convert.svg_to_png(drawing)  # fails if it is no drawing, which has no page then
        answer["page"] = leave(directory, drawing_page(drawing))
        return drawn
    chart = json.loads(data)
    if kind == "plotly":
        answer["page"] = leave(directory, plotly_page(chart))
        return photograph(os.path.join(directory, answer["page"]), plotly_size(chart))
    import vl_convert as convert

    page, picture = (convert.vega_to_html, convert.vega_to_png) if kind == "vega" else (convert.vegalite_to_html, convert.vegalite_to_png)
    answer["page"] = leave(directory, page(chart, bundle=True))
    return picture(chart, scale=SCALE)


def main() -> None:
    answer: dict[str, str] = {}
    try:
        answer["png"] = base64.b64encode(make(*sys.argv[1:3], sys.stdin.buffer.read(), answer)).decode("ascii")
    except Exception as e:
        answer["why"] = " ".join(str(e).split())[:300] or type(e).__name__
    print(json.dumps(answer))


if __name__ == "__main__":
    main()
