"""Write the example of a report's page from a kept record: `python -m tests.docs.example_page FILE`."""

import sys
from pathlib import Path

from pocketllm.bench.reports.html.page import render_page
from pocketllm.evidence.store import load_record

ROOT = Path(__file__).resolve().parents[2]
RECORD = ROOT / "records/bench/year=2026/01M8N38X86HEB5F53B2WSPX5DD.parquet"
EXAMPLE = ROOT / "docs/examples/bench-report.html"


def example_page() -> str:
    """What `pocketllm bench report` makes of it."""
    record = load_record(RECORD)
    return render_page(record.document, record.row_dicts, ["vllm", "llama-bench"])


if __name__ == "__main__":
    target = Path(sys.argv[1])
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text(example_page(), encoding="utf-8")
