"""Open a page in headless Chromium at a width, and measure what a person sees."""

from __future__ import annotations

import html
import json
import os
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
WIDTHS_PX = (360, 800, 1400)

# In an iframe, whose width may be less than that of a window. A box is cut where its content is wider than itself; a
# box that scrolls by design (a source file) is named by `pre`. Boxes that neither holds the other must not overlap.
MEASURE = """<!doctype html><body style="margin:0"><iframe id=f style="border:0;width:WIDTHpx;height:900px"></iframe>
<pre id=found></pre><script>
const frame = document.getElementById("f");
frame.onload = () => {
  const page = frame.contentDocument, seen = [...page.body.querySelectorAll("*")].filter(e => e.offsetParent !== null);
  const say = e => e.tagName.toLowerCase() + "." + e.className + " " + e.textContent.trim().slice(0, 40);
  const cut = seen.filter(e => e.clientWidth && e.scrollWidth > e.clientWidth + 1 && !e.closest("pre"));
  const boxes = seen.filter(e => e.matches(".card, .figure, h1, .subtitle, .summary, .note, dt, dd, td, th"));
  const overlap = [];
  boxes.forEach((a, i) => boxes.slice(i + 1).forEach(b => {
    if (a.contains(b) || b.contains(a)) return;
    const x = a.getBoundingClientRect(), y = b.getBoundingClientRect();
    const wide = Math.min(x.right, y.right) - Math.max(x.left, y.left);
    const high = Math.min(x.bottom, y.bottom) - Math.max(x.top, y.top);
    if (wide > 1 && high > 1) overlap.push(say(a) + " / " + say(b));
  }));
  const root = page.documentElement, images = [...page.images];
  document.getElementById("found").textContent = JSON.stringify({
    width: root.clientWidth, content: root.scrollWidth, cut: cut.map(say), overlap: overlap.slice(0, 9),
    boxes: boxes.length, images: images.filter(i => i.naturalWidth && i.clientWidth > 0.5 * root.clientWidth).length});
};
frame.srcdoc = PAGE;
</script>"""


def measure(page: Path, width_px: int, work: Path) -> dict[str, Any]:
    """Return what is cut and what overlaps in `page` at `width_px`; `work` is a folder for the browser's files."""
    wrapper = work / f"measure-{width_px}.html"
    text = json.dumps(page.read_text()).replace("</", "<\\/")
    wrapper.write_text(MEASURE.replace("WIDTH", str(width_px)).replace("PAGE", text))
    assert CHROMIUM is not None
    command = [
        CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--hide-scrollbars",
        f"--user-data-dir={work / 'profile'}", "--window-size=1500,1000", "--virtual-time-budget=20000",
        "--dump-dom", wrapper.as_uri(),
    ]  # fmt: skip
    environment = os.environ | {"HOME": str(work)}
    done = subprocess.run(command, capture_output=True, text=True, timeout=180, env=environment, check=False)
    found = re.search(r'<pre id="found">(.*?)</pre>', done.stdout, re.S)
    assert found and found.group(1), done.stderr[-2000:]
    measured: dict[str, Any] = json.loads(html.unescape(found.group(1)))
    return measured
