# Each target makes the environment that it needs from the exact files in requirements/.
SHELL := bash
.SHELLFLAGS := -eu -o pipefail -c
.NOTPARALLEL:
.DEFAULT_GOAL := help

CORE_PYTHONS := 3.10 3.11 3.12 3.13
LOCAL_PYTHON := 3.11
LOCAL := .venv-local
MEGATRON := .venv-megatron
VERL := .venv-verl
VERL_MEGATRON := .venv-verl-megatron
OPENRLHF := .venv-openrlhf
AREAL := .venv-areal
DOCS := .venv-docs
MEGATRON_NEXT := .venv-megatron-next
ENVIRONMENT := requirements/environment.sh
LOCAL_PARTS := requirements/local.txt requirements/local-nodeps.txt .
TEST_PARTS := $(LOCAL_PARTS) requirements/dev.txt tests/thirdparty

DEMO := $(LOCAL)/bin/python -m metronome_local.demo recipes/local/demo.yaml
# One benchmark a line, program and arguments; each writes its committed JSON.
define BENCHMARKS
benchmarks/overlap.py --pairs 10 --out docs/results/overlap.json
benchmarks/shared_prompt.py --model smollm2 --shapes 128,8,64 512,8,64 --repeats 3 --out docs/results/shared_prompt.json
benchmarks/proximal.py --model smollm2 --out docs/results/proximal.json
endef
export BENCHMARKS

# Nothing is fetched from a model hub: the model comes from a package.
export HF_HUB_OFFLINE := 1
export TOKENIZERS_PARALLELISM := false

.PHONY: help demo docs test test-verl test-verl-megatron check bench bench-attention bench-verl core megatron megatron-next \
	npu-contract local-environment test-environment megatron-environment verl-environment \
	openrlhf-environment test-openrlhf bench-openrlhf \
	areal-environment test-areal bench-areal

help:
	@echo "make demo    train a small model with all four techniques on (Python $(LOCAL_PYTHON), pip)"
	@echo "make test    core tests on every installed Python, Megatron-core 0.16.1, then all tests"
	@echo "make test-verl   tests/verl_host: verl's real workers, then its main_ppo on a CPU (part of make test)"
	@echo "make test-verl-megatron  verl's Megatron engine on a CPU (part of make test-verl)"
	@echo "make test-openrlhf   tests/openrlhf_host: OpenRLHF's real workers, then its main with vLLM on a CPU (part of make test)"
	@echo "make test-areal   tests/areal_host: AReaL's real engine and trainer on a CPU (part of make test)"
	@echo "make check   lint, types, import rules, unit and contract tests"
	@echo "make docs    the documentation site, into build/docs"
	@echo "make core    core unit tests on every installed Python ($(CORE_PYTHONS))"
	@echo "make bench   the benchmarks with a committed JSON"
	@echo "make bench-attention  shared-prompt attention against separate rows and a peer, about half an hour"
	@echo "make bench-areal  periodic mode, shared prompts and A-3PO against AReaL's own loop and engine, about 10 minutes (a C++ compiler)"
	@echo "make bench-openrlhf  periodic mode, shared prompts and A-3PO against OpenRLHF's own trainer and worker, about 10 minutes"
	@echo "make bench-verl  periodic mode, shared prompts and A-3PO against verl's own trainers and worker, about 12 minutes"
	@echo "make megatron        tests/megatron on megatron-core 0.16.1 (part of make test)"
	@echo "make megatron-next   tests/megatron on megatron-core 0.19.2 (Python 3.12, several GB)"
	@echo "make npu-contract    our NPU contract against the official torch_npu wheel, without an NPU (gcc, binutils)"

docs:
	@$(ENVIRONMENT) make $(DOCS) $(LOCAL_PYTHON) requirements/docs.txt
	NO_MKDOCS_2_WARNING=1 $(DOCS)/bin/mkdocs build --strict
	@echo "open build/docs/index.html"

local-environment:
	@$(ENVIRONMENT) make $(LOCAL) $(LOCAL_PYTHON) $(LOCAL_PARTS)

test-environment:
	@$(ENVIRONMENT) make $(LOCAL) $(LOCAL_PYTHON) $(TEST_PARTS)

megatron-environment:
	@$(ENVIRONMENT) make $(MEGATRON) $(LOCAL_PYTHON) requirements/megatron.txt .

verl-environment:
	@$(ENVIRONMENT) make $(VERL) $(LOCAL_PYTHON) requirements/verl.txt .

openrlhf-environment:
	@$(ENVIRONMENT) make $(OPENRLHF) $(LOCAL_PYTHON) requirements/openrlhf.txt requirements/openrlhf-nodeps.txt .
	@echo "source $(OPENRLHF)/bin/activate   # then metronome and python -m metronome_openrlhf"

areal-environment:
	@$(ENVIRONMENT) make $(AREAL) $(LOCAL_PYTHON) requirements/areal.txt requirements/areal-nodeps.txt .
	@echo "source $(AREAL)/bin/activate   # then metronome and python -m metronome_areal"

demo: local-environment
	$(DEMO)

check: test-environment
	$(LOCAL)/bin/ruff check .
	$(LOCAL)/bin/ruff format --check .
	$(LOCAL)/bin/mypy
	$(LOCAL)/bin/lint-imports
	OMP_NUM_THREADS=1 $(LOCAL)/bin/pytest tests/unit tests/contract

