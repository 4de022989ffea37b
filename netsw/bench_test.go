package netsw_test

import (
	"encoding/binary"
	"io"
	"net"
	"net/netip"
	"strconv"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"virtkit/netsw"
	"virtkit/netsw/frame"
	"virtkit/netsw/netswtest"
)

// chunk is what one iteration of a throughput benchmark moves.
const chunk = 4 << 20

// BenchmarkFloor is a copy over the host's loopback: what the same bytes cost
// without a switch. Compare with BenchmarkDown and BenchmarkUp of the same run.
func BenchmarkFloor(b *testing.B) {
	port := serve(b, func(c *net.TCPConn) { source(c) })
	c, err := net.Dial("tcp4", "127.0.0.1:"+strconv.Itoa(port))
	if err != nil {
		b.Fatal(err)
	}
	defer c.Close()
	drain(b, c)
}

// BenchmarkDown moves bytes from an outside server to a guest. The guest is a
// gVisor stack in this process, and costs as much again as the switch.
func BenchmarkDown(b *testing.B) {
	port := serve(b, func(c *net.TCPConn) { source(c) })
	sw := open(b, netsw.Config{HostLoopback: true})
	_, g := join(b, sw, "a")
	c, err := g.Dial(within(b), at(sw, port))
	if err != nil {
		b.Fatal(err)
	}
	defer c.Close()
	drain(b, c)
}

// BenchmarkUp is the other way.
func BenchmarkUp(b *testing.B) {
	var got atomic.Int64
	port := serve(b, func(c *net.TCPConn) {
		buf := make([]byte, 256<<10)
		for {
			n, err := c.Read(buf)
			got.Add(int64(n))
			if err != nil {
				return
			}
		}
	})
	sw := open(b, netsw.Config{HostLoopback: true})
	_, g := join(b, sw, "a")
	c, err := g.Dial(within(b), at(sw, port))
	if err != nil {
		b.Fatal(err)
	}
	defer c.Close()
	buf := make([]byte, chunk)
	b.SetBytes(chunk)
	for b.Loop() {
		if _, err := c.Write(buf); err != nil {
			b.Fatal(err)
		}
	}
	for got.Load() < int64(b.N)*chunk {
		time.Sleep(time.Millisecond)
	}
}

func source(c net.Conn) {
	buf := make([]byte, 256<<10)
	for {
		if _, err := c.Write(buf); err != nil {
			return
		}
	}
}

func drain(b *testing.B, c net.Conn) {
	b.Helper()
	buf := make([]byte, 256<<10)
	b.SetBytes(chunk)
	for b.Loop() {
		for left := chunk; left > 0; {
			n, err := c.Read(buf[:min(left, len(buf))])
			if err != nil {
				b.Fatal(err)
			}
			left -= n
		}
	}
}

// BenchmarkSwitch moves frames from guest to guest: allocs/op must be 0. The
// sender is paced by the receiver, so that nothing is dropped.
func BenchmarkSwitch(b *testing.B) {
	for _, size := range []int{64, 1500, netsw.MTU} {
		b.Run(strconv.Itoa(size), func(b *testing.B) {
			sw := open(b, netsw.Config{})
			pa, ca := raw(b, sw, "a")
			pb, cb := raw(b, sw, "b")
			macA, _ := net.ParseMAC(pa.MAC())
			macB, _ := net.ParseMAC(pb.MAC())
			one := udpFrame(frame.MAC(macB), frame.MAC(macA), pa.Addr().String()+":1", pb.Addr().String()+":2", make([]byte, size-28))
			one = append([]byte{0, 0, byte(len(one) >> 8), byte(len(one))}, one...)
			// All that may be under way fits the queue, or a drop would end the run.
			burst := max(1, min(16, 512<<10/len(one)))
			many := make([]byte, 0, burst*len(one))
			for range burst {
				many = append(many, one...)
			}
			credit := make(chan struct{}, 2)
			var wg sync.WaitGroup
			wg.Go(func() {
				buf := make([]byte, len(many))
				for {
					if _, err := io.ReadFull(cb, buf); err != nil {
						close(credit)
						return
					}
					credit <- struct{}{}
				}
			})
			b.SetBytes(int64(burst * size))
			b.ReportAllocs()
			flight := 0
			for b.Loop() {
				if flight == cap(credit) {
					<-credit
					flight--
				}
				if _, err := ca.Write(many); err != nil {
					b.Fatal(err)
				}
				flight++
			}
			b.StopTimer()
			for ; flight > 0; flight-- {
				<-credit
			}
			b.ReportMetric(float64(b.N)*float64(burst)/b.Elapsed().Seconds(), "frames/s")
			cb.Close()
			for range credit {
			}
			wg.Wait()
			if n := sw.Stats().Dropped(netsw.DropQueueFull); n > 0 {
				b.Errorf("%d frames dropped", n)
			}
		})
	}
}

