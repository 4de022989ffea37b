// Package applets holds the table of programs in this binary and picks one by
// the name the binary was called by. Applets only wire: they parse flags,
// build what they need, call core and print.
//
// The build tag vkagent links the guest's agent alone: what is in a guest's
// initramfs stays in the guest's memory for its whole life.
package applets

import (
	"context"
	"path/filepath"

	"virtkit/applets/internal/appenv"
)

// Env is the process around an applet.
type Env = appenv.Env

// FromOS is the Env of this process.
func FromOS() Env { return appenv.OS() }

// applet runs a program and returns its exit status. Args[0] is its name.
type applet func(ctx context.Context, env Env) int

// Main runs the program that env.Args[0] names and returns its exit status.
// An unknown name is vk, so that a renamed binary still works.
func Main(ctx context.Context, env Env) int {
	name := fallback
	args := []string(nil)
	if len(env.Args) > 0 {
		args = env.Args[1:]
		if base := filepath.Base(env.Args[0]); table()[base] != nil {
			name = base
		}
	}
	// `vk hub …` is vk-hub by a word, for where links are not wanted.
	if name == "vk" && len(args) > 0 && words[args[0]] != "" {
		name, args = words[args[0]], args[1:]
	}
	env.Args = append([]string{name}, args...)
	return table()[name](ctx, env)
}
