// Package cache keeps a job's caches in a registry: the cijob.Caches of a node.
//
// A cache is an OCI artifact of one layer, a tar compressed with zstd, in the
// repository
//
//	<[registry] repo>/ci-cache/<gitlab host>[/<gitlab path>]/<project id>
//
// Its tag is the sha256 of its key and of whether the job's ref is protected, so
// that an unprotected job can neither read nor write what a protected one does.
// The last archive written wins; one that the registry has already costs a
// request, for the same files make the same bytes.
//
// The words of the trace are those of gitlab-runner (vectors/cache-*), but where
// they name its own storage.
package cache

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"net/url"
	"strconv"
	"strings"
	"time"

	"virtkit/core/archive/pack"
	"virtkit/core/cijob"
	"virtkit/core/cijob/transfer"
	"virtkit/core/fault"
	"virtkit/core/fleet/job"
	"virtkit/core/image"
)

// kind is what a cache is in the registry.
var kind = image.Single{
	ConfigType: "application/vnd.virtkit.ci-cache.config.v1+json",
	LayerType:  "application/vnd.virtkit.ci-cache.layer.v1.tar+zstd",
	Config:     []byte(`{"schema":1}`),
}

// Colours of the lines that gitlab-runner's script prints.
const (
	green  = "\x1b[32;1m"
	yellow = "\x1b[0;33m"
	reset  = "\x1b[0;m"
)

// defaultTimeout is CACHE_REQUEST_TIMEOUT's when it is not set, in minutes.
const defaultTimeout = 10

// Registry implements cijob.Caches.
type Registry struct {
	Repo    string // [registry] repo: host and path prefix; "" = no caches are kept
	Auth    image.Auth
	Options image.Options
}

var _ cijob.Caches = (*Registry)(nil)

func say(w io.Writer, colour, format string, a ...any) {
	fmt.Fprint(w, colour+fmt.Sprintf(format, a...)+reset+"\n")
}

// Ref is where a job's cache of a key is.
func (r *Registry) Ref(j *job.CiJob, key string) (string, error) {
	u, err := url.Parse(j.ServerURL)
	if err != nil || u.Host == "" {
		return "", errors.New("GitLab's URL has no host")
	}
	path := clean(u.Host)
	for p := range strings.SplitSeq(u.Path, "/") {
		if p != "" {
			path += "/" + clean(p)
		}
	}
	protection := "unprotected"
	if j.Sources.Protected {
		protection = "protected"
	}
	sum := sha256.Sum256([]byte(protection + "\x00" + key))
	return strings.TrimRight(r.Repo, "/") + "/ci-cache/" + path + "/" + strconv.FormatInt(j.Job.ProjectID, 10) + ":" + hex.EncodeToString(sum[:]), nil
}

// clean makes a part of a repository's name: lower case, and dashes for what may
// not be in one.
func clean(s string) string {
	out := strings.Map(func(r rune) rune {
		if r >= 'a' && r <= 'z' || r >= '0' && r <= '9' || r == '.' {
			return r
		}
		return '-'
	}, strings.ToLower(s))
	if out = strings.Trim(out, "-."); out == "" {
		return "x"
	}
	for strings.Contains(out, "..") || strings.Contains(out, ".-") || strings.Contains(out, "-.") {
		out = strings.NewReplacer("..", ".", ".-", "-", "-.", "-").Replace(out)
	}
	return out
}

// limited bounds what is asked of the registry.
func limited(ctx context.Context, t cijob.Transfer) (context.Context, context.CancelFunc) {
	minutes := defaultTimeout
	if v, ok := t.Lookup("CACHE_REQUEST_TIMEOUT"); ok {
		if n, err := strconv.Atoi(strings.TrimSpace(v)); err == nil && n > 0 {
			minutes = n
		}
	}
	return context.WithTimeoutCause(ctx, time.Duration(minutes)*time.Minute, fmt.Errorf("the registry took longer than CACHE_REQUEST_TIMEOUT, %d minutes", minutes))
}

// Restore implements cijob.Caches.
func (r *Registry) Restore(ctx context.Context, t cijob.Transfer, c job.Cache) error {
	var again error
	for _, key := range append([]string{c.Key}, c.FallbackKeys...) {
		if key == "" {
			continue
		}
		say(t.Out, green, "Checking cache for %s...", key)
		log := transfer.NewLog(t.Err)
		log.Begin()
		err := r.restore(ctx, t, key, log)
		switch {
		case ctx.Err() != nil:
			return context.Cause(ctx)
		case err == nil:
			say(t.Out, green, "Successfully extracted cache")
			return nil
		case fault.KindOf(err) == fault.NotFound:
			log.Warning("Cache file does not exist", nil)
		default:
			log.Warning(err.Error(), nil)
			if k := fault.KindOf(err); k == fault.Unavailable || errors.Is(err, context.DeadlineExceeded) {
				again = err
			}
		}
		say(t.Out, yellow, "Failed to extract cache")
	}
	return again
}

// errNone is of a node without a registry.
var errNone = errors.New("this node has no [registry] repo: no caches are kept")

func (r *Registry) restore(ctx context.Context, t cijob.Transfer, key string, log *transfer.Log) error {
	if r.Repo == "" {
		return errNone
	}
	ref, err := r.Ref(t.Job, key)
	if err != nil {
		return err
	}
	f, err := transfer.Temp(t.Work)
	if err != nil {
		return err
	}
	defer f.Close()
	asking, cancel := limited(ctx, t)
	defer cancel()
	size, err := kind.Get(asking, ref, f, transfer.MaxArchive, r.Auth, r.Options)
	if err != nil {
		return err
	}
	log.Info("Downloading cache from "+ref, transfer.Fields{"size": size})
	return transfer.Extract(ctx, t, log, func(w io.Writer) error { return pack.Read(w, f) })
}

// Save implements cijob.Caches.
func (r *Registry) Save(ctx context.Context, t cijob.Transfer, c job.Cache) error {
	say(t.Out, green, "Creating cache %s...", c.Key)
	log := transfer.NewLog(t.Err)
	log.Begin()
	err := r.save(ctx, t, c, log)
	switch {
	case ctx.Err() != nil:
		return context.Cause(ctx)
	case err != nil:
		log.Warning(err.Error(), nil)
		say(t.Out, yellow, "Failed to create cache")
		return err
	}
	say(t.Out, green, "Created cache")
	return nil
}

func (r *Registry) save(ctx context.Context, t cijob.Transfer, c job.Cache, log *transfer.Log) error {
	if r.Repo == "" {
		return errNone
	}
	ref, err := r.Ref(t.Job, c.Key)
	if err != nil {
		return err
	}
	f, err := transfer.Temp(t.Work)
	if err != nil {
		return err
	}
	defer f.Close()
	level, _ := t.Env("CACHE_COMPRESSION_LEVEL")
	n := 0
	err = transfer.Archive(ctx, t, transfer.Selection{Paths: c.Paths, Untracked: c.Untracked}, log, func(in io.Reader) (err error) {
		n, err = pack.Write(&transfer.Capped{W: f, N: transfer.MaxArchive}, in, job.TarZstd, pack.Level(level))
		return err
	})
	if err != nil {
		return err
	}
	if n == 0 {
		// As with an archive of nothing, but what is kept stays.
		log.Warning("No files to cache.", nil)
		return nil
	}
	log.CheckLevel(level)
	asking, cancel := limited(ctx, t)
	defer cancel()
	size, err := kind.Put(asking, ref, f, r.Auth, r.Options)
	if err != nil {
		return err
	}
	log.Info("Uploading cache to "+ref, transfer.Fields{"size": size})
	return nil
}
