package transfer_test

import (
	"testing"

	"virtkit/core/cijob"
	"virtkit/core/cijob/transfer"
)

func TestWords(t *testing.T) {
	vars := map[string]string{"A": "one", "EMPTY": "", "Ü": "no"}
	tr := cijob.Transfer{Lookup: func(name string) (string, bool) { v, ok := vars[name]; return v, ok }}
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
