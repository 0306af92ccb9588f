"""The pages say what the results say."""

import importlib.util
import json
import re
from pathlib import Path

ROOT = Path(__file__).parent.parent


def test_the_table_of_costs_is_made_from_the_last_results():
    spec = importlib.util.spec_from_file_location("tables", ROOT / "benchmarks" / "tables.py")
    tables = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(tables)
    result = json.loads((ROOT / "benchmarks" / "results" / "capture_overhead.json").read_text())
    assert tables.capture_overhead(result) in (ROOT / "docs" / "cost.md").read_text()


def test_every_page_is_in_the_navigation_and_every_link_leads_somewhere():
    pages = {page.name for page in (ROOT / "docs").glob("*.md")}
    navigation = (ROOT / "mkdocs.yml").read_text()
    assert all(page in navigation for page in pages)
    for page in pages:
        for target in re.findall(r"\]\(([\w./-]+\.md)\)", (ROOT / "docs" / page).read_text()):
            assert target in pages, (page, target)
