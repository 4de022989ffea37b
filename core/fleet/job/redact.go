package job

import (
	"cmp"
	"encoding/json"
	"reflect"
	"slices"
	"strings"
)

// Hidden stands where Redacted took a secret away.
const Hidden = "[REDACTED]"

// minFound is how short a secret may be, in bytes, to be looked for inside
// other texts: "1" or "no" there is no secret but a word like any other.
const minFound = 3

// Secrets are the values that a job's output must not show, as written:
// masked variables, the job's token and its dependencies', the passwords of
// registries. Empty ones are left out, each is there once, the longest first.
func (j *CiJob) Secrets() []string {
	out := []string{j.Token}
	vars := func(list []Variable) {
		for _, v := range list {
			if v.Masked {
				out = append(out, v.Value)
			}
		}
	}
	vars(j.Variables)
	images := j.Services
	if j.Image != nil {
		images = append(slices.Clip(images), *j.Image)
	}
	for _, i := range images {
		vars(i.Variables)
	}
	for _, d := range j.Dependencies {
		out = append(out, d.Token)
	}
	for _, c := range j.RegistryCredentials {
		out = append(out, c.Password)
	}
	for i, s := range out {
		out[i] = strings.TrimSpace(s) // as gitlab-runner masks them
	}
	out = slices.DeleteFunc(out, func(s string) bool { return s == "" })
	slices.SortFunc(out, func(a, b string) int { return cmp.Or(cmp.Compare(len(b), len(a)), strings.Compare(a, b)) })
	return slices.Compact(out)
}

// Redacted is a copy for records and logs: without the tokens, the passwords
// and the values of variables that are masked, files or not public, and without
// a copy of one of Secrets in another text, such as a command. It cannot be run.
func (j *CiJob) Redacted() *CiJob {
	b, err := json.Marshal(j)
	if err != nil {
		panic("job: a CiJob that is no JSON: " + err.Error()) // plain data: cannot be
	}
	var out CiJob
	if err := json.Unmarshal(b, &out); err != nil {
		panic("job: a CiJob that cannot be read back: " + err.Error())
	}
	secret := func(v Variable) bool { return v.Masked || v.File || !v.Public }
	var pairs []string
	for _, s := range j.Secrets() {
		if len(s) >= minFound {
			pairs = append(pairs, s, Hidden)
		}
	}
	replaceAll(reflect.ValueOf(&out).Elem(), strings.NewReplacer(pairs...))
	out.Token = hide(out.Token)
	hideAll := func(list []Variable) {
		for i := range list {
			if secret(list[i]) {
				list[i].Value = hide(list[i].Value)
			}
		}
	}
	hideAll(out.Variables)
	for _, s := range out.Services {
		hideAll(s.Variables)
	}
	if out.Image != nil {
		hideAll(out.Image.Variables)
	}
	for i := range out.Dependencies {
		out.Dependencies[i].Token = hide(out.Dependencies[i].Token)
	}
	for i := range out.RegistryCredentials {
		out.RegistryCredentials[i].Password = hide(out.RegistryCredentials[i].Password)
	}
	return &out
}

func hide(s string) string {
	if s == "" {
		return ""
	}
	return Hidden
}

// replaceAll puts every text below v through r. A variable's key and the kind
// are names that a reader finds things by: they stay.
func replaceAll(v reflect.Value, r *strings.Replacer) {
	switch v.Kind() {
	case reflect.Pointer:
		if !v.IsNil() {
			replaceAll(v.Elem(), r)
		}
	case reflect.Slice:
		for i := range v.Len() {
			replaceAll(v.Index(i), r)
		}
	case reflect.Struct:
		for i := range v.NumField() {
			if name := v.Type().Field(i).Name; name == "Key" && v.Type() == reflect.TypeFor[Variable]() || name == "Kind" {
				continue
			}
			replaceAll(v.Field(i), r)
		}
	case reflect.String:
		v.SetString(r.Replace(v.String()))
	}
}