// raw is a port with nothing but a socket at its end.
func raw(b *testing.B, sw *netsw.Switch, name string) (*netsw.Port, net.Conn) {
	b.Helper()
	p, err := sw.AddPort(netsw.PortConfig{Name: name})
	if err != nil {
		b.Fatal(err)
	}
	c, err := net.FileConn(p.File())
	if err != nil {
		b.Fatal(err)
	}
	p.CloseFile()
	b.Cleanup(func() { c.Close() })
	return p, c
}

// BenchmarkForward moves segments of a guest to the outside: allocs/op must be
// 0, for a burst of 16 with its acknowledgement.
func BenchmarkForward(b *testing.B) {
	for _, size := range []int{1460, 60000} {
		b.Run(strconv.Itoa(size), func(b *testing.B) {
			port := serve(b, func(c *net.TCPConn) {
				_, _ = io.CopyBuffer(struct{ io.Writer }{io.Discard}, struct{ io.Reader }{c}, make([]byte, 1<<20))
			})
			sw := open(b, netsw.Config{HostLoopback: true})
			p, c := raw(b, sw, "a")
			mac, _ := net.ParseMAC(p.MAC())
			dst := netip.MustParseAddrPort(at(sw, port))
			const burst = 16
			one := frame.LenSize + frame.EthSize + frame.IPv4Size + 20 + size
			many := make([]byte, burst*one)
			put := func(f []byte, seq, ack uint32, flags byte) {
				binary.BigEndian.PutUint32(f, uint32(len(f)-frame.LenSize))
				h := frame.AppendEth(f[:frame.LenSize], frame.MAC{0x02, 'v', 'k', 0, 0, 1}, frame.MAC(mac), frame.TypeIPv4)
				n := len(f) - frame.LenSize - frame.EthSize - frame.IPv4Size
				h = frame.AppendIPv4(h, p.Addr().As4(), dst.Addr().As4(), frame.ProtoTCP, n)
				h = binary.BigEndian.AppendUint16(h, 5000)
				h = binary.BigEndian.AppendUint16(h, dst.Port())
				h = binary.BigEndian.AppendUint32(h, seq)
				h = binary.BigEndian.AppendUint32(h, ack)
				_ = append(h, 0x50, flags, 0xff, 0xff, 0, 0, 0, 0)
			}
			buf := make([]byte, 1<<16)
			// next is the sequence number and acknowledgement of the last segment that came.
			next := func() (seq, ack uint32) {
				if _, err := io.ReadFull(c, buf[:frame.LenSize]); err != nil {
					b.Fatal(err)
				}
				f := buf[:binary.BigEndian.Uint32(buf)]
				if _, err := io.ReadFull(c, f); err != nil {
					b.Fatal(err)
				}
				t := f[frame.EthSize+frame.IPv4Size:]
				return binary.BigEndian.Uint32(t[4:]), binary.BigEndian.Uint32(t[8:])
			}
			syn := many[:one-size]
			put(syn, 1, 0, flagSYN)
			if _, err := c.Write(syn); err != nil {
				b.Fatal(err)
			}
			ack, seq := next()
			ack++
			b.SetBytes(int64(burst * size))
			b.ReportAllocs()
			for b.Loop() {
				for sent := 0; sent < burst; {
					// No more than the window without a scale: 64 KiB.
					k := min(burst-sent, 65535/size)
					for i := range k {
						put(many[i*one:(i+1)*one], seq+uint32(i*size), ack, flagACK)
					}
					if _, err := c.Write(many[:k*one]); err != nil {
						b.Fatal(err)
					}
					sent += k
					seq += uint32(k * size)
					for got := uint32(0); got != seq; {
						_, got = next()
					}
				}
			}
		})
	}
}

// BenchmarkConnect is a connection to the outside, from SYN to its end.
func BenchmarkConnect(b *testing.B) {
	port := serve(b, func(c *net.TCPConn) { _, _ = io.Copy(io.Discard, c) })
	sw := open(b, netsw.Config{HostLoopback: true})
	_, g := join(b, sw, "a")
	for b.Loop() {
		dialOnce(b, g, at(sw, port))
	}
}

func dialOnce(b *testing.B, g *netswtest.Guest, to string) {
	b.Helper()
	c, err := g.Dial(b.Context(), to)
	if err != nil {
		b.Fatal(err)
	}
	c.Close()
}
