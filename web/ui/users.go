package ui

import (
	"crypto/hmac"
	"fmt"
	"net/url"
	"strconv"
	"strings"
	"time"

	"virtkit/core/fleet/hub"
	"virtkit/core/fleet/wire"
)

// confirmTTL is how long a question waits for its answer.
const confirmTTL = 10 * time.Minute

type grantRow struct {
	hub.Grant
	Name string // as people read it
}

// users lists who may sign in, and as what.
func (u *UI) users(*visit) (*answer, error) {
	o := u.o.Hub.People()
	data := struct {
		Grants   []grantRow
		Provider string
		OIDC     bool
		Others   string
	}{OIDC: o.OIDC, Others: "are refused"}
	if at, err := url.Parse(u.o.Issuer); err == nil {
		data.Provider = at.Host
	}
	for _, g := range u.o.Hub.Snapshot().GrantList() {
		r := grantRow{g, g.Address}
		if g.Address == hub.Everyone {
			data.Others = "are viewers, by the grant for everyone"
			r.Name = "Everyone signed in through the provider"
			if data.Provider != "" {
				r.Name = "Everyone signed in through " + data.Provider
			}
		}
		data.Grants = append(data.Grants, r)
	}
	if o.DefaultRole == hub.Viewer && data.Others == "are refused" {
		data.Others = "are viewers, by default_role of hub.toml"
	}
	return &answer{page: "users", title: "Users", data: data}, nil
}

// changeUsers grants, changes and revokes a role. What takes something from
// somebody is asked again first.
func (u *UI) changeUsers(v *visit) (*answer, error) {
	f := v.r.PostForm
	c := hub.GrantChange{Role: hub.Role(f.Get("role")), KeepLast: true}
	var err error
	if c.Address, err = hub.Address(strings.TrimSpace(f.Get("address"))); err != nil {
		return nil, err
	}
	var seen *hub.Grant
	if g, ok := u.o.Hub.Snapshot().Grants[c.Address]; ok {
		seen = &g
	}
	if c.Lowers(seen) {
		ends := u.o.Hub.Now().Add(confirmTTL).Unix()
		if f.Get("confirm") == "" {
			return u.ask(v, &c, seen, ends), nil
		}
		if ends, err = strconv.ParseInt(f.Get("ends"), 10, 64); err != nil || ends <= u.o.Hub.Now().Unix() ||
			!hmac.Equal([]byte(f.Get("confirm")), []byte(confirmation(v.secret, &c, seen, ends))) {
			return nil, hub.ErrChanged
		}
	}
	c.Checked, c.Seen = true, seen
	if _, _, err := u.o.Hub.SetGrant(v.Context(), v.s.Principal(), c); err != nil {
		return nil, err
	}
	return &answer{to: "/users"}, nil
}

// confirmation is the answer to a question about a grant as it was seen: good
// for this session, this change and some minutes, and no more once the change
// was made, since the grant is another then.
func confirmation(secret string, c *hub.GrantChange, seen *hub.Grant, ends int64) string {
	return mac(secret, fmt.Sprintf("confirm %q %q %q %q %d %d", c.Address, c.Role, seen.Role, seen.Actor, seen.At, ends))
}

func (u *UI) ask(v *visit, c *hub.GrantChange, seen *hub.Grant, ends int64) *answer {
	what := fmt.Sprintf("Make %s a %s, who is an %s now?", c.Address, c.Role, seen.Role)
	if c.Role == hub.NoRole {
		what = fmt.Sprintf("Revoke the grant of %s, who is a %s now?", c.Address, seen.Role)
	}
	data := struct {
		What, Address, Confirm string
		Role                   hub.Role
		Ends                   int64
	}{wire.Clean(what, 400), c.Address, confirmation(v.secret, c, seen, ends), c.Role, ends}
	return &answer{page: "confirm", title: "Are you sure?", data: data}
}
