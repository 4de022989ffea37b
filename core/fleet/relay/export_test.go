package relay

import "virtkit/core/gitlab"

// OnWrite has f called after each write of a state file of daemons opened with
// o; nil = not any more.
func OnWrite(o *Options, f func()) { o.wrote = f }

// Translate is translate, with what it refuses as a text.
var Translate = translate

var _ gitlab.Log = (*spool)(nil)
