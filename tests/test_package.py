"""Citation, versions, and how to install. `tests/package.py` builds the wheel and tries it."""

import importlib.metadata
import json
import re
import zipfile
from pathlib import Path

import pytest
import torch
import yaml

import package
import unsum

ROOT = Path(__file__).parent.parent


def test_the_citation_file_is_of_this_version():
    cited = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert cited.keys() >= {"cff-version", "message", "title", "authors"}  # what CFF 1.2.0 requires
    assert cited["cff-version"] == "1.2.0" and cited["type"] == "software"
    assert cited["authors"] == [{"name": "The unsum authors"}]
    assert cited["version"] == unsum.__version__
    assert cited["license"] == importlib.metadata.metadata("unsum")["License-Expression"]


def machines():
    """Torch, Python and GPU of every result of a benchmark."""
    for path in sorted((ROOT / "benchmarks" / "results").glob("*.json")):
        result = json.loads(path.read_text())
        machine = result.get("machine", result)
        yield path.stem, machine["torch"], machine.get("python"), machine.get("gpu")


@pytest.mark.parametrize(("name", "version", "python", "gpu"), list(machines()), ids=str)
def test_the_page_of_versions_has_a_row_for_every_result(name, version, python, gpu):
    number, _, build = version.partition("+")
    rows = [
        line
        for line in (ROOT / "docs" / "versions.md").read_text().splitlines()
        if line.startswith(f"| {number} ") and (gpu or "CPU") in line and (python or "") in line
    ]
    assert len(rows) == 1, name
    assert ("CPU" if build == "cpu" else "CUDA 13.0" if build == "cu130" else build) in rows[0]


def test_the_page_of_versions_has_the_version_that_is_installed_for_the_suite():
    pinned = re.search(r"^torch==(\S+)$", (ROOT / "constraints.txt").read_text(), re.MULTILINE)[1]
    assert f"| {pinned} (CPU) |" in (ROOT / "docs" / "versions.md").read_text()
    oldest = re.search(r"torch>=([\d.]+),<3", (ROOT / "pyproject.toml").read_text())[1]
    assert f"| {oldest}.0 " in (ROOT / "docs" / "versions.md").read_text()
    assert torch.__version__.startswith("2.")


def test_nobody_is_told_to_install_from_where_it_is_not():
    files = [*(ROOT / "src").rglob("*.py"), *(ROOT / "docs").rglob("*.md"), ROOT / "README.md"]
    for path in files:
        text = path.read_text()
        assert not re.search(r"pip install ['\"]?unsum\[", text), path
        told = text.count("pip install unsum")
        assert told == text.count("unsum is not on PyPI yet: `pip install unsum` does not install this library"), path
    assert "urls" not in (ROOT / "pyproject.toml").read_text()


def test_a_file_that_an_archive_lacks_is_named(tmp_path):
    wheel, archive = tmp_path / "unsum-0-py3-none-any.whl", tmp_path / "unsum-0.tar.gz"
    left_out = ROOT / "src" / "unsum" / "report" / "page.css"
    with zipfile.ZipFile(wheel, "w") as opened:
        for path in (ROOT / "src").rglob("*.*"):
            if path != left_out and path.is_file():
                opened.write(path, path.relative_to(ROOT / "src"))
        opened.writestr("unsum-0.dist-info/METADATA", "Requires-Dist: torch<3,>=2.11\n")
        opened.writestr("unsum-0.dist-info/licenses/LICENSE", "")
    with package.tarfile.open(archive, "w:gz") as packed:
        for name in ("src", "LICENSE", "README.md", "CHANGELOG.md"):
            packed.add(ROOT / name, f"unsum-0/{name}")
    assert package.missing(wheel, archive) == [f"{wheel.name}: unsum/report/page.css", f"{archive.name}: CITATION.cff"]


def test_what_torch_requires_is_found_and_numpy_is_not_among_it():
    found = package.closure("torch", set())
    assert {"torch", "sympy", "typing-extensions"} <= found
    assert "numpy" not in found
