package main

import (
	"context"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"time"

	"virtkit/core/erofs"
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
