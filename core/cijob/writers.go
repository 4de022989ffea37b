package cijob

import (
	"bytes"
	"encoding/json"
	"fmt"
	"log/slog"
	"slices"
	"strings"

	"virtkit/core/execdrv"
)

// maxAnswer bounds what config may answer, in bytes.
const maxAnswer = 1 << 20

// answerWriter keeps what config prints.
type answerWriter struct {
	b   bytes.Buffer
	cut bool
}

func (w *answerWriter) Write(p []byte) (int, error) {
	if w.b.Len()+len(p) > maxAnswer {
		w.cut = true
		return len(p), nil
	}
	return w.b.Write(p)
}

func (w *answerWriter) decode() (a execdrv.ConfigAnswer, err error) {
	if w.cut {
		return a, fmt.Errorf("config's answer is over %d bytes", maxAnswer)
	}
	if len(bytes.TrimSpace(w.b.Bytes())) == 0 {
		return a, nil
	}
	if err := json.Unmarshal(w.b.Bytes(), &a); err != nil {
		return a, fmt.Errorf("config's answer is no JSON: %w", err)
	}
	return a, nil
}

// logWriter writes what comes line by line into the driver's log.
type logWriter struct {
	log  *slog.Logger
	mask *strings.Replacer
	line []byte
}

// masker takes secrets out of a text, the longest first.
func masker(secrets []string) *strings.Replacer {
	secrets = slices.Clone(secrets)
	slices.SortFunc(secrets, func(a, b string) int { return len(b) - len(a) })
	var pairs []string
	for _, s := range secrets {
		pairs = append(pairs, s, "[MASKED]")
	}
	return strings.NewReplacer(pairs...)
}

func (w *logWriter) Write(p []byte) (int, error) {
	n := len(p)
	for len(p) > 0 {
		i := bytes.IndexByte(p, '\n')
		if i < 0 && len(w.line)+len(p) <= 8<<10 {
			w.line = append(w.line, p...)
			break
		}
		end := i
		if i < 0 {
			end = len(p) - 1
		}
		w.line = append(w.line, p[:end+1]...)
		w.flush()
		p = p[end+1:]
	}
	return n, nil
}

func (w *logWriter) flush() {
	if s := strings.TrimSpace(string(w.line)); s != "" {
		w.log.Info("cleanup: " + w.mask.Replace(s))
	}
	w.line = w.line[:0]
}
