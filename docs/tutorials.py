"""Run the notebooks of docs/tutorials and store their outputs: `python docs/tutorials.py [name ...]`.

A notebook is the one source of a tutorial: it is shown on the site with the outputs that it holds
(`docs/notebook_pages.py`), and a test runs it and compares them. Look at a page before its outputs are committed.
"""

from __future__ import annotations

import os
import re
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent / "tutorials"
SOURCE = FOLDER.parent.parent / "src"
_ADDRESS = re.compile(r" at 0x[0-9a-f]+")
_KERNEL = {"display_name": "Python 3", "language": "python", "name": "python3"}


def run(path: Path) -> Any:
    """The notebook at `path` with the outputs of today, run by this Python in a folder of its own."""
    import nbformat
    from jupyter_client import AsyncKernelManager
    from jupyter_client.kernelspec import KernelSpec
    from nbclient import NotebookClient

    with tempfile.TemporaryDirectory() as folder:

        class ThisPython(AsyncKernelManager):
            """Starts the kernel with the Python that runs now: none needs to be registered. No port is opened."""

            def __init__(self, **options: Any) -> None:
                file = f"{folder}/kernel.json"
                super().__init__(transport="ipc", ip=f"{folder}/kernel", connection_file=file, **options)

            @property
            def kernel_spec(self) -> Any:
                argv = [sys.executable, "-m", "ipykernel_launcher", "-f", "{connection_file}"]
                return KernelSpec(argv=argv, language="python")

        notebook, where = nbformat.read(path, as_version=4), {"metadata": {"path": folder}}
        client = NotebookClient(notebook, kernel_manager_class=ThisPython, timeout=300, resources=where)
        client.execute(env=_environment(folder))
    return tidied(notebook)


def _environment(folder: str) -> dict[str, str]:
    """One thread, no progress lines, no network, and this checkout's unsum; settings of Jupyter stay in `folder`."""
    paths = [str(SOURCE), os.environ.get("PYTHONPATH", "")]
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(filter(None, paths)),
        "OMP_NUM_THREADS": "1",
        "UNSUM_PROGRESS": "off",
        "HF_HUB_OFFLINE": "1",
        "TQDM_DISABLE": "1",
        "IPYTHONDIR": str(Path(folder) / ".ipython"),
        "PYDEVD_DISABLE_FILE_VALIDATION": "1",
    }


def tidied(notebook: Any) -> Any:
    """The notebook without what differs from run to run: times, counts, addresses, the kernel's version,
    and warnings, which name the lines of files."""
    notebook.metadata = {"kernelspec": dict(_KERNEL), "language_info": {"name": "python"}}
    for cell in notebook.cells:
        cell.metadata = {}
        if cell.cell_type == "code":
            cell.execution_count = None
            cell.outputs = _joined(_output(each) for each in cell.outputs if each.get("name") != "stderr")
    return notebook


def _joined(outputs: Iterable[Any]) -> list[Any]:
    """What was printed in one piece, however it came."""
    found: list[Any] = []
    for output in outputs:
        if found and found[-1].output_type == output.output_type == "stream":
            found[-1].text += output.text
        else:
            found.append(output)
    return found


def _output(output: Any) -> Any:
    """An output with one picture or page of it, and its text."""
    if "execution_count" in output:
        output.execution_count = None
    if "data" in output:
        output.metadata = {}
        rich = next((kind for kind in ("image/svg+xml", "text/html") if kind in output.data), None)
        output.data = {kind: output.data[kind] for kind in (rich, "text/plain") if kind in output.data}
        if "text/plain" in output.data:
            output.data["text/plain"] = _ADDRESS.sub("", output.data["text/plain"])
    return output


def main(names: list[str]) -> None:
    """Run the notebooks of these names, or all, and store their outputs."""
    import nbformat

    for path in [FOLDER / f"{Path(name).stem}.ipynb" for name in names] or sorted(FOLDER.glob("*.ipynb")):
        before = path.read_text(encoding="utf-8")
        after = nbformat.writes(run(path)) + "\n"
        path.write_text(after, encoding="utf-8")
        sys.stdout.write(f"{path.name}: {'changed' if after != before else 'as it was'}\n")


if __name__ == "__main__":
    main(sys.argv[1:])
