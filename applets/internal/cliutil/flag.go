package cliutil

import (
	"fmt"
	"strconv"
	"strings"
	"time"

	"github.com/docker/go-units"
)

// Flag is one flag of a command. It implements cli.Flag itself instead of
// using the library's types, because those cut lists at commas, trim spaces,
// take a flag given twice silently, and read the environment behind the
// caller's back.
type Flag struct {
	name   string
	short  string
	usage  string
	value  string // placeholder in help; "" for a switch
	def    string // default in help
	repeat bool
	global bool
	noEnv  bool
	opt    string // placeholder of a switch that may carry a value behind =
	set    func(string) error

	times   int
	fromEnv bool
	err     error
}

// Choices are the words that a flag takes, nil when it takes others too.
func (f *Flag) Choices() []string { return ChoicesOf(f.value) }

// ChoicesOf are the words of a placeholder such as auto|kvm|tcg, nil of any
// other.
func ChoicesOf(placeholder string) []string {
	words := strings.Split(placeholder, "|")
	for _, w := range words {
		if w == "" || strings.Trim(w, "abcdefghijklmnopqrstuvwxyz-") != "" {
			return nil
		}
	}
	if len(words) < 2 {
		return nil
	}
	return words
}

// String declares a flag with a text value.
func String(p *string, name, placeholder, usage string) *Flag {
	return &Flag{name: name, usage: usage, value: placeholder, def: *p, set: func(s string) error {
		*p = s
		return nil
	}}
}

// Strings declares a flag that may be given many times; each value is kept
// byte for byte.
func Strings(p *[]string, name, placeholder, usage string) *Flag {
	return &Flag{name: name, usage: usage, value: placeholder, repeat: true, set: func(s string) error {
		*p = append(*p, s)
		return nil
	}}
}

// Bool declares a switch.
func Bool(p *bool, name, usage string) *Flag {
	return &Flag{name: name, usage: usage, set: func(s string) error {
		v, err := strconv.ParseBool(s)
		if err != nil {
			return fmt.Errorf("%q is neither true nor false", s)
		}
		*p = v
		return nil
	}}
}

// Int declares a flag with a whole number within [lo, hi].
func Int(p *int, name, placeholder, usage string, lo, hi int) *Flag {
	f := &Flag{name: name, usage: usage, value: placeholder, set: func(s string) error {
		v, err := strconv.Atoi(s)
		if err != nil {
			return fmt.Errorf("%q is not a whole number", s)
		}
		if v < lo || v > hi {
			return fmt.Errorf("%d is not between %d and %d", v, lo, hi)
		}
		*p = v
		return nil
	}}
	if *p != 0 {
		f.def = strconv.Itoa(*p)
	}
	return f
}

// Size declares a flag with a size in bytes, written as 512M or 2GiB; units
// are powers of 1024.
func Size(p *int64, name, usage string, least int64) *Flag {
	f := &Flag{name: name, usage: usage, value: "SIZE", set: func(s string) error {
		v, err := units.RAMInBytes(s)
		if err != nil {
			return fmt.Errorf("%q is not a size such as 512M or 2G", s)
		}
		if v < least {
			return fmt.Errorf("%s is below the least of %s", s, units.BytesSize(float64(least)))
		}
		*p = v
		return nil
	}}
	if *p != 0 {
		f.def = units.BytesSize(float64(*p))
	}
	return f
}

// Duration declares a flag with a time span, written as 10s or 1m30s.
func Duration(p *time.Duration, name, usage string) *Flag {
	return &Flag{name: name, usage: usage, value: "DURATION", def: p.String(), set: func(s string) error {
		v, err := time.ParseDuration(s)
		if err != nil || v < 0 {
			return fmt.Errorf("%q is not a time span such as 10s or 1m30s", s)
		}
		*p = v
		return nil
	}}
}

