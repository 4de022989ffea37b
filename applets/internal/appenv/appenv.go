// Package appenv is the process around an applet, passed in so that tests can
// run one without a process. It is apart from cliutil because the guest's
// agent is an applet too and must not link a command line library.
package appenv

import (
	"io"
	"os"
	"time"
)

// Env is what an applet may know of its process.
type Env struct {
	Args   []string // Args[0] is the applet's name, without a directory
	Stdin  io.Reader
	Stdout io.Writer
	Stderr io.Writer
	Getenv func(string) string
	// LookupEnv tells an empty variable from a missing one.
	LookupEnv func(string) (string, bool)
	// Environ is the whole environment, KEY=VALUE.
	Environ func() []string
	// Exe is the file of this program, for starting itself again. It is
	// /proc/self/exe in a real process, which stays right when the file is
	// replaced by an upgrade meanwhile.
	Exe string
	// Dir is the working directory.
	Dir func() (string, error)
	// Now is the wall clock; nil = time.Now.
	Now func() time.Time
}

// OS is the Env of this process.
func OS() Env {
	return Env{
		Args: os.Args, Stdin: os.Stdin, Stdout: os.Stdout, Stderr: os.Stderr,
		Getenv: os.Getenv, LookupEnv: os.LookupEnv, Environ: os.Environ,
		Exe: "/proc/self/exe", Dir: os.Getwd, Now: time.Now,
	}
}
