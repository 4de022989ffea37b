package gitlabtest

import (
	"bytes"
	"encoding/json"
	"fmt"
	"net/http"
	"strconv"
)

// Rule is how the server misbehaves, in the form of the recordings' rules.json:
// it decides the answers to some of an endpoint's requests.
type Rule struct {
	On   string `json:"on"`             // endpoint
	Nth  int    `json:"nth,omitempty"`  // the nth request only, from 1
	From int    `json:"from,omitempty"` // the nth and later
	To   int    `json:"to,omitempty"`   // up to the nth

	Status    int               `json:"status,omitempty"` // 0 = as it would be
	Apply     bool              `json:"apply,omitempty"`  // the request takes effect all the same
	JobStatus string            `json:"job_status,omitempty"`
	Interval  int               `json:"interval,omitempty"` // X-GitLab-Trace-Update-Interval, seconds
	Headers   map[string]string `json:"headers,omitempty"`
	Body      json.RawMessage   `json:"body,omitempty"`
	Terminal  bool              `json:"terminal,omitempty"` // the recording ends with it; no effect here
}

// ParseRules reads a rules.json.
func ParseRules(b []byte) ([]Rule, error) {
	dec := json.NewDecoder(bytes.NewReader(b))
	dec.DisallowUnknownFields()
	var rules []Rule
	if err := dec.Decode(&rules); err != nil {
		return nil, fmt.Errorf("decoding rules: %w", err)
	}
	return rules, nil
}

// rule is the first that fits. mu is held.
func (s *Server) rule(endpoint string, nth int) *Rule {
	for i := range s.rules {
		r := &s.rules[i]
		if r.On == endpoint && (r.Nth == 0 || r.Nth == nth) && nth >= r.From && (r.To == 0 || nth <= r.To) {
			return r
		}
	}
	return nil
}

// over changes an answer as the rule says.
func (r *Rule) over(rep *reply, job *Job) {
	if r.Status != 0 {
		header := rep.header
		*rep = message(r.Status, fmt.Sprintf("%d from rule", r.Status))
		if r.Apply {
			rep.header, rep.body = header, strconv.Itoa(r.Status)
		}
	}
	if len(r.Body) > 0 {
		rep.body, rep.ctype = string(r.Body), "application/json"
	}
	if r.JobStatus != "" {
		if job != nil && rep.status < http.StatusBadRequest {
			job.Status = r.JobStatus
		}
		rep.header = append(rep.header, [2]string{"Job-Status", r.JobStatus})
	}
	if r.Interval > 0 {
		rep.header = append(rep.header, [2]string{"X-GitLab-Trace-Update-Interval", strconv.Itoa(r.Interval)})
	}
	for k, v := range r.Headers {
		rep.header = append(rep.header, [2]string{k, v})
	}
}
