package dnsd

import (
	"encoding/binary"
	"errors"
	"net/netip"
	"strings"
	"time"

	"github.com/miekg/dns"
)

// maxChain is how many CNAMEs of an answer are followed. Resolvers give up far
// earlier.
const maxChain = 64

const maxTTL = 1<<31 - 1

var errAnswer = errors.New("an answer that ends within a record")

// opened lists the addresses that an answer gives for its question, directly or
// through CNAMEs in whatever order they come. Records of other types and of
// other names are passed over unread, so that none that is new or odd spoils the
// others.
func opened(qu *question, resp []byte) (Answer, error) {
	if a, ok := openedPlainly(qu, resp); ok {
		return a, nil
	}
	a := Answer{Names: []string{strings.TrimSuffix(qu.q.Name, ".")}}
	type alias struct {
		to  string
		ttl uint32
	}
	type addr struct {
		a   netip.Addr
		ttl uint32
	}
	var (
		aliases map[string]alias
		addrs   map[string][]addr
	)
	off := 12 + len(qu.raw)
	for range binary.BigEndian.Uint16(resp[6:]) {
		owner, at, err := dns.UnpackDomainName(resp, off)
		if err != nil || at+10 > len(resp) {
			return a, errAnswer
		}
		typ, class := binary.BigEndian.Uint16(resp[at:]), binary.BigEndian.Uint16(resp[at+2:])
		ttl := binary.BigEndian.Uint32(resp[at+4:])
		if ttl > maxTTL {
			ttl = 0 // as RFC 2181 has it
		}
		data := at + 10
		off = data + int(binary.BigEndian.Uint16(resp[at+8:]))
		if off > len(resp) {
			return a, errAnswer
		}
		owner = strings.ToLower(owner) // names of messages are ASCII, the rest escaped
		switch {
		case class != dns.ClassINET:
		case typ == dns.TypeA && off == data+4:
			if addrs == nil {
				addrs = make(map[string][]addr)
			}
			addrs[owner] = append(addrs[owner], addr{netip.AddrFrom4([4]byte(resp[data:off])), ttl})
		case typ == dns.TypeCNAME:
			to, _, err := dns.UnpackDomainName(resp, data)
			if err != nil {
				return a, errAnswer
			}
			if aliases == nil {
				aliases = make(map[string]alias)
			}
			if _, has := aliases[owner]; !has { // there may be only one
				aliases[owner] = alias{to, ttl}
			}
		}
	}
	least := uint32(maxTTL)
	at := strings.ToLower(qu.q.Name)
	for range maxChain {
		for _, x := range addrs[at] {
			a.Addrs = append(a.Addrs, x.a)
			least = min(least, x.ttl)
		}
		delete(addrs, at) // a loop gives them once
		next, ok := aliases[at]
		if !ok {
			break
		}
		delete(aliases, at)
		a.Names = append(a.Names, strings.TrimSuffix(next.to, "."))
		least = min(least, next.ttl)
		at = strings.ToLower(next.to)
	}
	a.TTL = time.Duration(least) * time.Second
	return a, nil
}

// openedPlainly reads the usual answer, of nothing but addresses of the question's
// own name, which each says by pointing at the question; ok is false of any other.
func openedPlainly(qu *question, resp []byte) (_ Answer, ok bool) {
	const size = 16 // a pointer, type, class, TTL, length, address
	b := resp[12+len(qu.raw):]
	n := int(binary.BigEndian.Uint16(resp[6:]))
	if n == 0 || len(b) < n*size {
		return Answer{}, false
	}
	room := new(struct {
		name  [1]string
		addrs [4]netip.Addr
	})
	room.name[0] = strings.TrimSuffix(qu.q.Name, ".")
	a := Answer{Names: room.name[:], Addrs: room.addrs[:0]}
	least := uint32(maxTTL)
	for ; n > 0; n, b = n-1, b[size:] {
		if binary.BigEndian.Uint64(b) != 0xc00c_0001_0001_0000|uint64(binary.BigEndian.Uint16(b[6:])) || b[10] != 0 || b[11] != 4 {
			return Answer{}, false
		}
		ttl := binary.BigEndian.Uint32(b[6:])
		if ttl > maxTTL {
			ttl = 0
		}
		least = min(least, ttl)
		a.Addrs = append(a.Addrs, netip.AddrFrom4([4]byte(b[12:16])))
	}
	a.TTL = time.Duration(least) * time.Second
	return a, true
}
