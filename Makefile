# make demo [SEED=2]   a tiny model learns a task from nothing: SFT, then GRPO
# make test            format, lint, types and tests; what CI runs
# make verify          the long tests: packaging, learning curves, fault matrices
#                      SHARD=2/6 runs one part of six; started again, it leaves out what has passed
# make test-gpu        checks on one or two GPUs in at most 5 minutes; writes gpu.json
# make gpu-trial       plans and rehearses 15 minutes on a GPU machine without a network, here
#                      WHEELS=folder DATA=folder, and TRIAL="--minutes 15 --per-command 10 --copy-mib 64"
# make bench           CPU seconds per step of this project and of TRL, side by side
# make setup | lint | format | docs | compile | clean
#
# The first of them makes .venv and installs the pinned stack; later ones find it there.

PYTHON ?= python3
SEED   ?= 1
UV     := 0.13.9

ON_GPU := $(shell nvidia-smi -L >/dev/null 2>&1 && echo yes)
STACK  := requirements/$(if $(ON_GPU),gpu,cpu)-dev.txt
STAMP  := .venv/.installed
BIN    := .venv/bin
uv     := $(BIN)/uv pip

# torch's CPU build is not on PyPI. Where PIP_FIND_LINKS names a folder that has it, uv looks there;
# elsewhere uv asks PyTorch's own index (which needs a network: that way has not been run yet).
ifndef ON_GPU
ifdef PIP_FIND_LINKS
export UV_FIND_LINKS := $(PIP_FIND_LINKS)
else
cpu_torch := --torch-backend cpu
endif
endif
# Installed without bytecode, imports of vLLM and torch are three times slower where Python may not write it.
export UV_COMPILE_BYTECODE := 1
export PYRIGHT_PYTHON_IGNORE_WARNINGS := 1

.PHONY: demo test test-gpu gpu-trial verify bench lint format docs compile clean setup

demo: $(STAMP)
	$(BIN)/python examples/demo/run.py --seed $(SEED)

# A process of the tests that crashes ends them; one that native code holds is ended, after 1000 s, with its stacks.
test: lint
	$(BIN)/python -m pytest -m "not gpu and not verify" --durations=60 -n 2 --dist loadfile --no-loadscope-reorder \
		--max-worker-restart 0 -o faulthandler_timeout=1000 -o faulthandler_exit_on_timeout=true

test-gpu: $(STAMP)
	$(BIN)/python -m tests.gpu.run

gpu-trial: $(STAMP)
	$(BIN)/python -m tests.gpu.trial $(TRIAL) $(if $(WHEELS),--wheels $(WHEELS)) $(if $(DATA),--data $(DATA))

verify: $(STAMP)
	$(BIN)/python -m pytest -m verify --durations=0 $(if $(SHARD),--shard $(SHARD))

bench: $(STAMP)
	$(uv) install --quiet --python $(BIN)/python --no-deps --target .venv/peer -r benchmarks/requirements.txt
	$(BIN)/python -m benchmarks.run --peer .venv/peer

lint: $(STAMP)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/pyright

format: $(STAMP)
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

docs: $(STAMP)
	$(BIN)/python -m tests.pages

setup: $(STAMP)

$(STAMP): pyproject.toml $(STACK)
	@$(PYTHON) -c 'import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 13))' || \
		{ echo "$(PYTHON) is $$($(PYTHON) --version 2>&1): Python 3.11 or 3.12 is needed. Name one: make PYTHON=python3.11"; exit 1; }
	@$(PYTHON) -m venv .venv || \
		{ echo "$(PYTHON) cannot make virtual environments. On Debian and Ubuntu: apt-get install python3-venv"; exit 1; }
	@echo "Installing $(STACK) into .venv: a minute or two, once."
	@$(BIN)/python -m pip install -qq uv==$(UV)
	$(uv) install --quiet --python $(BIN)/python --no-deps $(cpu_torch) -r $(STACK)
	$(uv) install --quiet --python $(BIN)/python --no-deps --editable .
	@touch $@

# The pins hold for Python 3.11 and 3.12. `make compile UPGRADE=--upgrade` takes the newest versions.
compile_one = $(uv) compile --quiet pyproject.toml --extra dev --extra qlora --python-version 3.11 --no-annotate \
	--python-platform x86_64-manylinux_2_28 --custom-compile-command "make compile" $(UPGRADE)
compile: $(STAMP)
	$(compile_one) --extra cpu --override requirements/overrides-cpu.txt $(cpu_torch) \
		--output-file requirements/cpu-dev.txt > /dev/null
	env -u UV_FIND_LINKS $(compile_one) --extra vllm --output-file requirements/gpu-dev.txt > /dev/null

clean:
	rm -rf .venv build dist *.egg-info .pytest_cache .ruff_cache .hypothesis
