package cijob

import (
	"fmt"
	"strings"

	"virtkit/core/execdrv"
	"virtkit/core/fleet/job"
	"virtkit/core/lazyre"
)

// Colours of the trace.
const (
	green  = "\x1b[32;1m"
	yellow = "\x1b[0;33m"
	red    = "\x1b[31;1m"
	cyan   = "\x1b[36;1m"
	reset  = "\x1b[0;m"
)

// script is one stage's, in the words that every POSIX shell knows.
type script struct {
	b strings.Builder
	v variables
	p place
}

func (s *script) line(format string, a ...any) { fmt.Fprintf(&s.b, format+"\n", a...) }

// q makes a text one word.
func q(text string) string { return execdrv.Quote(text) }

// notice tells something in the trace, as the runner tells what it does.
func (s *script) notice(format string, a ...any) {
	s.line("printf '%%s\\n' %s", q(green+fmt.Sprintf(format, a...)+reset))
}

func (s *script) warning(text string) { s.line("printf '%%s\\n' %s", q(yellow+text+reset)) }

// bytes is the whole script: the work as one text that a shell of its own
// evaluates, so that a broken command of the job's cannot change what is around
// it, with nothing to read on its standard input.
func (s *script) bytes() []byte {
	var b strings.Builder
	if s.v.debug() {
		b.WriteString("set -x\n")
	}
	b.WriteString("trap 'exit 1' TERM\n")
	b.WriteString("if (set -o pipefail) 2>/dev/null; then set -o pipefail; fi\n")
	b.WriteString("set -e +C\n")
	b.WriteString("(\ntrap 'exit 1' TERM\neval " + q(s.b.String()) + "\n) </dev/null\n")
	b.WriteString("exit 0\n")
	return []byte(b.String())
}

// identifier is what a shell takes for a variable's name.
var identifier = lazyre.New(`^[A-Za-z_][A-Za-z0-9_]*$`)

// export sets the job's variables, makes files of those that are, and adds what
// earlier stages left in GITLAB_ENV. A name that no shell takes makes it fail,
// as it does with gitlab-runner.
func (s *script) export() {
	made := false
	for _, v := range s.v.list {
		value := v.Value
		if v.File {
			if !made {
				s.line("mkdir -p %s", q(s.p.tmp()))
				made = true
			}
			s.line("printf '%%s' %s > %s", q(v.Value), q(s.v.path(v.Key)))
			value = s.v.path(v.Key)
		}
		if identifier.MatchString(v.Key) {
			s.line("export %s=%s", v.Key, q(value))
		} else {
			s.line("export %s", q(v.Key+"="+value))
		}
	}
	if !made {
		s.line("mkdir -p %s", q(s.p.tmp()))
	}
	s.line(": >> %s", q(s.p.envFile()))
	s.line(`while read -r line; do export "$line"; done < %s`, q(s.p.envFile()))
}

// commands runs the job's own, each told before it is run.
func (s *script) commands(list []string, name string, o scriptOptions) {
	for i, c := range list {
		s.tell(c, fmt.Sprintf("section_%s_step_%d", name, i), o)
		s.line("%s", strings.TrimRight(c, "\n"))
		if o.check {
			s.line(`vk_status=$?; if [ "$vk_status" -ne 0 ]; then exit "$vk_status"; fi`)
		}
	}
}

// scriptOptions are how a job's flags have its commands told and run.
type scriptOptions struct {
	sections bool // FF_SCRIPT_SECTIONS, where GitLab folds sections
	check    bool // FF_ENABLE_BASH_EXIT_CODE_CHECK
}

// tell writes a command into the trace: its first line, or all of it in a
// section that GitLab folds.
func (s *script) tell(command, section string, o scriptOptions) {
	c := strings.TrimSpace(command)
	if c == "" {
		s.line("echo")
		return
	}
	if o.sections && strings.Contains(c, "\n") {
		s.line(`printf 'section_start:%%s:%s[hide_duration=true,collapsed=true]\r\033[0K%%s\n' "$(date +%%s)" %s`, section, q(green+"$ "+c+reset))
		s.line(`printf 'section_end:%%s:%s\r\033[0K\n' "$(date +%%s)"`, section)
		return
	}
	s.b.WriteString(execdrv.Echo(c))
}

// stagePrepare is prepare_script.
func stagePrepare(s *script, host string) {
	via := ""
	if host != "" {
		via = " via " + host
	}
	s.line(`printf 'Running on %%s%%s...\n' "$(hostname 2>/dev/null || cat /proc/sys/kernel/hostname)" %s`, q(via))
	s.line("rm -f %s", q(s.p.envFile()))
}

// stageStep is a step of the job's. Of a release the runner replaces the
// variables itself, before any shell sees them.
func stageStep(s *script, st job.Step, o scriptOptions) {
	s.export()
	s.line("cd %s", q(s.p.project))
	list := st.Script
	if st.Name == job.StepRelease {
		list = nil
		for _, c := range st.Script {
			list = append(list, s.v.expand(c))
		}
	}
	s.commands(list, "script", o)
}

// stageAfter is after_script.
func stageAfter(s *script, st job.Step, o scriptOptions) {
	s.export()
	s.line("cd %s", q(s.p.project))
	s.notice("Running after script...")
	s.commands(st.Script, "after_script", o)
}

// stageCleanFiles is cleanup_file_variables: nothing of the job's secrets stays
// in a file.
func stageCleanFiles(s *script) {
	s.export()
	list := q(s.p.envFile()) + " " + q(s.p.gitConfig())
	for _, v := range s.v.list {
		if v.File {
			list += " " + q(s.v.path(v.Key))
		}
	}
	s.line("rm -f %s", list)
	s.gitLocks()
}
