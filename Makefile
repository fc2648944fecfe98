# Each target first does what it stands on and skips what is up to date: a second `make demo` starts at once.

SMOLLM2 := models/SmolLM2-135M-Instruct.Q4_1.gguf
GEMMA3  := models/gemma-3-270m.Q4_K_M.gguf
DEMO_QUESTION ?= What is the access code of the boathouse door?

# CI refuses warnings; a user whose compiler is newer than ours should still get a build. So should the sanitizers:
# between their checks GCC takes sound code for overlaps and mismatches. Every file is built without them, too.
WERROR := $(if $(filter true,$(CI)),ON,OFF)
build/asan/build.ninja build/tsan/build.ninja build/fuzz/build.ninja: WERROR := OFF
SOURCES = git ls-files -z --cached --others --exclude-standard -- '*.h' '*.cc'
CLANG_FORMAT = xargs -0r clang-format-14

.PHONY: help setup model models build build-cuda demo serve test test-long test-asan test-tsan fuzz bench format format-check clean

help: ## This list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-13s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

setup: ## Debian packages, and .venv with libllama in it
	@tools/setup.sh

model: $(SMOLLM2) ## The default model, into models/
	@echo $(SMOLLM2)

models: $(SMOLLM2) $(GEMMA3) ## Every model that the tests use
	@printf '%s\n' $^

# get_models.py carries the hashes, so a file older than it may be of another version.
$(SMOLLM2) $(GEMMA3): tools/get_models.py | setup
	@.venv/bin/python tools/get_models.py $@

# Later changes to CMakeLists.txt are ninja's to notice.
build/release/build.ninja build/asan/build.ninja build/tsan/build.ninja build/fuzz/build.ninja: build/%/build.ninja: CMakePresets.json | setup
	@cmake --preset $* -DDUALDECODER_WERROR=$(WERROR)
	@touch $@

build: build/release/build.ninja ## build/release/dualdecoder
	@cmake --build --preset release

build-cuda: setup ## build/cuda/dualdecoder, with ggml's CUDA backend, half an hour: CUDA_ARCHITECTURE=90a
	@tools/build_cuda.sh

# The KV of a full context takes 180 MiB; an eighth of it is near, the rest in a file.
demo: build $(SMOLLM2) ## One question about a long document, answered: DEMO_QUESTION="..."
	@mkdir -p build/demo
	@build/release/dualdecoder run -m $(SMOLLM2) -f demo/lighthouse-logbook.md -p "$(DEMO_QUESTION)" \
	  --chat --temp 0 -n 96 --far file:build/demo --near-memory 22.5MiB --budget 2048
	@echo "Ask more, and watch the tiers at work: make serve, then open http://127.0.0.1:8080"

serve: build $(SMOLLM2) ## The web page and the OpenAI API on http://127.0.0.1:8080, until Ctrl-C: SERVE_OPTIONS="--port 9000"
	@exec build/release/dualdecoder serve -m $(SMOLLM2) $(SERVE_OPTIONS)

test: build $(SMOLLM2) $(GEMMA3) ## Every test but the long ones
	@ctest --preset release

test-long: build $(SMOLLM2) $(GEMMA3) ## Agreement with libllama at 6,000 tokens, memory at 100,000: some minutes
	@ctest --preset long

test-asan test-tsan: test-%: build/%/build.ninja
	@cmake --build --preset $*
	@ctest --preset $*

test-asan: ## Tests labelled fast, with AddressSanitizer and UndefinedBehaviorSanitizer
test-tsan: ## Tests labelled fast, with ThreadSanitizer

FUZZ ?= far gguf grammar request schema text
FUZZ_SECONDS ?= 120
# Inputs that are found stay in the build folder. libllama and ggml are not instrumented: their memory is not looked at.
fuzz: build/fuzz/build.ninja ## Fuzz targets one after the other, two minutes each: FUZZ="schema" FUZZ_SECONDS=600
	@ninja -C build/fuzz $(addsuffix _fuzz,$(FUZZ))
	@for name in $(FUZZ); do mkdir -p build/fuzz/corpus/$$name; \
	  build/fuzz/tests/$${name}_fuzz -max_total_time=$(FUZZ_SECONDS) -timeout=10 -rss_limit_mb=4096 -use_value_profile=1 -print_final_stats=1 \
	    -close_fd_mask=1 -artifact_prefix=build/fuzz/$$name- build/fuzz/corpus/$$name tests/fuzz/corpus/$$name || exit 1; done

# Results that are there are kept; BENCH_DIR=... for another place.
BENCH_DIR ?= build/bench
bench: build $(SMOLLM2) ## The canonical comparison and its report, a quarter of an hour on a quiet machine
	@tools/bench.sh $(SMOLLM2) $(BENCH_DIR)
	@.venv/bin/python tools/report.py $(BENCH_DIR)

format: setup ## Formats every C++ file
	@$(SOURCES) | $(CLANG_FORMAT) -i

format-check: setup ## Fails if `make format` would change a file
	@$(SOURCES) | $(CLANG_FORMAT) --dry-run -Werror

clean: ## Removes build/; .venv and models/ stay
	rm -rf build
