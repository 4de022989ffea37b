// Package version names this build. Host and guest compare Build for equality
// at first contact, because they always ship together.
package version

import "runtime/debug"

// Version is the release, set by the linker (-X virtkit/core/version.Version=…).
var Version = "0.1.0-dev"

// Build identifies one build of the sources; `make build` sets the same value
// in vk and in the guest's agent. Empty in `go test` binaries.
var Build = ""

// String is the release with the build behind it, for people.
func String() string {
	if Build == "" {
		return Version
	}
	return Version + " (" + Build + ")"
}

// GoVersion is the toolchain that compiled the program.
func GoVersion() string {
	if bi, ok := debug.ReadBuildInfo(); ok {
		return bi.GoVersion
	}
	return "unknown"
}
