package hub

import "virtkit/core/policy"

// ShownReport is what is shown of a report that a node sent, and what would be
// if its node had not had the last word. ok is false for one that is not taken.
func (h *Hub) ShownReport(b []byte) (r, partial *policy.Report, ok bool, err error) {
	e, ok := h.jobs.packReport(1, b)
	if !ok {
		return nil, nil, false, nil
	}
	if r, err = h.shownReport(&e, false); err == nil {
		partial, err = h.shownReport(&e, true)
	}
	return r, partial, true, err
}

// ReadSubject reads whom a rule selects, and says whether a job of that project
// of the server "gl" is one.
func ReadSubject(text, path string) (shown string, selects bool, err error) {
	s, shown, err := parseSubject(text)
	return shown, err == nil && s.selects(&Claims{Instance: "gl", Project: 7, Path: path, Ref: "main", Protected: true}), err
}

// PeopleOf is the batch of a grant that is put (true) and dropped in turn.
func PeopleOf(g Grant, puts ...bool) PeopleBatch {
	t := &tx{s: Snapshot{Grants: map[string]Grant{}}}
	for _, put := range puts {
		if put {
			t.grant(g)
		} else {
			t.dropGrant(g.Address)
		}
	}
	return t.b.PeopleBatch
}
