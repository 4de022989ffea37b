package checkout

import (
	"fmt"
	"net/url"
	"slices"
	"strings"

	"virtkit/core/fault"
	"virtkit/core/lazyre"
)

// Job is what one job wants of its sources.
type Job struct {
	Slot    string // one of the runner's concurrent places; [A-Za-z0-9._-]
	Project string // one project of one server; likewise

	URL      string // http or https; user and password in it are used and never stored
	User     string // where URL has none
	Token    string // likewise
	CA       string // certificates of the server, PEM; "" = the host's
	Insecure bool   // the server's certificate does not matter (GIT_SSL_NO_VERIFY)

	SHA      string
	Ref      string // for the trace
	Refspecs []string
	Depth    int    // commits; 0 = all
	Format   string // of object names: "", "sha1", "sha256"

	Fresh      bool     // GIT_STRATEGY=clone: nothing of an earlier job is used
	NoCheckout bool     // GIT_CHECKOUT=false
	CleanFlags []string // of git clean; nil = no cleaning
	FetchFlags []string // of git fetch

	Submodules *Submodules // nil = none

	Dir       string // what the guest calls the tree
	UserAgent string // "" = git's own
	Attempts  int    // to fetch; less than 1 = 1
}

// DefaultCleanFlags and DefaultFetchFlags are the runner's where a job says
// nothing.
var (
	DefaultCleanFlags = []string{"-ffdx"}
	DefaultFetchFlags = []string{"--prune", "--quiet"}
)

var (
	nameForm    = lazyre.New(`^[A-Za-z0-9][A-Za-z0-9._-]{0,200}$`)
	shaForm     = lazyre.New(`^([0-9a-f]{40}|[0-9a-f]{64})$`)
	refspecForm = lazyre.New(`^\+?[0-9A-Za-z][^\s:^~?\\\[\x00-\x1f\x7f]*(:refs/[^\s:^~?\\\[\x00-\x1f\x7f]+)?$`)
)

// fetchFlags are those of git fetch that a job may give: none of them runs a
// program, reads a file, or goes elsewhere than to the server.
var fetchFlags = []string{
	"--prune", "-p", "--no-prune", "--quiet", "-q", "--verbose", "-v", "--progress", "--no-progress", "--tags", "-t",
	"--no-tags", "-n", "--force", "-f", "--no-auto-gc", "--no-auto-maintenance", "--auto-gc", "--auto-maintenance",
	"--update-head-ok", "-u", "--prune-tags", "-P", "--ipv4", "-4", "--ipv6", "-6", "--no-write-fetch-head",
	"--write-fetch-head", "--no-show-forced-updates", "--show-forced-updates", "--atomic", "--keep", "-k",
}

// ParseFlags splits what a job gives as flags of git, as the runner does: at
// white space.
func ParseFlags(s string) []string { return strings.Fields(s) }

// check refuses what cannot or must not work. Whose fault it is: what a job's
// variables say is the job's.
func (j *Job) check() error {
	bad := func(format string, a ...any) error { return fault.Newf(fault.System, format, a...) }
	switch {
	case !nameForm.MatchString(j.Slot):
		return bad("slot %q is not made of letters, digits, dots, dashes and underscores", j.Slot)
	case !nameForm.MatchString(j.Project):
		return bad("project %q is not made of letters, digits, dots, dashes and underscores", j.Project)
	case !shaForm.MatchString(j.SHA):
		return bad("commit %q is not 40 or 64 hexadecimal digits", j.SHA)
	case j.Format != "" && j.Format != "sha1" && j.Format != "sha256":
		return bad("object format %q is not sha1 or sha256", j.Format)
	case j.Depth < 0:
		return bad("depth %d is below 0", j.Depth)
	case len(j.Refspecs) == 0:
		return bad("the job has no refspecs to fetch")
	case strings.ContainsAny(j.User+j.Token, "\x00\r\n"):
		return bad("the job's token has a line break in it")
	}
	for _, r := range j.Refspecs {
		if !refspecForm.MatchString(r) {
			return bad("refspec %q is not one", r)
		}
	}
	if _, _, _, err := splitURL(j.URL); err != nil {
		return err
	}
	for _, f := range j.FetchFlags {
		if !slices.Contains(fetchFlags, f) {
			return fault.Newf(fault.JobFailed, "GIT_FETCH_EXTRA_FLAGS: %q is not taken where the host fetches the sources", f).
				Hint("of git fetch's flags these are: %s", strings.Join(fetchFlags, " "))
		}
	}
	return checkClean(j.CleanFlags)
}

// checkClean lets the flags of git clean pass that remove, keep or tell.
func checkClean(flags []string) error {
	bad := func(f string) error {
		return fault.Newf(fault.JobFailed, "GIT_CLEAN_FLAGS: %q is not taken where the host fetches the sources", f).
			Hint("of git clean's flags these are: -f -d -x -X -q -n, and -e or --exclude with a pattern; \"none\" cleans nothing")
	}
	for i := 0; i < len(flags); i++ {
		f := flags[i]
		switch {
		case f == "-e":
			if i++; i == len(flags) {
				return bad(f)
			}
		case strings.HasPrefix(f, "--exclude="), f == "--force", f == "--quiet", f == "--dry-run":
		case strings.HasPrefix(f, "-e"):
		case len(f) > 1 && f[0] == '-' && strings.Trim(f[1:], "fdxXqn") == "":
		case len(f) > 1 && f[0] == '-' && strings.HasSuffix(f, "e") && strings.Trim(f[1:len(f)-1], "fdxXqn") == "":
			if i++; i == len(flags) { // as -ffdxe PATTERN
				return bad(f)
			}
		default:
			return bad(f)
		}
	}
	return nil
}

// splitURL takes the credentials out of a repository's address.
func splitURL(raw string) (clean, user, password string, err error) {
	u, err := url.Parse(raw)
	if err != nil || u.Host == "" || u.Scheme != "http" && u.Scheme != "https" {
		scheme := ""
		if u != nil && u.Scheme != "" {
			scheme = " (" + u.Scheme + ":)"
		}
		// Never the address itself: it may have a token in it.
		return "", "", "", fault.Newf(fault.System, "the repository's address%s is not one of http or https", scheme).
			Hint("set [executor] host_checkout = false for repositories that are reached another way")
	}
	if u.User != nil {
		user = u.User.Username()
		password, _ = u.User.Password()
	}
	u.User, u.Fragment, u.RawQuery = nil, "", ""
	return u.String(), user, password, nil
}

// credentials are those of URL, else the job's own.
func (j *Job) credentials() (clean, user, password string) {
	clean, user, password, _ = splitURL(j.URL)
	if password == "" {
		user, password = j.User, j.Token
	}
	return clean, user, password
}

// origin is the part of an address that credentials are for.
func origin(clean string) string {
	u, err := url.Parse(clean)
	if err != nil {
		return ""
	}
	return fmt.Sprintf("%s://%s", u.Scheme, u.Host)
}

// Credentials are those in a repository's address, and the server that they are
// for ("https://host:port"); all "" for an address that is none of a server.
func Credentials(raw string) (server, user, password string) {
	clean, user, password, err := splitURL(raw)
	if err != nil {
		return "", "", ""
	}
	return origin(clean), user, password
}
