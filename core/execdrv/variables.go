package execdrv

import (
	"fmt"
	"maps"
	"slices"
	"strconv"
	"strings"

	"virtkit/core/fault"
	"virtkit/core/lazyre"
	"virtkit/core/policy"
)

// VarPrefix begins every job variable that is addressed to virtkit.
const VarPrefix = "MICROVM_"

// Job variables that virtkit obeys.
const (
	VarImage = "MICROVM_IMAGE"
	VarCPUs  = "MICROVM_CPUS"
	VarMem   = "MICROVM_MEM"
	VarUser  = "MICROVM_USER"
	// VarUsageReport ends the trace with what the jobs of the project have been
	// using.
	VarUsageReport = "MICROVM_USAGE_REPORT"
)

// obeyed are all of them: those above, and those of core/policy.
var obeyed = []string{VarImage, VarCPUs, VarMem, VarUser, VarUsageReport, policy.DryRunVariable, policy.Run.AuditVariable(),
	policy.Run.Variable(policy.DimName), policy.Run.Variable(policy.DimIP)}

// notYet are variables that later versions obey, with what happens instead.
var notYet = map[string]string{
	"MICROVM_BUILD_EGRESS_ALLOW_IP":   "images are not built from Dockerfiles yet",
	"MICROVM_BUILD_EGRESS_ALLOW_NAME": "images are not built from Dockerfiles yet",
	"MICROVM_BUILD_EGRESS_AUDIT":      "images are not built from Dockerfiles yet",
}

// Limits are the host's defaults and ceilings for a job's guest.
type Limits struct {
	CPUs, MaxCPUs     int
	MemMiB, MaxMemMiB int
	BudgetMiB         int    // of all guests together; 0 = none. What a job asks for is held under it too
	Image             string // when neither MICROVM_IMAGE nor image: is given
}

// MinMemMiB is the least memory that a guest boots with.
const MinMemMiB = 128

// Wanted is what a job asks for, within the limits.
type Wanted struct {
	Image     string
	ImageFrom string // the variable or key that named it
	CPUs      int
	MemMiB    int
	User      string   // "" = the image's
	UserFrom  string   // the variable or key that named it; "" = the image
	Notes     []string // lines for the trace: clamps
	Warnings  []string // lines for the trace: what is not obeyed

	memAsked bool // the job says how much memory, not the host
}

// ReadWanted reads the job's variables. Every wrong value is reported, joined
// in one error of kind JobFailed.
func ReadWanted(c *Call, r Response, l Limits) (Wanted, error) {
	w := Wanted{CPUs: l.CPUs, MemMiB: l.MemMiB}
	var bad []string
	w.Image, w.ImageFrom = pickImage(c, r, l)
	if v := strings.TrimSpace(c.Var(VarCPUs)); v != "" {
		if n, ok := parseCount(v); ok {
			w.CPUs = n
		} else {
			bad = append(bad, fmt.Sprintf("%s is %q, expected a whole number of at least 1", VarCPUs, c.Var(VarCPUs)))
		}
	}
	if v := strings.TrimSpace(c.Var(VarMem)); v != "" {
		switch n, ok := parseMiB(v); {
		case !ok:
			bad = append(bad, fmt.Sprintf("%s is %q, expected a size such as 2G or 512M", VarMem, c.Var(VarMem)))
		case n < MinMemMiB:
			bad = append(bad, fmt.Sprintf("%s is %q, expected at least %dM", VarMem, c.Var(VarMem), MinMemMiB))
		default:
			w.MemMiB, w.memAsked = n, true
		}
	}
	if v := strings.TrimSpace(c.Var(VarUser)); v != "" {
		w.User, w.UserFrom = v, VarUser
	} else if v := r.Image.DockerUser(); v != "" {
		w.User, w.UserFrom = v, "image:docker:user"
	}
	if w.User != "" && !userSyntax.MatchString(w.User) {
		bad = append(bad, fmt.Sprintf("%s is %q, expected a user name or number, or user:group", w.UserFrom, w.User))
	}
	if _, err := policy.ParseSwitch(VarUsageReport, c.Var(VarUsageReport)); err != nil {
		bad = append(bad, err.Error())
	}
	if bad != nil {
		return w, fault.New(fault.JobFailed, strings.Join(bad, "; ")).
			Hint("set the variable in the job's variables: in .gitlab-ci.yml, or leave it empty for the runner's default")
	}
	w.clamp(l)
	w.Warnings = unknownVars(c)
	return w, nil
}

