"""The top of a report in light and in dark, as a browser shows it. `python docs/figures/report.py REPORT.html`."""

import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from PIL import Image

SCHEMES = {"dark": 0, "light": 1}
SIZE = (1000, 1120)


def main(page: Path) -> None:
    browser = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if browser is None:
        sys.exit("report.py needs chromium (apt-get install chromium).")
    for scheme, number in SCHEMES.items():
        target = Path(__file__).with_name(f"report-{scheme}.png")
        with tempfile.TemporaryDirectory() as profile:
            options = ["--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", f"--user-data-dir={profile}"]
            options += [f"--blink-settings=preferredColorScheme={number}", f"--window-size={SIZE[0]},{SIZE[1]}"]
            command = [browser, *options, f"--screenshot={target}", page.resolve().as_uri()]
            subprocess.run(command, check=True, capture_output=True, timeout=120)
        # A palette is enough, and a page loads it faster.
        Image.open(target).convert("RGB").quantize(256).save(target, optimize=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
