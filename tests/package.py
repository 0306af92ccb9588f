"""The wheel and the source archive: built, checked, and tried in an environment without anything else: `make package`.

    python tests/package.py [FOLDER]        the archives are left there (dist)

The wheel is made from the source archive, so that a file which the archive lacks is missed. It is installed into a new
environment which has torch and what torch requires, linked from the environment that runs this, and neither NumPy nor
this clone; then once more with the packages of the extra `index`.
"""

from __future__ import annotations

import importlib.metadata
import os
import re
import subprocess
import sys
import tarfile
import tempfile
import time
import venv
import zipfile
from collections.abc import Iterator
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parent.parent
SETUP = """
import torch
from torch import nn


def setup():
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))
    losses = lambda model, batch: (model(batch[0]) - batch[1]).square().sum(1)
    return model, losses, (torch.ones(5, 4), torch.ones(5, 2))
"""


def main(folder: Path) -> None:
    began = time.perf_counter()
    wheel, archive = built(folder)
    step("twine", sys.executable, "-m", "twine", "check", "--strict", str(wheel), str(archive))
    absent = missing(wheel, archive)
    if absent:
        raise SystemExit(f"missing: {', '.join(absent)}")
    extras = Requirement(f"unsum[index] @ {wheel.resolve().as_uri()}")
    with tempfile.TemporaryDirectory() as place:
        tried(Path(place), wheel, extras)
    print(f"{wheel.name} and {archive.name} work. That took {time.perf_counter() - began:.0f} seconds.")


def built(folder: Path) -> tuple[Path, Path]:
    """The wheel and the source archive, newly built in `folder`."""
    for old in [*folder.glob("unsum-*.whl"), *folder.glob("unsum-*.tar.gz")]:
        old.unlink()
    step("build", sys.executable, "-m", "build", "--outdir", str(folder), str(ROOT))
    (wheel,), (archive,) = folder.glob("unsum-*.whl"), folder.glob("unsum-*.tar.gz")
    return wheel, archive


def missing(wheel: Path, archive: Path) -> list[str]:
    """The files of the clone that the two lack, and what the metadata should say and does not."""
    files = [path for path in sorted((ROOT / "src").rglob("*")) if path.is_file() and "__pycache__" not in path.parts]
    with zipfile.ZipFile(wheel) as opened:
        inside = set(opened.namelist())
        metadata = opened.read(next(name for name in inside if name.endswith(".dist-info/METADATA"))).decode()
    absent = [f"{wheel.name}: {name}" for path in files if (name := str(path.relative_to(ROOT / "src"))) not in inside]
    absent += [] if any(name.endswith("/licenses/LICENSE") for name in inside) else [f"{wheel.name}: LICENSE"]
    required = re.findall(r"^Requires-Dist: (.*)$", metadata, re.MULTILINE)
    if [each for each in required if "extra ==" not in each] != ["torch<3,>=2.11"]:
        absent.append("torch as the only requirement")
    with tarfile.open(archive) as packed:
        names = {name.partition("/")[2] for name in packed.getnames()}
    wanted = [*(str(path.relative_to(ROOT)) for path in files), "LICENSE", "README.md", "CHANGELOG.md", "CITATION.cff"]
    return absent + [f"{archive.name}: {name}" for name in wanted if name not in names]


def tried(place: Path, wheel: Path, extras: Requirement) -> None:
    """The wheel in an environment without NumPy, then the demo with the packages of an extra."""
    env, work = place / "env", place / "work"
    work.mkdir()
    venv.create(env, symlinks=True)
    python, unsum = str(env / "bin" / "python"), str(env / "bin" / "unsum")
    (packages,) = (env / "lib").glob("python*/site-packages")
    linked(packages, "torch")
    install = (sys.executable, "-m", "pip", "--python", python, "install", "-q", "--no-index", "--no-cache-dir")
    step("install", *install, str(wheel))
    (work / "train.py").write_text(SETUP)
    (work / "readme.py").write_text(first_program())
    found = step("import", python, "-c", "import unsum; print(unsum.__file__, unsum.__version__)", cwd=work)
    assert str(packages) in found, f"another unsum was imported: {found}"
    absent = "import importlib.util as u; print([n for n in ('numpy', 'safetensors', 'pyarrow') if u.find_spec(n)])"
    assert step("empty", python, "-c", absent, cwd=work).strip().endswith("[]")
    step("README's first program", python, "readme.py", cwd=work)
    assert "usage: unsum" in step("--help", unsum, "--help", cwd=work)
    assert "weight:grad" in step("sites", unsum, "sites", "train.py:setup", cwd=work)
    step("check", unsum, "check", "train.py:setup", cwd=work)
    step("report", unsum, "report", "train.py:setup", cwd=work)
    assert "<style>" in (work / "report.html").read_text()
    told = step("demo without the extra", unsum, "demo", cwd=work, fails=1)
    assert "pip install safetensors" in told, told
    for requirement in required_by(extras.name, env, "index"):
        linked(packages, requirement)
    step("install with the extra", *install, str(extras))
    assert "Rank of the planted sentence" in step("demo", unsum, "demo", cwd=work)
    assert (work / "demo" / "report.html").exists() and (work / "demo" / "graph.svg").exists()


def first_program() -> str:
    """The first block of Python in the README."""
    return (ROOT / "README.md").read_text().split("```python\n")[1].split("```")[0]


def required_by(name: str, env: Path, extra: str) -> Iterator[str]:
    """The names of the packages that an extra of an installed package asks for."""
    (packages,) = (env / "lib").glob("python*/site-packages")
    (found,) = importlib.metadata.distributions(name=name, path=[str(packages)])
    for text in found.requires or ():
        requirement = Requirement(text)
        if requirement.marker is not None and requirement.marker.evaluate({"extra": extra}):
            yield requirement.name


def linked(packages: Path, name: str) -> None:
    """Link a package of this environment, and all that it requires, into another's folder of packages."""
    for each in closure(name, set()):
        found = importlib.metadata.distribution(each)
        for top in {file.parts[0] for file in found.files or () if file.parts[0] not in ("..", "__pycache__")}:
            source, link = Path(str(found.locate_file(top))), packages / top
            if source.exists() and not link.exists():
                link.symlink_to(source)


def closure(name: str, seen: set[str]) -> set[str]:
    """A package of this environment and all that it requires, without extras."""
    name = canonicalize_name(name)
    if name not in seen:
        seen.add(name)
        for text in importlib.metadata.requires(name) or ():
            requirement = Requirement(text)
            if requirement.marker is None or requirement.marker.evaluate({"extra": ""}):
                closure(requirement.name, seen)
    return seen


def step(title: str, *command: str, cwd: Path = ROOT, fails: int = 0) -> str:
    """Run a command, away from this clone's paths; what it has printed. Ends everything if it ends otherwise."""
    began = time.perf_counter()
    hidden = ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV", "PIP_CONSTRAINT")
    quiet = {"OMP_NUM_THREADS": "1", "NO_COLOR": "1", "PIP_DISABLE_PIP_VERSION_CHECK": "1", "PYTHONNOUSERSITE": "1"}
    env = {key: value for key, value in os.environ.items() if key not in hidden} | quiet
    ran = subprocess.run(command, cwd=cwd, env=env, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    print(f"  {title}: {time.perf_counter() - began:.1f} s", flush=True)
    if ran.returncode != fails:
        raise SystemExit(f"{' '.join(command)} ended with {ran.returncode}, not {fails}:\n{ran.stdout[-4000:]}")
    return ran.stdout


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "dist").resolve())