// Choice declares a flag with one of a few words.
func Choice(p *string, name, usage string, words ...string) *Flag {
	return &Flag{name: name, usage: usage, value: strings.Join(words, "|"), def: *p, set: func(s string) error {
		for _, w := range words {
			if s == w {
				*p = s
				return nil
			}
		}
		return fmt.Errorf("%q is none of %s", s, strings.Join(words, ", "))
	}}
}

// Custom declares a flag whose value set takes; repeat says that it may come
// many times. An empty placeholder makes it a switch.
func Custom(name, placeholder, usage string, repeat bool, set func(string) error) *Flag {
	return &Flag{name: name, usage: usage, value: placeholder, repeat: repeat, set: set}
}

// Short adds a one-letter name.
func (f *Flag) Short(letter string) *Flag { f.short = letter; return f }

// Global makes the flag valid for all commands below.
func (f *Flag) Global() *Flag { f.global = true; return f }

// Default sets the text of the default shown in help, for flags whose default
// comes from the configuration.
func (f *Flag) Default(text string) *Flag { f.def = text; return f }

// NoEnv keeps the flag from having an environment variable. Only for help.
func (f *Flag) NoEnv() *Flag { f.noEnv = true; return f }

// EnvName is the environment variable that gives this flag, or "".
func (f *Flag) EnvName() string {
	if f.noEnv {
		return ""
	}
	return "VK_" + strings.ToUpper(strings.ReplaceAll(f.name, "-", "_"))
}

// Repeatable says whether the flag may be given many times.
func (f *Flag) Repeatable() bool { return f.repeat }

// Given says whether the flag was on the command line or in the environment.
func (f *Flag) Given() bool { return f.times > 0 }

// String implements cli.Flag.
func (f *Flag) String() string { return "--" + f.name }

// Get implements cli.Flag. Values live where the constructor was told to put
// them, so there is none here.
func (f *Flag) Get() any { return nil }

// PreParse implements cli.Flag.
func (f *Flag) PreParse() error { return nil }

// PostParse implements cli.Flag.
func (f *Flag) PostParse() error { return nil }

// Names implements cli.Flag.
func (f *Flag) Names() []string {
	if f.short != "" {
		return []string{f.name, f.short}
	}
	return []string{f.name}
}

// IsSet implements cli.Flag.
func (f *Flag) IsSet() bool { return f.times > 0 }

// IsBoolFlag tells the library's parser that no value follows.
func (f *Flag) IsBoolFlag() bool { return f.value == "" }

// IsLocal tells the library's parser whether sub-commands take the flag too.
func (f *Flag) IsLocal() bool { return !f.global }

// IsVisible implements cli.VisibleFlag.
func (f *Flag) IsVisible() bool { return true }

// GetUsage is the line of help.
func (f *Flag) GetUsage() string { return f.usage }

// Set implements cli.Flag. The error is kept, because the library turns it
// into text.
func (f *Flag) Set(_, s string) error {
	f.times++
	switch {
	case f.times > 1 && !f.repeat:
		f.err = fmt.Errorf("flag --%s: given twice", f.name)
	default:
		if err := f.set(s); err != nil {
			f.err = fmt.Errorf("flag --%s: %w", f.name, err)
		}
	}
	return f.err
}

// fromEnvironment sets the flag from its variable unless it was given. A
// repeatable flag takes one value a line.
func (f *Flag) fromEnvironment(lookup func(string) (string, bool)) error {
	if f.noEnv || f.times > 0 || lookup == nil {
		return nil
	}
	v, ok := lookup(f.EnvName())
	if !ok || v == "" {
		return nil
	}
	vals := []string{v}
	if f.repeat {
		vals = strings.Split(strings.TrimRight(v, "\n"), "\n")
	}
	f.fromEnv = true
	for _, s := range vals {
		if err := f.set(s); err != nil {
			return fmt.Errorf("variable %s: %w", f.EnvName(), err)
		}
		f.times++
	}
	return nil
}

// Optional says that the switch may carry a value behind an equals sign.
func (f *Flag) Optional(placeholder string) *Flag { f.opt = placeholder; return f }