func pickImage(c *Call, r Response, l Limits) (ref, from string) {
	if v := strings.TrimSpace(c.Var(VarImage)); v != "" {
		return v, VarImage
	}
	if v := strings.TrimSpace(r.Image.Name); v != "" {
		return v, "image:"
	}
	if v := strings.TrimSpace(c.Var("CI_JOB_IMAGE")); v != "" {
		return v, "image:"
	}
	return l.Image, "the runner's default"
}

func (w *Wanted) clamp(l Limits) {
	if l.MaxCPUs > 0 && w.CPUs > l.MaxCPUs {
		w.Notes = append(w.Notes, fmt.Sprintf("%s %d is over this runner's ceiling: using %d", VarCPUs, w.CPUs, l.MaxCPUs))
		w.CPUs = l.MaxCPUs
	}
	most := l.MaxMemMiB
	// A default that no job can be admitted with is the host's to mend, and is
	// not lowered in silence.
	if w.memAsked && l.BudgetMiB > 0 && (most == 0 || l.BudgetMiB < most) {
		most = l.BudgetMiB
	}
	if most > 0 && w.MemMiB > most {
		w.Notes = append(w.Notes, fmt.Sprintf("%s %s is over this runner's ceiling: using %s", VarMem, MiBText(w.MemMiB), MiBText(most)))
		w.MemMiB = most
	}
}

// unknownVars warns of what the job addressed to virtkit in vain.
func unknownVars(c *Call) []string {
	var out []string
	for _, name := range c.VarNames(VarPrefix) {
		if strings.TrimSpace(c.Var(name)) == "" {
			continue
		}
		if slices.Contains(obeyed, name) {
			continue
		}
		if instead, ok := notYet[name]; ok {
			out = append(out, fmt.Sprintf("%s is not obeyed yet: %s", name, instead))
			continue
		}
		line := fmt.Sprintf("%s is no variable of virtkit's", name)
		if near := nearest(name); near != "" {
			line += fmt.Sprintf(" (did you mean %s?)", near)
		}
		out = append(out, line)
	}
	return out
}

func parseCount(s string) (int, bool) {
	n, err := strconv.ParseUint(s, 10, 31)
	return int(n), err == nil && n >= 1
}

var memSyntax = lazyre.New(`^([0-9]{1,9})([GgMm])(i?[Bb])?$`)

func parseMiB(s string) (int, bool) {
	m := memSyntax.FindStringSubmatch(s)
	if m == nil {
		return 0, false
	}
	n, err := strconv.Atoi(m[1])
	if err != nil || n == 0 {
		return 0, false
	}
	if strings.EqualFold(m[2], "g") {
		n *= 1024
	}
	return n, true
}

// MiBText writes MiB as people write it in MICROVM_MEM.
func MiBText(n int) string {
	if n%1024 == 0 {
		return strconv.Itoa(n/1024) + "G"
	}
	return strconv.Itoa(n) + "M"
}

var userSyntax = lazyre.New(`^[A-Za-z0-9_][A-Za-z0-9_.-]{0,63}\$?(:[A-Za-z0-9_][A-Za-z0-9_.-]{0,63})?$`)

// nearest is the known name with the fewest edits from name, at most a third
// of its length.
func nearest(name string) string {
	best, dist := "", len(name)/3+1
	for _, k := range slices.Concat(obeyed, sortedNotYet()) {
		if d := edits(name, k); d < dist {
			best, dist = k, d
		}
	}
	return best
}

func sortedNotYet() []string { return slices.Sorted(maps.Keys(notYet)) }

// edits is the Levenshtein distance.
func edits(a, b string) int {
	row := make([]int, len(b)+1)
	for j := range row {
		row[j] = j
	}
	for i := 1; i <= len(a); i++ {
		prev := row[0]
		row[0] = i
		for j := 1; j <= len(b); j++ {
			cost := 1
			if a[i-1] == b[j-1] {
				cost = 0
			}
			prev, row[j] = row[j], min(prev+cost, row[j]+1, row[j-1]+1)
		}
	}
	return row[len(b)]
}
