//go:build tools

// Package tools pins the versions of programs that check the source, apart
// from the module that is shipped.
package tools

import _ "honnef.co/go/tools/cmd/staticcheck"
