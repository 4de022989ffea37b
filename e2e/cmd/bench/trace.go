package main

import (
	"archive/zip"
	"bufio"
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"time"

	"virtkit/core/archive"
	"virtkit/core/archive/pack"
	"virtkit/core/fleet/job"
	"virtkit/core/trace"
)

// traceArea measures what every byte of a placed job's output goes through.
func (b *bench) traceArea(ctx context.Context) error {
	const goal = 5
	var mine []float64
	for _, n := range []int{1, 10, 1000} {
		var secrets []string
		rnd := rand.New(rand.NewPCG(1, uint64(n)))
		for range n {
			secrets = append(secrets, fmt.Sprintf("glpat-%016x%016x", rnd.Uint64(), rnd.Uint64()))
		}
		text := logText(8<<20, secrets)
		vk := b.rate(len(text), func() error {
			t := trace.New(io.Discard, trace.Options{Secrets: secrets, Timestamps: true, Limit: 1 << 40})
			s := t.Stream(trace.Work, trace.Stdout)
			for rest := text; len(rest) > 0; {
				k := min(len(rest), 32<<10)
				if _, err := s.Write(rest[:k]); err != nil {
					return err
				}
				rest = rest[k:]
			}
			return errors.Join(s.Close(), t.Close())
		})
		mine = append(mine, vk)
		lines := func(text []byte, replace func(string) string) func() error {
			return func() error {
				w := bufio.NewWriter(io.Discard)
				sc := bufio.NewScanner(bytes.NewReader(text))
				for sc.Scan() {
					w.WriteString(time.Now().UTC().Format("2006-01-02T15:04:05.000000Z") + " 01O " + replace(sc.Text()) + "\n")
				}
				return sc.Err()
			}
		}
		var pairs, quoted []string
		for _, s := range secrets {
			pairs, quoted = append(pairs, s, "[MASKED]"), append(quoted, regexp.QuoteMeta(s))
		}
		small := text[:bytes.LastIndexByte(text[:1<<20], '\n')+1]
		row := fmt.Sprintf("masked and stamped, %d secrets", n)
		b.addRate("trace", row, "MB/s", vk, "strings.Replacer", b.rate(len(small), lines(small, strings.NewReplacer(pairs...).Replace)), goal)
		re := regexp.MustCompile(strings.Join(quoted, "|"))
		small = small[:bytes.LastIndexByte(small[:64<<10], '\n')+1]
		b.addRate("trace", row, "MB/s", vk, "regexp", b.rate(len(small), lines(small, func(s string) string { return re.ReplaceAllLiteralString(s, "[MASKED]") })), goal)
		if ctx.Err() != nil {
			return context.Cause(ctx)
		}
	}
	b.addRate("trace", "masked and stamped, 1000 secrets", "MB/s", mine[2], "with 1", mine[0], 0.8)
	return b.zips(ctx)
}

// rate is the median of the rounds in MB/s.
func (b *bench) rate(size int, f func() error) float64 {
	var all []float64
	for range b.rounds {
		at := time.Now()
		if err := f(); err != nil {
			return 0
		}
		all = append(all, float64(size)/1e6/time.Since(at).Seconds())
	}
	return median(all)
}

// logText is what jobs print, with a secret in one of a hundred lines.
func logText(size int, secrets []string) []byte {
	var t bytes.Buffer
	for i := 0; t.Len() < size; i++ {
		fmt.Fprintf(&t, "[%5d/5000] Compiling src/module_%d/file_%d.c -O2 -Wall\n", i, i%17, i)
		if i%100 == 0 {
			fmt.Fprintf(&t, "Authorization: Bearer %s\n", secrets[i%len(secrets)])
		}
	}
	return t.Bytes()
}

