package image

import (
	"io"
	"sync"
)

// readAhead reads r in a goroutine of its own, so that unpacking and whatever
// uses its result run on two cores. Close ends the goroutine and waits for it;
// it does not close r.
func readAhead(r io.Reader) io.ReadCloser {
	a := &ahead{full: make(chan chunk, 8), free: make(chan []byte, 8), stop: make(chan struct{})}
	for range cap(a.free) {
		a.free <- make([]byte, 128<<10)
	}
	a.wg.Add(1)
	go a.run(r)
	return a
}

type chunk struct {
	b   []byte // whole buffer
	n   int
	err error
}

type ahead struct {
	full chan chunk
	free chan []byte
	stop chan struct{}
	once sync.Once
	wg   sync.WaitGroup
	cur  chunk
	off  int
}

func (a *ahead) run(r io.Reader) {
	defer a.wg.Done()
	for {
		var b []byte
		select {
		case b = <-a.free:
		case <-a.stop:
			return
		}
		n := 0
		var err error
		for n < len(b) && err == nil {
			var m int
			m, err = r.Read(b[n:])
			n += m
		}
		select {
		case a.full <- chunk{b, n, err}:
		case <-a.stop:
			return
		}
		if err != nil {
			return
		}
	}
}

func (a *ahead) Read(p []byte) (int, error) {
	for a.off == a.cur.n {
		if a.cur.err != nil {
			return 0, a.cur.err
		}
		if a.cur.b != nil {
			a.free <- a.cur.b
		}
		a.cur, a.off = <-a.full, 0
	}
	n := copy(p, a.cur.b[a.off:a.cur.n])
	a.off += n
	return n, nil
}

func (a *ahead) Close() error {
	a.once.Do(func() { close(a.stop) })
	a.wg.Wait()
	return nil
}
