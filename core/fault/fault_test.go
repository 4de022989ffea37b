package fault_test

import (
	"errors"
	"fmt"
	"go/ast"
	"go/parser"
	"go/token"
	"io/fs"
	"slices"
	"strconv"
	"testing"

	"virtkit/core/fault"
)

// kinds reads the constants of type Kind out of the source, so that a new one
// cannot be forgotten in the table.
func kinds(t *testing.T) []fault.Kind {
	t.Helper()
	f, err := parser.ParseFile(token.NewFileSet(), "fault.go", nil, 0)
	if err != nil {
		t.Fatal(err)
	}
	var out []fault.Kind
	for _, d := range f.Decls {
		g, ok := d.(*ast.GenDecl)
		if !ok || g.Tok != token.CONST {
			continue
		}
		for _, s := range g.Specs {
			v := s.(*ast.ValueSpec)
			if id, ok := v.Type.(*ast.Ident); !ok || id.Name != "Kind" {
				continue
			}
			text, err := strconv.Unquote(v.Values[0].(*ast.BasicLit).Value)
			if err != nil {
				t.Fatal(err)
			}
			out = append(out, fault.Kind(text))
		}
	}
	return out
}

func TestTableIsComplete(t *testing.T) {
	ks := kinds(t)
	if len(ks) < 10 {
		t.Fatalf("found only %d kinds: %v", len(ks), ks)
	}
	reasons := []string{"script_failure", "runner_system_failure", "runner_configuration_error", "job_execution_timeout"}
	for _, k := range ks {
		m, ok := fault.Table[k]
		if !ok {
			t.Errorf("%s is not in the table", k)
			continue
		}
		if m.Exit < 1 || m.Exit > 130 || m.Exit == 125 {
			t.Errorf("%s: exit status %d; 125 is vk run's own, 126 up mean something to shells", k, m.Exit)
		}
		if m.HTTP < 200 || m.HTTP > 599 {
			t.Errorf("%s: HTTP status %d", k, m.HTTP)
		}
		if !slices.Contains(reasons, m.GitLab) {
			t.Errorf("%s: GitLab knows no failure reason %q", k, m.GitLab)
		}
	}
	for k := range fault.Table {
		if !slices.Contains(ks, k) {
			t.Errorf("the table has %q, which is no kind", k)
		}
	}
}

// TestPromisedNumbers holds what scripts rely on.
func TestPromisedNumbers(t *testing.T) {
	for k, want := range map[fault.Kind]int{fault.Usage: 2, fault.Partial: 3, fault.NotFound: 10, fault.Busy: 11,
		fault.Denied: 12, fault.Unavailable: 13, fault.Interrupted: 130, fault.System: 1, fault.JobFailed: 1, fault.Conflict: 1} {
		if got := fault.ExitCode(fault.New(k, "x")); got != want {
			t.Errorf("ExitCode(%s) = %d, want %d", k, got, want)
		}
	}
	if fault.Table[fault.JobFailed].Retryable || fault.Table[fault.JobFailed].GitLab != "script_failure" {
		t.Error("the user's own failure must not look like ours")
	}
	if fault.ExitCode(nil) != 0 || fault.ExitCode(errors.New("x")) != 1 {
		t.Error("ExitCode of nil is 0, of a plain error 1")
	}
}

func TestErrors(t *testing.T) {
	base := fault.New(fault.NotFound, "no such image")
	e := base.Hint("try %d things, or 100%% of %s", 2, "them").Because(fs.ErrNotExist)
	if got, want := e.Error(), "no such image: file does not exist"; got != want {
		t.Errorf("Error = %q, want %q", got, want)
	}
	if base.Error() != "no such image" || fault.HintOf(base) != "" {
		t.Error("Hint and Because changed the error they were called on")
	}
	if hinted := base.Hint("a"); hinted.Because(fs.ErrExist) == hinted || hinted.Unwrap() != nil || hinted.WithExit(7) == hinted || fault.ExitCode(hinted) != 10 {
		t.Error("Because or WithExit changed the error it was called on")
	}
	wrapped := fmt.Errorf("running it: %w", e)
	if !errors.Is(wrapped, fs.ErrNotExist) || fault.KindOf(wrapped) != fault.NotFound || fault.HintOf(wrapped) != "try 2 things, or 100% of them" {
		t.Errorf("wrapped: kind %s, hint %q", fault.KindOf(wrapped), fault.HintOf(wrapped))
	}
	// The outermost kind wins; a hint further in still shows.
	outer := fault.New(fault.System, "").Because(fmt.Errorf("x: %w", e))
	if fault.KindOf(outer) != fault.System || fault.HintOf(outer) == "" || outer.Error() != "x: no such image: file does not exist" {
		t.Errorf("outer: %s %q %q", fault.KindOf(outer), fault.HintOf(outer), outer)
	}
	if fault.KindOf(errors.New("plain")) != fault.System || fault.HintOf(errors.New("plain")) != "" || fault.HintOf(nil) != "" {
		t.Error("a plain error is a system failure without a hint")
	}
	joined := errors.Join(errors.New("plain"), fault.New(fault.Busy, "locked"))
	if fault.KindOf(joined) != fault.Busy || fault.ExitCode(joined) != 11 {
		t.Errorf("joined: %s", fault.KindOf(joined))
	}
	for _, code := range []int{0, 7, 255} {
		if got := fault.ExitCode(fmt.Errorf("x: %w", fault.New(fault.JobFailed, "").WithExit(code))); got != code {
			t.Errorf("WithExit(%d) gives %d", code, got)
		}
	}
}

// A kind that a newer peer sent is a failure like any other, not success.
func TestUnknownKind(t *testing.T) {
	err := fault.New("of_tomorrow", "no")
	if code, kind := fault.ExitCode(err), fault.KindOf(err); code != 1 || kind != fault.System {
		t.Errorf("exit status %d, kind %s", code, kind)
	}
}
