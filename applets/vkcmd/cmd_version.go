package vkcmd

import (
	"context"
	"fmt"
	"io"
	"runtime"

	"github.com/urfave/cli/v3"

	"virtkit/applets/internal/cliutil"
	"virtkit/core/version"
)

func newVersion(a *app) *cli.Command {
	var asJSON bool
	return &cli.Command{
		Name:        "version",
		Usage:       "print the version of vk",
		Description: "Prints the release and the build. Host and guest agent are always of the same\nbuild.",
		Flags:       []cli.Flag{cliutil.Bool(&asJSON, "json", "print one JSON document (vk.version/1)")},
		Action: func(context.Context, *cli.Command) error {
			return printVersion(a.env.Stdout, asJSON)
		},
	}
}

func printVersion(w io.Writer, asJSON bool) error {
	if asJSON {
		return cliutil.JSON(w, "vk.version/1", struct {
			Version string `json:"version"`
			Build   string `json:"build"`
			Go      string `json:"go"`
			OS      string `json:"os"`
			Arch    string `json:"arch"`
		}{version.Version, version.Build, version.GoVersion(), runtime.GOOS, runtime.GOARCH})
	}
	_, err := fmt.Fprintf(w, "vk %s\n", version.String())
	return err
}
