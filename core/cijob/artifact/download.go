package artifact

import (
	"context"
	"errors"
	"io"
	"net/http"
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
	err = s.retried(ctx, "artifacts-downloader", func(try int) error {
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

// download fetches the archive. The direct way, by GitLab's redirection to its
// object store, has no retries of the transport.
func (s *session) download(ctx context.Context, f *os.File, direct bool) error {
	const what = "Downloading artifacts from coordinator..."
	get, query := s.patient, ""
	if direct {
		get, query = s.call, "direct_download=true"
	}
	resp, err := get(ctx, http.MethodGet, s.target(query), nil, redirected)
	if err != nil {
		s.log.Error(what+" error", transfer.Fields{"error": err, "id": s.job, "token": shortToken(s.tok)})
		if isFinal(err) {
			return err
		}
		return errInvalid
	}
	defer drop(resp)
	switch resp.StatusCode {
	case http.StatusOK:
		if _, err := io.Copy(&transfer.Capped{W: f, N: transfer.MaxArchive}, resp.Body); err != nil {
			s.log.Error(what+" error", transfer.Fields{"error": plain(err), "id": s.job, "token": shortToken(s.tok)})
			if errors.Is(err, transfer.ErrTooLarge) {
				return final{err}
			}
			return errInvalid
		}
		s.log.Info(what+" ok", s.fields(resp))
		return nil
	case http.StatusUnauthorized:
		s.log.Error(what+" unauthorized", s.fields(resp))
		return final{errors.New("permission denied")}
	case http.StatusForbidden:
		s.log.Error(what+" forbidden", s.fields(resp))
		return final{errors.New("permission denied")}
	case http.StatusNotFound:
		s.log.Error(what+" not found", s.fields(resp))
		return final{os.ErrNotExist}
	}
	s.log.Warning(what+" failed", s.fields(resp))
	return errInvalid
}
