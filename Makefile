# `make demo` and `make test` need a Rust toolchain and nothing else; what they miss they install or say.

CARGO ?= cargo

# What the demo runs: one place for its data and its flags. The first and the last tile stay in f16, as people use it.
DEMO_DATA := data/smollm2_kv.safetensors
DEMO_EVAL := eval $(DEMO_DATA) --keep-first 128 --keep-last 128
DEMO_BENCH := bench --quick $(DEMO_DATA)

# Without a display, Mesa's device-select layer prints errors about the display it does not find.
ifndef XDG_RUNTIME_DIR
export NODEVICE_SELECT := 1
endif

.PHONY: help demo model web test test-web fmt docs

help: ## list the commands
	@sed -n 's/^\([a-z-]*\):.*## /make \1	/p' $(MAKEFILE_LIST)

demo: ## accuracy and speed on real keys and values, on the best adapter there is
	@scripts/install-software-vulkan.sh || echo "vulkan: going on with the CPU backend"
	$(CARGO) run --locked --release -- $(DEMO_EVAL)
	$(CARGO) run --locked --release -- $(DEMO_BENCH)

model: ## fetch a small language model (94 MB), write text with it, and measure what packing its cache costs
	@scripts/fetch-model.sh
	$(CARGO) run --locked --release -- generate --recipe calibquant:8+window=0 --chat "What is the sea made of?"
	$(CARGO) run --locked --release -- eval --model --lengths 512 --passkey-tokens 512 --recipes f16 calibquant:8 saw-int4 kivi:2

web: ## kvpack in the browser: builds a page that checks and times the kernels, and serves it to this machine
	@scripts/build-web.sh
	@target/debug/kvpack-web-build serve target/web

test: ## everything that CI checks; scripts/test.sh says what
	@scripts/test.sh

test-web: ## the page in Chromium with every conformance case; scripts/test-web.sh says what
	@scripts/test-web.sh all

fmt: ## format the code
	$(CARGO) fmt --all

docs: ## build the documentation of the library
	RUSTDOCFLAGS="-D warnings" $(CARGO) doc --locked --no-deps --all-features
