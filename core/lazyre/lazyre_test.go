package lazyre_test

import (
	"slices"
	"testing"

	"virtkit/core/lazyre"
)

func TestRE(t *testing.T) {
	re := lazyre.New(`^a(b+)$`)
	if !re.MatchString("abb") || re.MatchString("a") {
		t.Error("MatchString differs from regexp's")
	}
	if got := re.FindStringSubmatch("abb"); !slices.Equal(got, []string{"abb", "bb"}) {
		t.Errorf("FindStringSubmatch = %q", got)
	}
	bad := lazyre.New(`(`) // not compiled here
	defer func() {
		if recover() == nil {
			t.Error("a bad expression was used without a panic")
		}
	}()
	bad.MatchString("")
}