test: core megatron test-verl test-openrlhf test-areal test-environment
	@requirements/chromium.sh
	OMP_NUM_THREADS=1 $(LOCAL)/bin/pytest tests --timeout=900 --cov=metronome --cov=metronome_local --cov-report=term:skip-covered

core:
	@tested=0; failed=""; \
	for version in $(CORE_PYTHONS); do \
	  if ! $(ENVIRONMENT) python $$version >/dev/null; then \
	    echo "python$$version isn't installed: skipped"; continue; \
	  fi; \
	  $(ENVIRONMENT) make .venv-core-$$version $$version requirements/core.txt .; \
	  echo "core unit tests on Python $$version"; \
	  .venv-core-$$version/bin/pytest tests/unit || failed="$$failed $$version"; \
	  tested=$$((tested + 1)); \
	done; \
	if [ $$tested = 0 ]; then echo "none of Python $(CORE_PYTHONS) is installed" >&2; exit 1; fi; \
	if [ -n "$$failed" ]; then echo "core unit tests failed on Python$$failed" >&2; exit 1; fi

# verl's and Ray's own warnings are hidden; warnings in our packages stay errors.
test-verl: test-verl-megatron verl-environment
	OMP_NUM_THREADS=1 $(VERL)/bin/pytest tests/verl_host --timeout=900 --disable-warnings

test-verl-megatron:
	@$(ENVIRONMENT) make $(VERL_MEGATRON) $(LOCAL_PYTHON) requirements/verl.txt requirements/verl-megatron-nodeps.txt .
	OMP_NUM_THREADS=1 $(VERL_MEGATRON)/bin/pytest tests/verl_host/test_megatron_engine.py --timeout=600 --disable-warnings

# OpenRLHF's, DeepSpeed's, Ray's and vLLM's own warnings are hidden; warnings in our packages stay errors.
test-openrlhf: openrlhf-environment
	OMP_NUM_THREADS=1 $(OPENRLHF)/bin/pytest tests/openrlhf_host --timeout=900 --disable-warnings

# AReaL's own warnings are hidden; warnings in our packages stay errors.
test-areal: areal-environment
	OMP_NUM_THREADS=1 $(AREAL)/bin/pytest tests/areal_host --timeout=900 --disable-warnings

# Megatron's own deprecations are hidden; warnings in our packages stay errors.
megatron: megatron-environment
	OMP_NUM_THREADS=1 $(MEGATRON)/bin/pytest tests/megatron --timeout=600 --disable-warnings

megatron-next:
	@$(ENVIRONMENT) make $(MEGATRON_NEXT) 3.12 requirements/megatron-next.txt .
	OMP_NUM_THREADS=1 $(MEGATRON_NEXT)/bin/pytest tests/megatron --timeout=600 --disable-warnings

npu-contract:
	@$(ENVIRONMENT) make .venv-npu $(LOCAL_PYTHON) requirements/npu.txt
	OMP_NUM_THREADS=1 .venv-npu/bin/python tests/npu_contract/check_official.py

bench: local-environment
	@while read -r benchmark; do \
	  echo "$$benchmark"; \
	  $(LOCAL)/bin/python $$benchmark </dev/null; \
	done <<< "$$BENCHMARKS"

bench-attention:
	@$(ENVIRONMENT) make $(LOCAL) $(LOCAL_PYTHON) $(LOCAL_PARTS) requirements/bench-nodeps.txt
	OMP_NUM_THREADS=1 $(LOCAL)/bin/python benchmarks/attention.py --model-repeats 2 --out docs/results/attention.json
	OMP_NUM_THREADS=1 $(LOCAL)/bin/python benchmarks/reuse.py --out docs/results/reuse.json

# A finished run is kept in runs/verl-periodic-benchmark: remove it to measure again.
bench-verl: verl-environment
	OMP_NUM_THREADS=1 $(VERL)/bin/python benchmarks/verl_periodic.py --out docs/results/verl_periodic.json
	OMP_NUM_THREADS=2 $(VERL)/bin/python benchmarks/verl_update.py --out docs/results/verl_update.json
	$(VERL)/bin/python benchmarks/verl_table.py

bench-openrlhf: openrlhf-environment
	OMP_NUM_THREADS=1 $(OPENRLHF)/bin/python benchmarks/openrlhf_periodic.py --out docs/results/openrlhf_periodic.json
	OMP_NUM_THREADS=2 $(OPENRLHF)/bin/python benchmarks/openrlhf_update.py --out docs/results/openrlhf_update.json
	$(OPENRLHF)/bin/python benchmarks/openrlhf_table.py

bench-areal: areal-environment
	OMP_NUM_THREADS=1 $(AREAL)/bin/python benchmarks/areal_periodic.py --out docs/results/areal_periodic.json
	OMP_NUM_THREADS=2 $(AREAL)/bin/python benchmarks/areal_update.py --out docs/results/areal_update.json
	OMP_NUM_THREADS=2 $(AREAL)/bin/python benchmarks/areal_tree.py --layers 6 --repeats 2 --rounds 1 --out docs/results/areal_tree.json
	$(AREAL)/bin/python benchmarks/areal_table.py
