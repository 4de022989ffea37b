package artifact

import (
	"bytes"
	"context"
	"errors"
	"io"
	"mime/multipart"
	"net/http"
	"net/textproto"
	"net/url"
	"os"
	"strings"

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

func (s *session) upload(ctx context.Context, a job.Artifact, f *os.File) (string, error) {
	q := url.Values{}
	for k, v := range map[string]string{"artifact_format": string(a.Format), "artifact_type": a.Type, "expire_in": a.ExpireIn} {
		if v != "" {
			q.Set(k, v)
		}
	}
	if a.Type == "" {
		q.Del("artifact_format") // GitLab named none: it is the default's
	}
	what := "Uploading artifacts"
	if a.Type != "" {
		what += ` as "` + a.Type + `"`
	}
	what += " to coordinator..."
	resp, err := s.patient(ctx, http.MethodPost, s.target(q.Encode()), form(nameOf(a, s.t.Expand(a.Name)), f), func(status int) bool {
		return status == http.StatusTemporaryRedirect || status == http.StatusPermanentRedirect
	})
	if err != nil {
		s.log.Error(what+" error", transfer.Fields{"error": err, "id": s.job, "token": shortToken(s.tok)})
		if isFinal(err) {
			return job.Failed, err
		}
		return job.Failed, errInvalid
	}
	defer drop(resp)
	status := strings.TrimSpace(resp.Status)
	said := what + " POST " + strings.TrimSuffix(s.target(""), "?") + ": " + status
	switch resp.StatusCode {
	case http.StatusCreated:
		s.log.Info(what+" "+status, s.fields(resp))
		return job.Uploaded, nil
	case http.StatusForbidden:
		s.log.Error(said, s.fields(resp))
		return job.Failed, final{errors.New("permission denied")}
	case http.StatusRequestEntityTooLarge:
		s.log.Error(said, s.fields(resp))
		return job.TooLarge, final{errors.New("too large")}
	case http.StatusServiceUnavailable:
		s.log.Error(said, s.fields(resp))
		return job.Failed, errors.New("service unavailable")
	}
	s.log.Warning(said, s.fields(resp))
	return job.Failed, errInvalid
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
