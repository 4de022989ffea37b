package erofs

// Copied has f called for each file when its content is copied, before the last
// look at it.
func (t *Tree) Copied(f func(name string)) { t.copied = func(n *node) { f(n.name) } }
