package artifact

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"mime/multipart"
	"net/http"
	"net/textproto"
	"net/url"
	"os"
	"strings"

	"virtkit/core/archive/pack"
	"virtkit/core/cijob"
	"virtkit/core/cijob/transfer"
	"virtkit/core/fleet/job"
)

// Upload implements cijob.Artifacts.
func (c *Client) Upload(ctx context.Context, t cijob.Transfer, a job.Artifact) (outcome string, err error) {
	s, err := c.session(t, t.Job.Job.ID, t.Job.Token)
	if err != nil {
		return job.Failed, err
	}
	defer s.close()
	s.log.Begin()
	f, err := transfer.Temp(t.Work)
	if err != nil {
		return job.Failed, err
	}
	defer f.Close()
	n := 0
	err = transfer.Archive(ctx, t, transfer.Selection{Paths: a.Paths, Exclude: a.Exclude, Untracked: a.Untracked}, s.log, func(r io.Reader) (err error) {
		n, err = packed(&transfer.Capped{W: f, N: transfer.MaxArchive}, r, t, a)
		return err
	})
	switch {
	case errors.Is(err, transfer.ErrTooLarge):
		s.log.Fatal(err.Error())
		return job.TooLarge, err
	case errors.Is(err, pack.ErrOneFile), errors.Is(err, pack.ErrNotRegular):
		return job.Failed, s.cannotPack(ctx, a, err)
	case err != nil:
		s.log.Fatal(err.Error())
		return job.Failed, err
	case n == 0:
		s.log.Error("No files to upload", nil)
		return job.Skipped, nil
	}
	outcome = job.Failed
	err = s.retried(ctx, "artifacts-uploader", func(int) error {
		outcome, err = s.upload(ctx, a, f)
		return err
	})
	if err != nil && ctx.Err() == nil {
		s.log.Fatal(err.Error())
	}
	return outcome, err
}

// notSent is a request that came to no answer, in gitlab-runner's words.
func notSent(target string, err error) error {
	return fmt.Errorf("execute raw request: execute request: couldn't execute POST against %s: %w", target, err)
}

// failed tells of a request that came to no answer.
func (s *session) failed(what string, err error) error {
	s.log.Error(what+" error", transfer.Fields{"correlation_id": requestID(), "error": err, "id": s.job, "token": shortToken(s.tok)})
	return err
}

// cannotPack tells of files that cannot be in a format. gitlab-runner packs them
// while it sends them, so it is a request that it cannot end.
func (s *session) cannotPack(ctx context.Context, a job.Artifact, cause error) error {
	what, q := naming(a)
	target := s.target(q.Encode())
	err := notSent(target, fmt.Errorf("%s %q: failed to copy content to form: %w", title(http.MethodPost), target, cause))
	err = s.retried(ctx, "artifacts-uploader", func(int) error { return s.failed(what, err) })
	s.log.Fatal(err.Error())
	return err
}

// naming is how an upload of an artifact is told of, and its query.
func naming(a job.Artifact) (what string, q url.Values) {
	q = url.Values{}
	for k, v := range map[string]string{"artifact_format": string(a.Format), "artifact_type": a.Type, "expire_in": a.ExpireIn} {
		if v != "" {
			q.Set(k, v)
		}
	}
	if a.Type == "" {
		q.Del("artifact_format") // GitLab named none: it is the default's
	}
	what = "Uploading artifacts"
	if a.Type != "" {
		what += ` as "` + a.Type + `"`
	}
	return what + " to coordinator...", q
}

func (s *session) upload(ctx context.Context, a job.Artifact, f *os.File) (string, error) {
	what, q := naming(a)
	level, _ := s.t.Env("ARTIFACT_COMPRESSION_LEVEL")
	content := form(nameOf(a, expanded(a.Name, s.t)), f)
	resp, err := s.patient(ctx, http.MethodPost, s.target(q.Encode()), func() (io.Reader, string, error) {
		s.log.CheckLevel(level)
		return content()
	}, redirected)
	if err != nil {
		if !isFinal(err) {
			err = notSent(s.target(q.Encode()), err)
		}
		return job.Failed, s.failed(what, err)
	}
	defer drop(resp)
	said := what + " " + reason(resp)
	switch resp.StatusCode {
	case http.StatusCreated:
		s.log.Info(said, s.fields(resp))
		return job.Uploaded, nil
	case http.StatusForbidden:
		s.log.Error(said, s.fields(resp))
		return job.Failed, final{errors.New("permission denied")}
	case http.StatusRequestEntityTooLarge:
		s.log.Error(said, s.fields(resp))
		return job.TooLarge, final{errors.New("too large")}
	case http.StatusServiceUnavailable:
		s.log.Error(said, s.fields(resp))
		return job.Failed, errUnavailable
	}
	s.log.Warning(said, s.fields(resp))
	return job.Failed, errNoAnswer
}

// form is the file as the one part of a form, read anew each time.
func form(name string, f *os.File) body {
	return func() (io.Reader, string, error) {
		fi, err := f.Stat()
		if err != nil {
			return nil, "", err
		}
		var b bytes.Buffer
		w := multipart.NewWriter(&b)
		h := textproto.MIMEHeader{}
		quoted := strings.NewReplacer("\\", "\\\\", `"`, "\\\"", "\r", "%0D", "\n", "%0A").Replace(name)
		h.Set("Content-Disposition", `form-data; name="file"; filename="`+quoted+`"`)
		h.Set("Content-Type", "application/octet-stream")
		if _, err := w.CreatePart(h); err != nil {
			return nil, "", err
		}
		head := bytes.Clone(b.Bytes())
		b.Reset()
		if err := w.Close(); err != nil {
			return nil, "", err
		}
		return io.MultiReader(bytes.NewReader(head), io.NewSectionReader(f, 0, fi.Size()), bytes.NewReader(b.Bytes())), w.FormDataContentType(), nil
	}
}
