package artifact

import (
	"context"
	"errors"
	"io"
	"maps"
	"net/http"
	"net/url"
	"os"

	"virtkit/core/archive/pack"
	"virtkit/core/cijob"
	"virtkit/core/cijob/transfer"
	"virtkit/core/fleet/job"
)

// Download implements cijob.Artifacts.
func (c *Client) Download(ctx context.Context, t cijob.Transfer, d job.Dependency, direct bool) error {
	s, err := c.session(t, d.ID, d.Token)
	if err != nil {
		return err
	}
	defer s.close()
	s.log.Begin()
	f, err := transfer.Temp(t.Work)
	if err != nil {
		return err
	}
	defer f.Close()
	err = s.retried(ctx, "", func(try int) error {
		if err := f.Truncate(0); err != nil {
			return final{err}
		}
		if _, err := f.Seek(0, io.SeekStart); err != nil {
			return final{err}
		}
		return s.download(ctx, f, direct && try == 0)
	})
	if err == nil {
		err = transfer.Extract(ctx, t, s.log, func(w io.Writer) error { return pack.Read(w, f) })
	}
	if err != nil && ctx.Err() == nil {
		s.log.Fatal(err.Error())
	}
	return err
}

func redirected(status int) bool {
	switch status {
	case http.StatusMovedPermanently, http.StatusFound, http.StatusSeeOther, http.StatusTemporaryRedirect, http.StatusPermanentRedirect:
		return true
	}
	return false
}

const downloading = "Downloading artifacts from coordinator..."

// download fetches the archive. The direct way asks for GitLab's redirection to
// its object store, and has no retries of the transport until it has one.
func (s *session) download(ctx context.Context, f *os.File, direct bool) error {
	if !direct {
		resp, err := s.patient(ctx, http.MethodGet, s.target(""), nil, redirected)
		if err != nil {
			return s.unanswered(err)
		}
		defer drop(resp)
		told := s.fields(resp)
		told["host"] = resp.Request.URL.Host
		failed := maps.Clone(told)
		failed["status"] = resp.Status
		return s.take(f, resp, told, failed)
	}
	const query = "direct_download=true"
	resp, err := s.call(ctx, http.MethodGet, s.target(query), nil, func(int) bool { return false })
	if err != nil {
		return s.unanswered(err)
	}
	defer drop(resp)
	told := s.fields(resp)
	if resp.StatusCode != http.StatusFound && resp.StatusCode != http.StatusTemporaryRedirect {
		return s.take(f, resp, told, told)
	}
	if to, err := url.Parse(resp.Header.Get("Location")); err == nil && to.Host != "" {
		s.log.Info("Direct download from "+to.Host, told)
	}
	resp, err = s.patient(ctx, http.MethodGet, s.target(query), nil, redirected)
	if err != nil {
		return s.unanswered(err)
	}
	defer drop(resp)
	return s.take(f, resp, told, told)
}

// unanswered tells of a request that came to no answer.
func (s *session) unanswered(err error) error {
	s.log.Error(downloading+" error", transfer.Fields{"error": err, "id": s.job, "token": shortToken(s.tok)})
	if isFinal(err) {
		return err
	}
	return errInvalid
}

// take keeps what an answer brings. The fields are those of the line that tells
// of it, and of one that nothing is known of.
func (s *session) take(f *os.File, resp *http.Response, told, unknown transfer.Fields) error {
	status := func(text string) transfer.Fields {
		told := maps.Clone(told)
		told["status"] = text
		return told
	}
	switch resp.StatusCode {
	case http.StatusOK:
		if _, err := io.Copy(&transfer.Capped{W: f, N: transfer.MaxArchive}, resp.Body); err != nil {
			if errors.Is(err, transfer.ErrTooLarge) {
				s.log.Error(downloading+" error", transfer.Fields{"error": err, "id": s.job, "token": shortToken(s.tok)})
				return final{err}
			}
			return s.unanswered(plain(err))
		}
		s.log.Info(downloading+" ok", told)
		return nil
	case http.StatusUnauthorized:
		s.log.Error(downloading+" unauthorized", status(resp.Status))
		return final{errors.New("permission denied")}
	case http.StatusForbidden:
		s.log.Error(downloading+" forbidden", status(reason(resp)))
		return final{errors.New("permission denied")}
	case http.StatusNotFound:
		s.log.Error(downloading+" not found", told)
		return final{os.ErrNotExist}
	}
	s.log.Warning(downloading+" failed", unknown)
	return errInvalid
}
