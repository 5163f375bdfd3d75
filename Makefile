# build   release binaries, guest and zygote inside         test   everything that must hold, for CI: about 20 minutes
# run     build, prepare the languages, serve over HTTP    quick  tests without root, network and sandboxes: under a minute
# check   format, lints, licences, documents               docs   write docs/settings.md and docs/environment.md
# hostile the hostile tests in full                        bench  install the alternatives, measure, write docs/benchmarks
# neighbours  what one tenant notices of another's attacks, writes docs/neighbours.md
# browser install Chromium for the sandboxes               clean  remove what was built
# test-vm the program on other kernels, with cgroup v2 and systemd, under emulation (docs/lab.md)
# measure lines, function lengths, repeated names; AGAINST=REV compares with a revision, LIST=1 names what was counted

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := build
.PHONY: build run browser quick test test-vm hostile neighbours bench check docs measure clean needs

CARGO ?= cargo
TARGET := $(shell uname -m)-unknown-linux-gnu
OUT := $(or $(CARGO_TARGET_DIR),target)
GUEST := $(abspath $(OUT))/$(TARGET)/release/sandpool-guest
ZYGOTE := $(abspath $(OUT))/release/libsandpool_zygote.so
SANDPOOL := $(abspath $(OUT))/release/sandpool

build:
	RUSTFLAGS='-C target-feature=+crt-static' $(CARGO) build --locked --release --package sandpool-guest --bin sandpool-guest --target $(TARGET)
	$(CARGO) build --locked --release --package sandpool-zygote
	SANDPOOL_GUEST_EMBED='$(GUEST)' SANDPOOL_ZYGOTE_EMBED='$(ZYGOTE)' $(CARGO) build --locked --release --package sandpool --bin sandpool

run: build
	@$(SANDPOOL) setup >&2
	@scripts/client-config '$(SANDPOOL)'
	@exec $(SANDPOOL) serve

# Without it everything else works; what wants a browser says how to get one.
browser:
	@scripts/install chromium-headless-shell fonts-liberation libnss3-tools

needs:
	@scripts/test-needs

# Neither root nor a sandbox; a network only for what the first build fetches.
quick:
	@scripts/test quick

test:
	@scripts/test

# After `make test` nothing is built any more. KERNELS="bookworm bookworm-backports:plain", ARCH=aarch64: docs/lab.md.
test-vm: needs
ifeq ($(ARCH),aarch64)
	@scripts/test-vm-arm64
else
	$(CARGO) build --locked --workspace --all-targets
	@scripts/test-vm $(KERNELS)
endif

hostile:
	@scripts/test hostile

# One tenant attacks, another works: what the second notices, measured with the release build. Writes docs/neighbours.md.
neighbours: build
	SANDPOOL_NEIGHBOURS='$(abspath docs/neighbours.md)' SANDPOOL_NEIGHBOURS_BINARY='$(SANDPOOL)' scripts/test neighbours

# AGAINST=BINARY: measures an older build by turns with this one, and nothing else. BENCH: more arguments, such as `--only warm`.
bench: build
	$(CARGO) build --locked --release --package sandpool-bench
	@SANDPOOL='$(SANDPOOL)' AGAINST='$(AGAINST)' scripts/bench $(BENCH)

check:
	$(CARGO) fmt --all -- --check
	$(CARGO) clippy --locked --workspace --all-targets -- --deny warnings
	@deny="$$(scripts/cargo-tool cargo-deny 0.20.2)"; export PATH="$$deny:$$PATH"; \
	$(CARGO) deny --locked check licenses bans sources; \
	if $(CARGO) deny --locked fetch db; then $(CARGO) deny --locked check advisories; else echo 'SKIP advisories: the database is out of reach' >&2; fi
	RUSTDOCFLAGS='--deny warnings' $(CARGO) doc --locked --workspace --no-deps --quiet

docs:
	SANDPOOL_WRITE_DOCS=1 $(CARGO) test --locked --quiet --package sandpool --test documents settings

measure:
	@scripts/measure $(if $(AGAINST),--against '$(AGAINST)') $(if $(LIST),--list)

clean:
	$(CARGO) clean
