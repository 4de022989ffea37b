// Command vk runs CI jobs in throwaway microVMs. One binary holds every
// program of virtkit; the name it is called by picks the one that runs.
package main

import (
	"context"
	"os"

	"virtkit/applets"
)

func main() {
	os.Exit(applets.Main(context.Background(), applets.FromOS()))
}
