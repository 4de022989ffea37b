package artifact

import (
	"archive/tar"
	"bytes"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"io"
	"path"
	"runtime"
	"slices"
	"strconv"
	"time"

	"virtkit/core/archive/pack"
	"virtkit/core/cijob"
	"virtkit/core/fleet/job"
	"virtkit/core/version"
)

// provenanceVariable asks for a statement of where the files of an archive come
// from, beside them in it.
const provenanceVariable = "RUNNER_GENERATE_ARTIFACTS_METADATA"

// The schema of the statement is the one that GitLab documents ("Artifact
// provenance metadata"): in-toto's Statement 0.1 about SLSA's provenance 1.0.
const (
	statementType = "https://in-toto.io/Statement/v0.1"
	predicateType = "https://slsa.dev/provenance/v1"
	buildType     = "https://gitlab.com/gitlab-org/gitlab-runner/-/blob/v19.4.0/PROVENANCE.md"
)

type digest struct {
	SHA256 string `json:"sha256"`
}

type subject struct {
	Name   string `json:"name"`
	Digest digest `json:"digest"`
}

type dependency struct {
	URI    string `json:"uri"`
	Digest digest `json:"digest"`
}

type statement struct {
	Type          string    `json:"_type"`
	PredicateType string    `json:"predicateType"`
	Subject       []subject `json:"subject"`
	Predicate     struct {
		BuildDefinition struct {
			BuildType            string            `json:"buildType"`
			ExternalParameters   map[string]string `json:"externalParameters"` // names of variables without values, entryPoint and source
			InternalParameters   map[string]string `json:"internalParameters"`
			ResolvedDependencies []dependency      `json:"resolvedDependencies"`
		} `json:"buildDefinition"`
		RunDetails struct {
			Builder struct {
				ID      string            `json:"id"`
				Version map[string]string `json:"version"`
			} `json:"builder"`
			Metadata struct {
				InvocationID string `json:"invocationId"`
				StartedOn    string `json:"startedOn,omitempty"`
				FinishedOn   string `json:"finishedOn"`
			} `json:"metadata"`
		} `json:"runDetails"`
	} `json:"predicate"`
}

// wantsProvenance says whether an artifact gets a statement: a report is one
// file of its own format, which has no room for another.
func wantsProvenance(t cijob.Transfer, a job.Artifact) bool {
	v, _ := t.Lookup(provenanceVariable)
	on, _ := strconv.ParseBool(v)
	return on && (a.Format == "" || a.Format == job.Zip || a.Format == job.ZipZstd || a.Format == job.TarZstd)
}

// provenanceName is the statement's file in the archive.
func provenanceName(t cijob.Transfer, a job.Artifact) string {
	return baseName(expanded(a.Name, t)) + "-metadata.json"
}

// provenance is what the job says of the files.
func provenance(t cijob.Transfer, files []subject, now time.Time) ([]byte, error) {
	j := t.Job
	id := strconv.FormatInt(j.Job.ID, 10)
	project, _ := t.Lookup("CI_PROJECT_URL")
	if project == "" {
		project = j.ServerURL + "/" + j.Job.ProjectPath
	}
	slices.SortFunc(files, func(a, b subject) int { return bytes.Compare([]byte(a.Name), []byte(b.Name)) })
	s := statement{Type: statementType, PredicateType: predicateType, Subject: files}
	b := &s.Predicate.BuildDefinition
	b.BuildType = buildType
	b.ExternalParameters = map[string]string{}
	for _, v := range j.Variables {
		b.ExternalParameters[v.Key] = "" // never a value: any may be a secret
	}
	b.ExternalParameters["entryPoint"], b.ExternalParameters["source"] = j.Job.Name, project
	b.InternalParameters = map[string]string{"architecture": runtime.GOARCH, "executor": "vk", "job": id, "name": j.Job.RunnerName}
	b.ResolvedDependencies = []dependency{{project, digest{j.Sources.SHA}}}
	r := &s.Predicate.RunDetails
	r.Builder.ID = project + "/-/runners/" + strconv.FormatInt(j.Job.RunnerID, 10)
	r.Builder.Version = map[string]string{"vk": version.Version}
	r.Metadata.InvocationID = id
	if at, _ := t.Lookup("CI_JOB_STARTED_AT"); at != "" {
		if start, err := time.Parse(time.RFC3339, at); err == nil {
			r.Metadata.StartedOn = start.UTC().Format(time.RFC3339)
		}
	}
	r.Metadata.FinishedOn = now.UTC().Format(time.RFC3339)
	return json.MarshalIndent(s, "", " ")
}

// attested is the tar stream r with a statement about its files at its end, in
// the place of a file of the job's that had its name. An empty stream stays so.
// The caller reads it to its end or closes it.
func attested(r io.Reader, name string, say func([]subject) ([]byte, error)) *io.PipeReader {
	pr, pw := io.Pipe()
	go func() {
		pw.CloseWithError(attest(pw, r, name, say))
	}()
	return pr
}

func attest(w io.Writer, r io.Reader, name string, say func([]subject) ([]byte, error)) error {
	out, in := tar.NewWriter(w), tar.NewReader(r)
	var files []subject
	some := false
	for {
		h, err := in.Next()
		if err == io.EOF {
			break
		}
		if err != nil {
			return err
		}
		if path.Clean(h.Name) == name {
			continue
		}
		some = true
		if err := out.WriteHeader(h); err != nil {
			return err
		}
		sum := sha256.New()
		if _, err := io.Copy(io.MultiWriter(out, sum), in); err != nil {
			return err
		}
		if h.Typeflag == tar.TypeReg {
			files = append(files, subject{path.Clean(h.Name), digest{hex.EncodeToString(sum.Sum(nil))}})
		}
	}
	if some {
		b, err := say(files)
		if err != nil {
			return err
		}
		h := &tar.Header{Typeflag: tar.TypeReg, Name: name, Mode: 0o644, Size: int64(len(b)), ModTime: time.Now().Truncate(time.Second), Format: tar.FormatPAX}
		if err := out.WriteHeader(h); err != nil {
			return err
		}
		if _, err := out.Write(b); err != nil {
			return err
		}
	}
	if err := out.Close(); err != nil {
		return err
	}
	_, err := io.Copy(io.Discard, r)
	return err
}

// packed writes the stream of an artifact's files as its format has them.
func packed(w io.Writer, r io.Reader, t cijob.Transfer, a job.Artifact) (entries int, err error) {
	level, _ := t.Env("ARTIFACT_COMPRESSION_LEVEL")
	if wantsProvenance(t, a) {
		p := attested(r, provenanceName(t, a), func(files []subject) ([]byte, error) { return provenance(t, files, time.Now()) })
		defer p.Close()
		r = p
	}
	return pack.Write(w, r, a.Format, pack.Level(level))
}
