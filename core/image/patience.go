package image

import (
	"errors"
	"fmt"
	"net/http"
	"sync"
	"time"
)

// defaultPatience is Options.Patience.
const defaultPatience = 5 * time.Minute

// patience is what is left of Options.Patience for one use of a registry.
type patience struct {
	most time.Duration

	mu    sync.Mutex
	since time.Time // of the first refusal in a row; zero: there is none
}

// answered takes note of an answer that is none of a busy registry.
func (p *patience) answered() {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.since = time.Time{}
}

// left is how much longer a refusing registry may be waited for.
func (p *patience) left() time.Duration {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.since.IsZero() {
		p.since = time.Now()
	}
	return p.most - time.Since(p.since)
}

// impatient is why a wait was not begun.
type impatient struct {
	status      string
	asked, most time.Duration
}

func (e *impatient) Error() string {
	return fmt.Sprintf("%s; it would have to be waited for another %v, and is waited for %v in all", e.status, e.asked.Round(100*time.Millisecond), e.most)
}

// redirectsMost is net/http's own bound, which it tells of in a text alone.
const redirectsMost = 10

// errRedirects is of a registry whose redirects lead to no answer.
type errRedirects struct{ to string }

func (e errRedirects) Error() string {
	return fmt.Sprintf("%d redirects in a row, the last one to %s", redirectsMost, e.to)
}

// redirected refuses a request that is the last of too many redirects.
func redirected(req *http.Request) error {
	n := 0
	for r := req; r != nil && r.Response != nil; r = r.Response.Request {
		n++
	}
	if n < redirectsMost-1 {
		return nil
	}
	return errRedirects{req.URL.Host + req.URL.Path}
}

// explainPatience words the errors above; nil for others.
func explainPatience(err error, registry, what string) error {
	if e, ok := errors.AsType[*impatient](err); ok {
		return unavailable("registry %s is too busy for %s: %s", registry, what, e.Error()).
			Hint("try again later; log in, since registries allow more to users they know; or use a mirror as [docker] repo").Because(cleaned(err))
	}
	if e, ok := errors.AsType[errRedirects](err); ok {
		return unavailable("registry %s redirects without end when asked for %s (to %s)", registry, what, e.to).
			Hint("is this the registry's address, or that of a page before it, such as a login?").Because(cleaned(err))
	}
	return nil
}
