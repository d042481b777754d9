# `make demo` and `make test` need only a Rust toolchain. They install anything else that they need, or report that it is
# missing.

CARGO ?= cargo

# The path of the demo's page.
DEMO_REPORT := target/demo/report

# Without a display, Mesa's device-select layer prints errors about the display it does not find.
ifndef XDG_RUNTIME_DIR
export NODEVICE_SELECT := 1
endif

.PHONY: help demo model web test test-web fmt docs

help: ## list the commands
	@sed -n 's/^\([a-z-]*\):.*## /make \1	/p' $(MAKEFILE_LIST)

demo: ## show in a minute (after compiling) what packing costs on real keys and values, on this machine's GPU or CPU
	@mkdir -p $(dir $(DEMO_REPORT))
	$(CARGO) run --locked --release --bin kvpack -- demo --report $(DEMO_REPORT)

model: ## fetch a small language model (94 MB), write text with it, and measure what packing its cache costs
	@scripts/fetch-model.sh
	$(CARGO) run --locked --release -- generate --recipe turboquant-renormalized:4+centre+sink=128+window=128 --tokens 60
	$(CARGO) run --locked --release -- eval --model --lengths 1024 --passkey-tokens 512 \
		--recipes f16 int8+centre calibquant:4+sink=128 turboquant-renormalized:2+centre+sink=128+window=128

web: ## build the browser page, which checks and times the kernels, and serve it to this machine
	@scripts/build-web.sh
	@target/debug/kvpack-web-build serve target/web

test: ## run everything that CI checks; scripts/test.sh lists it
	@scripts/test.sh

test-web: ## test the page in Chromium with every conformance case; scripts/test-web.sh lists the parts
	@scripts/test-web.sh all

fmt: ## format the code
	$(CARGO) fmt --all

docs: ## build the documentation of the library
	RUSTDOCFLAGS="-D warnings" $(CARGO) doc --locked --no-deps --all-features
