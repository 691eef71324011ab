"""Draw README's picture from a kept record: `python -m tests.docs.picture docs/pictures/demo.svg`."""

import io
import re
import sys
from pathlib import Path

from rich.console import Console
from rich.text import Text

from pocketllm.bench.reports.text import colored, render
from pocketllm.evidence.store import read_record

ROOT = Path(__file__).resolve().parents[2]
RECORD = ROOT / "records/bench/year=2026/01M8M9090TH5YTNPVZJ0R5JJJ9.parquet"
COMMAND = "pocketllm bench --scenario prefill --input-len 256 --arms base --arms chunk-64:prefill_chunk=64"
FOREIGN = re.compile(r"@font-face \{.*?\}\s*|<!--.*?-->\s*", re.DOTALL)


def picture() -> str:
    """What the command printed, as an SVG that asks no other server for fonts."""
    console = Console(record=True, width=82, file=io.StringIO(), force_terminal=True, color_system="truecolor")
    report = render(read_record(RECORD).document, colored)
    console.print(Text.from_ansi(f"$ {COMMAND}\n\n{report.split(chr(10) + 'note:')[0].rstrip()}"))
    svg = console.export_svg(title="two prefill settings, compared", unique_id="demo")
    return FOREIGN.sub("", svg).replace("Fira Code,", "")


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(picture(), encoding="utf-8")
