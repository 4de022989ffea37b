package conf_test

import (
	"flag"
	"os"
	"regexp"
	"testing"

	"github.com/google/go-cmp/cmp"

	"virtkit/core/conf"
)

var update = flag.Bool("update", false, "rewrite docs/config.md and packaging/config.example.toml")

func TestDocs(t *testing.T) {
	for path, want := range map[string]string{
		"../../docs/config.md":                conf.Markdown(),
		"../../packaging/config.example.toml": conf.Example(),
	} {
		if *update {
			if err := os.WriteFile(path, []byte(want), 0o644); err != nil {
				t.Fatal(err)
			}
		}
		got, err := os.ReadFile(path)
		if err != nil {
			t.Fatal(err)
		}
		if d := cmp.Diff(want, string(got)); d != "" {
			t.Errorf("%s differs from the table; run go test ./core/conf -run TestDocs -update (-want +got)\n%s", path, d)
		}
	}
}

// TestExampleParses uncomments every key.
func TestExampleParses(t *testing.T) {
	if _, err := conf.Parse("example", []byte(conf.Example())); err != nil {
		t.Errorf("as it is: %v", err)
	}
	text := regexp.MustCompile(`(?m)^#([^ ])`).ReplaceAllString(conf.Example(), "$1")
	c, err := conf.Parse("example", []byte(text))
	if err != nil {
		t.Fatalf("uncommented: %v", err)
	}
	for _, k := range conf.Keys() {
		if c.Origin(k.Name).Source != conf.FromFile {
			t.Errorf("%s is not in the example", k.Name)
		}
	}
}
