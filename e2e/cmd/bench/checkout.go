package main

import (
	"context"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"time"

	"virtkit/core/erofs"
	"virtkit/e2e/gitsrv"
)

// checkoutFiles is how many files the packed tree has.
const checkoutFiles = 100_000

// checkoutArea packs a tree as a guest's work tree is packed, beside what else
// makes one file of a tree: tar, and erofs-utils' own mkfs.erofs.
func (b *bench) checkoutArea(ctx context.Context) error {
	dir := filepath.Join(b.dir, "tree")
	if err := makeTree(dir, checkoutFiles); err != nil {
		return err
	}
	img := filepath.Join(b.dir, "img")
	vk := func() (time.Duration, error) {
		start := time.Now()
		t := erofs.New()
		if err := t.AddDir(ctx, dir, "", nil); err != nil {
			return 0, err
		}
		_, err := t.Write(ctx, img)
		return time.Since(start), err
	}
	peers := []struct {
		name string
		argv []string
		goal float64
	}{
		{"tar", []string{"tar", "-cf", img, "-C", dir, "."}, 1},
		{"mkfs.erofs", []string{"mkfs.erofs", "--quiet", img, dir}, 1},
	}
	took := make([][]float64, 1+len(peers))
	for range b.rounds {
		d, err := vk()
		if err != nil {
			return err
		}
		took[0] = append(took[0], ms(d))
		os.Remove(img)
		for i, p := range peers {
			if _, err := exec.LookPath(p.argv[0]); err != nil {
				fmt.Fprintf(os.Stderr, "bench: checkout: no %s here\n", p.argv[0])
				continue
			}
			w, _, err := timed(ctx, p.argv[0], p.argv[1:]...)
			if err != nil {
				return err
			}
			took[i+1] = append(took[i+1], ms(w))
			os.Remove(img)
		}
	}
	for i, p := range peers {
		b.add("checkout", fmt.Sprintf("pack %d files", checkoutFiles), "ms", median(took[0]), p.name, median(took[i+1]), p.goal)
	}
	return nil
}

// statusFiles is how many files the repository has whose first git status is
// taken in a guest.
const statusFiles = 20_000

// statusScript times git status, in ms: of the work tree that nobody has looked
// at yet, and of a copy on the guest's own disk of which nothing is cached. What
// is cached then is what its second look is for.
const statusScript = `cd /builds/bench/idle
look() { a=$(date +%s%N); [ -z "$(git status --porcelain)" ] || exit 1; b=$(date +%s%N); echo "$1 $(( (b-a)/1000000 ))"; }
look first; look second
cp -a . /copy && cd /copy && git update-index -q --refresh && sync && echo 3 > /proc/sys/vm/drop_caches
look disk
`

// firstStatus: git status in a guest whose work tree was packed for it.
func (b *bench) firstStatus(ctx context.Context) error {
	root := filepath.Join(b.dir, "git")
	bare := filepath.Join(root, "bench", "status.git")
	tree := filepath.Join(b.dir, "status")
	if err := makeTree(tree, statusFiles); err != nil {
		return err
	}
	for _, argv := range [][]string{{"init", "-q", "-b", "main"}, {"add", "-A"}, {"-c", "user.name=b", "-c", "user.email=b@example.com", "commit", "-q", "-m", "all"}, {"clone", "-q", "--bare", ".", bare}} {
		cmd := exec.CommandContext(ctx, "git", argv...)
		cmd.Dir = tree
		cmd.Env = append(os.Environ(), "GIT_CONFIG_GLOBAL=/dev/null", "GIT_CONFIG_SYSTEM=/dev/null")
		if out, err := cmd.CombinedOutput(); err != nil {
			return fmt.Errorf("git %s: %w: %s", argv[0], err, out)
		}
	}
	sha, err := exec.CommandContext(ctx, "git", "-C", bare, "rev-parse", "main").Output()
	if err != nil {
		return err
	}
	srv, err := gitsrv.New(root)
	if err != nil {
		return err
	}
	srv.Allow("x")
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return err
	}
	ctx, cancel := context.WithCancel(ctx)
	served := make(chan error, 1)
	go func() { served <- srv.Serve(ctx, l) }()
	defer func() { cancel(); <-served }()
	more := fmt.Sprintf(`,"git_info":{"repo_url":"http://%s/bench/status.git","ref":"main","sha":%q,"ref_type":"branch","refspecs":["+refs/heads/main:refs/remotes/origin/main"],"depth":0}`,
		l.Addr(), strings.TrimSpace(string(sha)))
	took := map[string][]float64{}
	for i := range min(b.rounds, 3) {
		j, err := b.startIdle(ctx, fmt.Sprintf("status-%d", i), "[executor]\nhost_checkout = true\n[executor.vm]\ncpus = 1\nmem = \"1G\"\n[executor.schedule]\ndisk_default = \"64M\"\n", 4720+i, more)
		if err != nil {
			return err
		}
		res, err := j.s.Stage(ctx, "build_script", []byte(statusScript))
		j.end(context.WithoutCancel(ctx))
		if err != nil || res.Exit != 0 {
			return fmt.Errorf("%d, %w: %s%s", res.Exit, err, res.Stdout, res.Stderr)
		}
		for l := range strings.Lines(string(res.Stdout)) {
			if f := strings.Fields(l); len(f) == 2 {
				n, err := strconv.ParseFloat(f[1], 64)
				if err != nil {
					return err
				}
				took[f[0]] = append(took[f[0]], n)
			}
		}
	}
	row := fmt.Sprintf("git status of %d files in the guest", statusFiles)
	b.add("checkout", row+", the first", "ms", median(took["first"]), "a copy on its disk, nothing cached", median(took["disk"]), 1)
	b.add("checkout", row+", the second", "ms", median(took["second"]), "the first", median(took["first"]), 1)
	return nil
}

// makeTree writes files of 0 to 8 KiB, a hundred to a directory.
func makeTree(dir string, files int) error {
	data := make([]byte, 8<<10)
	for i := range data {
		data[i] = byte(i * 31)
	}
	for i := range files {
		sub := filepath.Join(dir, fmt.Sprintf("d%03d", i/5000), fmt.Sprintf("s%02d", i/100%50))
		if i%100 == 0 {
			if err := os.MkdirAll(sub, 0o755); err != nil {
				return err
			}
		}
		if err := os.WriteFile(filepath.Join(sub, fmt.Sprintf("file-%06d.c", i)), data[:i*97%len(data)], 0o644); err != nil {
			return err
		}
	}
	return nil
}