// zips packs one tree as an artifact, with archive/zip and with Info-ZIP, each
// at its default level.
func (b *bench) zips(ctx context.Context) error {
	root := filepath.Join(b.dir, "tree")
	rnd := rand.New(rand.NewPCG(3, 4))
	total := 0
	for i := range 400 {
		var text bytes.Buffer
		for n := 1 << (8 + rnd.IntN(11)); text.Len() < n; {
			fmt.Fprintf(&text, "%s(%d, %#x); // %x\n", []string{"call", "return", "static int value", "if"}[rnd.IntN(4)], rnd.IntN(1000), rnd.IntN(1<<20), rnd.Uint32())
		}
		if i%10 == 0 { // what does not get smaller
			noise := make([]byte, 256<<10)
			for j := range noise {
				noise[j] = byte(rnd.Uint32())
			}
			text.Write(noise)
		}
		file := filepath.Join(root, fmt.Sprint("dir", i%20), fmt.Sprintf("file%d.c", i))
		if err := os.MkdirAll(filepath.Dir(file), 0o755); err != nil {
			return err
		}
		if err := os.WriteFile(file, text.Bytes(), 0o644); err != nil {
			return err
		}
		total += text.Len()
	}
	out := filepath.Join(b.dir, "out.zip")
	size := func() int64 {
		fi, err := os.Stat(out)
		if err != nil {
			return 0
		}
		return fi.Size()
	}
	vk := b.rate(total, func() error { return packTree(out, root, job.Zip) })
	vkSize := size()
	std := b.rate(total, func() error { return stdZip(out, root) })
	stdSize := size()
	b.addRate("trace", "artifact zip", "MB/s", vk, "archive/zip", std, 1)
	b.add("trace", "artifact zip, size", "MB", float64(vkSize)/1e6, "archive/zip", float64(stdSize)/1e6, 1.05)
	if program, err := exec.LookPath("zip"); err == nil {
		info := b.rate(total, func() error {
			os.Remove(out)
			c := exec.CommandContext(ctx, program, "-qr", out, ".")
			c.Dir = root
			return c.Run()
		})
		b.addRate("trace", "artifact zip", "MB/s", vk, "Info-ZIP", info, 1)
		b.add("trace", "artifact zip, size", "MB", float64(vkSize)/1e6, "Info-ZIP", float64(size())/1e6, 1.05)
	} else {
		fmt.Fprintln(os.Stderr, "bench: trace: no zip here: apt-get install zip")
	}
	for _, f := range []job.Format{job.ZipZstd, job.TarZstd} {
		rate := b.rate(total, func() error { return packTree(out, root, f) })
		b.addRate("trace", "artifact "+string(f), "MB/s", rate, "as zip", vk, 1)
		b.add("trace", "artifact "+string(f)+", size", "MB", float64(size())/1e6, "as zip", float64(vkSize)/1e6, 1.05)
	}
	return nil
}

// packTree is what the guest's and the host's half of an upload do.
func packTree(out, root string, f job.Format) error {
	entries, err := archive.Select(archive.Selection{Tree: root, Paths: []string{"."}}, func(archive.Note) {})
	if err != nil {
		return err
	}
	w, err := os.Create(out)
	if err != nil {
		return err
	}
	defer w.Close()
	r, tarred := io.Pipe()
	ended := make(chan error, 1)
	go func() {
		err := archive.Write(tarred, root, entries, func(archive.Note) {})
		tarred.CloseWithError(err)
		ended <- err
	}()
	_, err = pack.Write(w, r, f, pack.Default)
	r.CloseWithError(err)
	return errors.Join(err, <-ended, w.Close())
}

func stdZip(out, root string) error {
	f, err := os.Create(out)
	if err != nil {
		return err
	}
	defer f.Close()
	z := zip.NewWriter(f)
	err = filepath.WalkDir(root, func(path string, e fs.DirEntry, err error) error {
		if err != nil || e.IsDir() {
			return err
		}
		name, err := filepath.Rel(root, path)
		if err != nil {
			return err
		}
		data, err := os.ReadFile(path)
		if err != nil {
			return err
		}
		w, err := z.Create(name)
		if err == nil {
			_, err = w.Write(data)
		}
		return err
	})
	return errors.Join(err, z.Close())
}
