# Thin names for one command each; .ci/run calls `make test`.
PYTHON ?= python3
VENV   ?= .venv
# Pinned: a plain `torch` fetches the newest build with gigabytes of CUDA libraries. `make torch-matrix` tests others.
TORCH  ?= torch==2.13.0
BIN    := $(VENV)/bin
PIP    := $(BIN)/python -m pip --disable-pip-version-check install --quiet

.PHONY: demo test quick extended check live docs bench judges torch-matrix sanitize aarch64 wheel install clean

demo: install
	$(BIN)/clusterctl demo

install: $(VENV)/.installed

# For two cores: a third of the time of tests is waiting. tests/conftest.py mixes the files that wait with the others.
LANES := -n 4 --dist loadfile --no-loadscope-reorder

test: $(VENV)/.developing
	bash .ci/packages
	$(BIN)/python -m pytest $(LANES) $(ARGS)

# The pure tests that are not slow: 2,400 that start no nodes and few programs, on two processes.
QUICK := $(addprefix tests/clusterctl/,inventory hostfile ranktable jobs logs exec checks cli client) \
         tests/clusterctl/test_*.py tests/trainer/config tests/trainer/plan tests/test_docs.py \
         tests/test_reference.py

# Such as `bash .ci/other 3.13 2.15.0`.
RUN ?= $(BIN)/python -m pytest -q

quick: $(VENV)/.developing
	$(RUN) -n 2 -m 'not live and not slow' --ignore-glob='*/test_nodeset_peer.py' \
		--ignore-glob='*/plan/test_memory.py' $(QUICK)

# Tests that repeat with other values what `make test` covers.
extended: $(VENV)/.developing
	$(BIN)/python -m pytest -q $(LANES) --extended

check: $(VENV)/.developing
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/python -m pytest -q tests/test_rules.py

# A wheel with the compiled ops, for nodes without a compiler: dist/*.whl. COMPILER=aarch64-linux-gnu-g++ makes one for aarch64.
wheel: $(VENV)/.developing
	$(BIN)/python .ci/wheel.py --compiler '$(COMPILER)'

# The C++ code with AddressSanitizer, UndefinedBehaviorSanitizer and ThreadSanitizer: ops, text and samples.
sanitize: $(VENV)/.developing
	bash .ci/sanitize address
	bash .ci/sanitize thread

# The C++ ops compiled for aarch64, whose NEON every such processor has, and tested under qemu.
aarch64: $(VENV)/.developing
	bash .ci/aarch64

# Write the reference pages from the code; tests/test_reference.py compares them.
docs: $(VENV)/.developing
	$(BIN)/python docs/generate.py

live: $(VENV)/.developing
	bash .ci/packages
	$(BIN)/python -m pytest -q tests/live

# Programs that judge imports and exports of weights. The large ones have environments of their own, 3 GB in all.
JUDGES := .venv-judges
judges: $(VENV)/.developing
	$(PIP) -e '.[judges]'
	$(PYTHON) -m venv $(JUDGES)/megatron
	$(JUDGES)/megatron/bin/python -m pip install --quiet '$(TORCH)' numpy packaging psutil 'megatron-core==0.16.1'
	$(PYTHON) -m venv $(JUDGES)/mindspore
	$(JUDGES)/mindspore/bin/python -m pip install --quiet 'mindspore==2.10.0'
	$(BIN)/python -m pytest -q tests/judges tests/trainer/weights

# The models, engines, ops and layouts with other versions of torch, each in an environment of its own of 6 GB.
TORCHES ?= 2.6.0 2.8.0 2.11.0 2.15.0
torch-matrix: $(VENV)/.developing
	for torch in $(TORCHES); do bash .ci/other - $$torch tests/trainer/test_compat.py tests/trainer/model \
		tests/trainer/engine tests/trainer/parallel tests/native || exit 1; done

bench: $(VENV)/.developing
	$(BIN)/python -m bench.train.ops
	$(BIN)/python -m bench.cli.start

# torch first: deepspeed looks for it while it is installed. The rest in one step: each compiles the C++ ops.
ENVIRONMENT = $(PYTHON) -m venv $(VENV) && $(PIP) '$(TORCH)' && $(PIP) -e

$(VENV)/.installed: pyproject.toml
	$(ENVIRONMENT) '.[train,serve]'
	touch $@

$(VENV)/.developing: pyproject.toml
	$(ENVIRONMENT) '.[train,serve,dev]'
	touch $(VENV)/.installed $@

clean:
	rm -rf $(VENV) .venv-other build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache
