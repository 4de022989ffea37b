// Command cmd is the agent alone, for tests and measurements of it.
package main

import (
	"context"
	"os"

	"virtkit/agent"
)

func main() {
	os.Exit(agent.Main(context.Background(), os.Args, os.Stdin, os.Stdout, os.Stderr))
}
