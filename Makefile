# virtkit. `make help` lists the targets.
#
# VIRTKIT_STATE_DIR sets where guests, images and kernels are kept, for any of
# them. FUZZTIME is how long each fuzz target runs.

SHELL       := bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := build

GO       ?= go
FUZZTIME ?= 10s
VERSION  ?= 0.1.0-dev
AGENT    := vmm/boot/assets/vk-agent
LINKS    := vk-hub vk-gitlab vk-agent vk-runnerctl

# One value for host and guest, made of the sources and the toolchain alone, so
# that the same tree always gives the same two programs.
SOURCES  = $(shell find . -name '*.go' -not -name '*_test.go' -not -path './bin/*' | LC_ALL=C sort) go.mod go.sum
BUILD    = $(shell { $(GO) env GOVERSION; cat $(SOURCES); } | sha256sum | cut -c1-16)

# The same flags wherever something is compiled: what is compiled with others
# would be compiled twice, and all of the dependencies take minutes. Nothing of
# git goes into the programs: a clone may belong to somebody else.
FLAGS    = -trimpath -buildvcs=false -tags netgo,osusergo

export VIRTKIT_STATE_DIR

.PHONY: help
help: ## list the targets
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 12

.PHONY: build
build: ## bin/vk (static, with the guest's agent inside) and its links
	@build=$(BUILD); \
	mkdir -p bin $(dir $(AGENT)); \
	if [ -e bin/vk ]; then echo "building bin/vk"; else echo "building bin/vk, with all modules it needs: minutes, the first time"; fi; \
	CGO_ENABLED=0 $(GO) build -trimpath -buildvcs=false -tags vkagent,netgo,osusergo \
	  -ldflags "-s -w -X virtkit/core/version.Version=$(VERSION) -X virtkit/core/version.Build=$$build" -o $(AGENT).new .; \
	if cmp -s $(AGENT).new $(AGENT); then rm $(AGENT).new; else mv $(AGENT).new $(AGENT); fi; \
	CGO_ENABLED=1 $(GO) build $(FLAGS) \
	  -ldflags "-linkmode external -extldflags -static -s -w -X virtkit/core/version.Version=$(VERSION) -X virtkit/core/version.Build=$$build" -o bin/vk.new .; \
	mv bin/vk.new bin/vk; \
	for l in $(LINKS); do ln -sfn vk bin/$$l; done; \
	echo "bin/vk $$build: $$(stat -c %s bin/vk | numfmt --to=iec), agent $$(stat -c %s $(AGENT) | numfmt --to=iec)"

.PHONY: setup
setup: ## install what this host lacks (Debian packages; asks sudo unless root)
	@.ci/setup

.PHONY: setup-test
setup-test:
	@.ci/setup test

.PHONY: setup-fleet
setup-fleet:
	@.ci/setup fleet

.PHONY: setup-bench
setup-bench:
	@.ci/setup bench

.PHONY: kernel
kernel: ## the tuned guest kernel, into the state directory (about 12 minutes, once)
	@.ci/setup kernel
	@packaging/kernel/build.sh

# A kernel that is there already is kept: building it takes minutes.
.PHONY: kernel-if-missing
kernel-if-missing: build
	@if bin/vk kernel list --json | grep -q '"tuned": true'; then echo "tuned guest kernel: there already"; else $(MAKE) --no-print-directory kernel; fi

# Tests look at both kernels.
.PHONY: debian-kernel
debian-kernel: build
	@if bin/vk kernel list --json | grep -q '"origin": "debian"'; then echo "Debian's guest kernel: there already"; else bin/vk kernel fetch; fi

.PHONY: default-image
default-image: build
	@bin/vk pull local/default

.PHONY: demo
demo: setup build default-image ## one CI job in a microVM, from clone to test, with its trace
	@$(GO) run $(FLAGS) ./e2e/cmd/demo

.PHONY: demo-fleet
demo-fleet: setup-fleet build default-image ## a pipeline on a fleet: GitLab (a stand-in), hub, vk-gitlab and a node
	@$(GO) run $(FLAGS) ./e2e/cmd/demofleet

.PHONY: test
test: setup-test build kernel-if-missing debian-kernel default-image ## all tests, in real guests too
	@$(GO) vet $(FLAGS) ./...
	@PATH="$$PATH:$(CURDIR)/bin/tools" VIRTKIT_TEST_KERNEL=$$(bin/vk kernel list --json | sed -n 's/.*"image": "\(.*\/tuned-.*\)",*/\1/p' | head -1) \
	  $(GO) run $(FLAGS) ./e2e/cmd/testsum -strict -again 3 $(FLAGS) ./...

.PHONY: check
check: ## vet, format, house rules, static analysis
	@out=$$(gofmt -l $$(git ls-files '*.go' 2>/dev/null || find . -name '*.go')); \
	  if [ -n "$$out" ]; then echo "not formatted:"; echo "$$out"; exit 1; fi
	@$(GO) vet $(FLAGS) ./...
	@CGO_ENABLED=0 $(GO) vet -trimpath -tags vkagent,netgo,osusergo .
	@$(GO) test $(FLAGS) ./core/archtest/...
	@if [ -f packaging/tools/go.mod ]; then $(GO) run -modfile=packaging/tools/go.mod honnef.co/go/tools/cmd/staticcheck ./...; fi
	@echo "check: all well"

.PHONY: bench
bench: setup-bench build kernel-if-missing default-image ## measure beside floors and peers; writes bench.json
	@$(GO) run $(FLAGS) ./e2e/cmd/bench

# Making inputs small takes a minute each by default, in which nothing new is tried.
.PHONY: fuzz
fuzz: ## each fuzz target for FUZZTIME
	@$(GO) list -f '{{if or .TestGoFiles .XTestGoFiles}}{{.ImportPath}}{{end}}' ./... | while read -r pkg; do \
	  $(GO) test -list '^Fuzz' "$$pkg" | grep '^Fuzz' | while read -r f; do \
	    echo "== $$pkg $$f"; $(GO) test -run '^$$' -fuzz "^$$f\$$" -fuzztime $(FUZZTIME) -fuzzminimizetime 1x "$$pkg" </dev/null; done \
	  || { s=("$${PIPESTATUS[@]}"); [ "$${s[0]}" = 0 ] && [ "$${s[1]}" = 1 ]; }; done

.PHONY: clean
clean: ## remove what was built here (the state directory stays)
	rm -rf bin $(AGENT) bench.json
