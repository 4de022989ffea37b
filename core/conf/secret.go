package conf

import (
	"fmt"
	"log/slog"
)

// Secret is text that never shows itself: printing, logging and encoding it
// give "[redacted]". Reveal is the one way to the text.
type Secret string

const redacted = "[redacted]"

// Reveal is the text itself, for the one place that needs it.
func (s Secret) Reveal() string { return string(s) }

// String hides the text.
func (s Secret) String() string {
	if s == "" {
		return ""
	}
	return redacted
}

// GoString hides the text from %#v.
func (s Secret) GoString() string { return "conf.Secret(" + s.String() + ")" }

// Format hides the text from every verb, %x and %q included.
func (s Secret) Format(f fmt.State, verb rune) { fmt.Fprint(f, s.String()) }

// MarshalText hides the text from encoders of JSON and TOML.
func (s Secret) MarshalText() ([]byte, error) { return []byte(s.String()), nil }

// LogValue hides the text from slog.
func (s Secret) LogValue() slog.Value { return slog.StringValue(s.String()) }
