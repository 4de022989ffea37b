package transfer_test

import (
	"strings"
	"testing"

	"virtkit/core/cijob"
	"virtkit/core/cijob/transfer"
)

func TestWords(t *testing.T) {
	vars := map[string]string{"A": "one", "EMPTY": "", "Ü": "no"}
	tr := cijob.Transfer{Env: func(name string) (string, bool) { v, ok := vars[name]; return v, ok }}
	for in, want := range map[string]string{
		"":                            "",
		"plain/*.txt":                 "plain/*.txt",
		"$A-${A}x$Ax":                 "one-onex",
		"${NONE:-else}${EMPTY:-e}":    "elsee",
		"${NONE-else}${EMPTY-e}":      "else",
		"${A:-else}${NONE:-${A}/$A}":  "oneone/one",
		"${A:+then}${EMPTY:+t}${A+t}": "thent",
		"${NONE+t}${EMPTY+t}":         "t",
		"${#A}":                       "3",
		`\$A \\ \x "q"`:               `$A \ \x "q"`,
		"$$ $? $1 $":                  "   $",
		"a$/b${":                      "a$/b${",
		"$Ü":                          "$Ü",
		"$(id) `id`":                  "$(id) `id`",
	} {
		if got := transfer.Words(tr, in); got != want {
			t.Errorf("%q: %q, want %q", in, got, want)
		}
	}
}

// TestLongWords: what a job's author writes costs its host little, however it is
// nested.
func TestLongWords(t *testing.T) {
	looked := 0
	tr := cijob.Transfer{Env: func(string) (string, bool) { looked++; return "", false }}
	const n = 1 << 10
	near := strings.Repeat("${A:-", n/2) + "x" + strings.Repeat("}", n/2)
	if got := transfer.Words(tr, near); got != "x" {
		t.Errorf("nested %d deep: %.40q, want x", n/2, got)
	}
	far := "${A:-" + strings.Repeat("x", 8*n) + "}"
	if got := transfer.Words(tr, far); got != far {
		t.Errorf("one of %d bytes was read: %.40q", len(far), got)
	}
	looked = 0
	open := strings.Repeat("${A:-", 10*n) + strings.Repeat("}", 10*n)
	if transfer.Words(tr, open); looked > 2*n {
		t.Errorf("nested %d deep, %d variables were looked up", 10*n, looked)
	}
}
