package proctree

// Ways to list processes.
var (
	Tree   = tree
	Search = search
)
