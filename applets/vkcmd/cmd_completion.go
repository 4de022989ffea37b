package vkcmd

import (
	"context"
	"fmt"
	"io"
	"maps"
	"slices"
	"sort"
	"strings"

	"github.com/urfave/cli/v3"

	"virtkit/applets/internal/cliutil"
)

func newCompletion(a *app) *cli.Command {
	return cliutil.Takes(&cli.Command{
		Name:      "completion",
		Usage:     "print a shell's completion script",
		ArgsUsage: "bash|zsh|fish",
		Description: "Prints a script that completes commands, flags and the names of guests. In bash:\n" +
			"  source <(vk completion bash)",
		Action: func(_ context.Context, c *cli.Command) error {
			root := c.Root()
			switch c.Args().First() {
			case "bash":
				return bashCompletion(a.env.Stdout, root)
			case "zsh":
				fmt.Fprint(a.env.Stdout, "#compdef vk\nautoload -U +X bashcompinit && bashcompinit\n")
				return bashCompletion(a.env.Stdout, root)
			case "fish":
				return fishCompletion(a.env.Stdout, root)
			}
			return cliutil.BadOption("there is no completion for %q, only for bash, zsh and fish", c.Args().First())
		},
	}, cliutil.Arity{Min: 1, Max: 1})
}

// words lists, for each command path, what may follow it.
func words(root *cli.Command) map[string][]string {
	out := map[string][]string{}
	var walk func(c *cli.Command, path string, inherited []string)
	walk = func(c *cli.Command, path string, inherited []string) {
		var list []string
		for _, f := range cliutil.FlagsOf(c) {
			list = append(list, "--"+f.Names()[0])
			if !f.IsLocal() {
				inherited = append(inherited[:len(inherited):len(inherited)], "--"+f.Names()[0])
			}
		}
		list = append(list, cliutil.ChoicesOf(c.ArgsUsage)...)
		for _, w := range inherited {
			if path != root.Name {
				list = append(list, w)
			}
		}
		for _, s := range c.Commands {
			if s.Hidden {
				continue
			}
			list = append(list, s.Name)
			walk(s, path+" "+s.Name, inherited)
		}
		sort.Strings(list)
		out[path] = list
	}
	walk(root, root.Name, nil)
	return out
}

// choices lists, for each flag whose values are all known, those.
func choices(root *cli.Command) map[string][]string {
	out := map[string][]string{}
	var walk func(c *cli.Command)
	walk = func(c *cli.Command) {
		for _, f := range cliutil.FlagsOf(c) {
			for _, w := range f.Choices() {
				if name := "--" + f.Names()[0]; !slices.Contains(out[name], w) {
					out[name] = append(out[name], w)
				}
			}
		}
		for _, s := range c.Commands {
			if !s.Hidden {
				walk(s)
			}
		}
	}
	walk(root)
	return out
}

// named are the commands whose argument is a guest.
var named = map[string]bool{"vk exec": true, "vk logs": true, "vk stop": true, "vk reboot": true, "vk publish": true}

func bashCompletion(w io.Writer, root *cli.Command) error {
	var b strings.Builder
	b.WriteString("_vk() {\n\tlocal cur=${COMP_WORDS[COMP_CWORD]} path=vk i w list\n")
	b.WriteString("\tfor ((i = 1; i < COMP_CWORD; i++)); do\n\t\tw=${COMP_WORDS[i]}\n\t\tcase \"$path $w\" in\n")
	table := words(root)
	paths := make([]string, 0, len(table))
	for p := range table {
		paths = append(paths, p)
	}
	sort.Strings(paths)
	var below []string
	for _, p := range paths {
		if p != root.Name {
			below = append(below, fmt.Sprintf("%q", p))
		}
	}
	fmt.Fprintf(&b, "\t\t%s) path=\"$path $w\" ;;\n\t\tesac\n\tdone\n\tcase $path in\n", strings.Join(below, " | "))
	for _, p := range paths {
		fmt.Fprintf(&b, "\t%q) list=\"%s\" ;;\n", p, strings.Join(table[p], " "))
	}
	b.WriteString("\tesac\n\tcase $path in\n")
	var guests []string
	for p := range named {
		guests = append(guests, fmt.Sprintf("%q", p))
	}
	sort.Strings(guests)
	fmt.Fprintf(&b, "\t%s) [[ $cur == -* ]] || list=$(vk list 2>/dev/null | awk 'NR > 1 { print $2 }') ;;\n\tesac\n", strings.Join(guests, " | "))
	b.WriteString("\tcase ${COMP_WORDS[COMP_CWORD - 1]} in\n")
	known := choices(root)
	for _, f := range slices.Sorted(maps.Keys(known)) {
		fmt.Fprintf(&b, "\t%s) list=\"%s\" ;;\n", f, strings.Join(known[f], " "))
	}
	b.WriteString("\tesac\n")
	b.WriteString("\tCOMPREPLY=($(compgen -W \"$list\" -- \"$cur\"))\n}\ncomplete -o default -F _vk vk\n")
	_, err := io.WriteString(w, b.String())
	return err
}

func fishCompletion(w io.Writer, root *cli.Command) error {
	var b strings.Builder
	quote := func(s string) string {
		return "'" + strings.ReplaceAll(strings.ReplaceAll(s, `\`, `\\`), "'", `\'`) + "'"
	}
	var walk func(c *cli.Command, under []string)
	walk = func(c *cli.Command, under []string) {
		cond := "__fish_use_subcommand"
		if len(under) > 0 {
			var and []string
			for _, u := range under {
				and = append(and, "__fish_seen_subcommand_from "+u)
			}
			cond = strings.Join(and, "; and ")
		}
		for _, s := range c.Commands {
			if !s.Hidden {
				fmt.Fprintf(&b, "complete -c vk -f -n %s -a %s -d %s\n", quote(cond), s.Name, quote(s.Usage))
				if words := cliutil.ChoicesOf(s.ArgsUsage); words != nil {
					fmt.Fprintf(&b, "complete -c vk -f -n %s -a %s\n", quote("__fish_seen_subcommand_from "+s.Name), quote(strings.Join(words, " ")))
				}
				walk(s, append(under[:len(under):len(under)], s.Name))
			}
		}
		for _, f := range cliutil.FlagsOf(c) {
			need := " -r"
			if f.IsBoolFlag() {
				need = ""
			}
			if words := f.Choices(); words != nil {
				need = " -x -a " + quote(strings.Join(words, " "))
			}
			on := cond
			if !f.IsLocal() {
				on = "true"
			}
			fmt.Fprintf(&b, "complete -c vk -n %s -l %s%s -d %s\n", quote(on), f.Names()[0], need, quote(f.GetUsage()))
		}
	}
	walk(root, nil)
	fmt.Fprintf(&b, "complete -c vk -f -n '__fish_seen_subcommand_from exec logs stop reboot publish' -a \"(vk list 2>/dev/null | awk 'NR > 1 { print \\$2 }')\"\n")
	_, err := io.WriteString(w, b.String())
	return err
}
